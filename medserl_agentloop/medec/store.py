"""The name under which the cases of a file were known before they were a plain list."""

from medserl_agentloop.medec.vignettes import Vignette

VignetteStore = list[Vignette]
