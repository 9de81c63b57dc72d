"""An older name for a list of cases; nothing in the package uses it."""

from medserl_agentloop.medec.vignettes import Vignette

VignetteStore = list[Vignette]
