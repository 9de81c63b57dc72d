"""Each stand-in is still needed by the SGLang that is installed.

One that fails here can be deleted.
"""

import subprocess
import sys
import textwrap

import pytest

from medserl_agentloop.backends import sglang_cpu

FIRST, LAST = (str(sglang_cpu.SHIM / name) for name in ("first", "last"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PRUNED_LENGTHS = """
from types import SimpleNamespace
from sglang.srt.layers.logits_processor import LogitsProcessor
metadata = SimpleNamespace(
    extend_logprob_pruned_lens_cpu=[1], temp_scaled_logprobs=False, top_p_normalized_logprobs=False
)
LogitsProcessor._expand_metadata_for_logprobs(None, metadata, "cpu")
"""


def run(code: str, *shim: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with parts of the shim on its path as the backend puts them
    there.
    """
    paths = (
        f"sys.path[:] = {[p for p in shim if p == FIRST]} + sys.path + "
        f"{[p for p in shim if p == LAST]}"
    )
    code = (
        f"import os, sys; os.environ['{sglang_cpu.SWITCH}'] = '1'; {paths}\n{textwrap.dedent(code)}"
    )
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120
    )


def test_torchvision_beside_cpu_torch_needs_its_operators_declared() -> None:
    assert "torchvision::nms does not exist" in run("import torchvision").stderr
    result = run("import torchvision; print(torchvision.__file__)", FIRST)
    assert "site-packages" in result.stdout, result.stderr


def test_sglang_still_imports_torchvision_for_every_model() -> None:
    hidden = "sys.modules['torchvision'] = None\nimport sglang.srt.utils.common"
    assert "torchvision" in run(hidden, FIRST, LAST).stderr


def test_sglang_still_imports_kernels_that_need_an_accelerator() -> None:
    code = "import sglang.srt.mem_cache.memory_pool_host"
    assert "No module named 'sgl_kernel'" in run(code, FIRST).stderr
    assert run(code, FIRST, LAST).returncode == 0


def test_sglang_still_pins_memory_for_prompt_log_probs() -> None:
    assert "pin_memory=True requires" in run(PRUNED_LENGTHS, FIRST, LAST).stderr
    loaded = "from sglang.srt.plugins import load_plugins; load_plugins()"
    result = run(loaded + PRUNED_LENGTHS, FIRST, LAST)
    assert result.returncode == 0, result.stderr


def test_spawned_processes_have_the_stand_ins_too() -> None:
    result = run(
        """
        import importlib.util, multiprocessing
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.apply(importlib.util.find_spec, ("sgl_kernel.kvcacheio",)).origin)
        """,
        FIRST,
        LAST,
    )
    assert LAST in result.stdout, result.stderr
