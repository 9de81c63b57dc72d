"""SGLang's OpenAI-compatible server on a machine without an accelerator.

``python -m medserl_agentloop.backends.sglang_cpu --model-path FOLDER --port 30000``: for a judge, an opponent or an
evaluation that asks a server. All arguments of ``sglang.launch_server`` are taken; these come first.
"""

import os
import runpy
import sys

from medserl_agentloop.backends import sglang_cpu

NEEDS_NO_ACCELERATOR = (
    "--device=cpu",
    "--dtype=float32",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--grammar-backend=llguidance",
    "--disable-overlap-schedule",
    # A small model that is bound to a schema would otherwise write blank lines until its budget is spent.
    "--constrained-json-disable-any-whitespace",
)

if __name__ == "__main__":
    os.environ[sglang_cpu.SWITCH] = "1"
    sglang_cpu.register()
    sys.argv[1:] = [*NEEDS_NO_ACCELERATOR, *sys.argv[1:]]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
