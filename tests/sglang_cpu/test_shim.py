"""Each stand-in is still needed by the SGLang that is installed. One that fails can be deleted."""

import subprocess
import sys
import textwrap

import pytest
import torch

from medserl_agentloop.backends import sglang_cpu

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PRUNED_LENGTHS = """
from types import SimpleNamespace
from sglang.srt.layers.logits_processor import LogitsProcessor
metadata = SimpleNamespace(
    extend_logprob_pruned_lens_cpu=[1], temp_scaled_logprobs=False, top_p_normalized_logprobs=False
)
LogitsProcessor._expand_metadata_for_logprobs(None, metadata, "cpu")
"""


def run(code: str, *, shim: bool = True) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with the stand-ins on its path or without."""
    path = f"sys.path.insert(0, {sglang_cpu.SHIM!r})" if shim else ""
    code = f"import os, sys; os.environ['{sglang_cpu.SWITCH}'] = '1'; {path}\n" + code
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(
    bool(torch.version.cuda), reason="with CUDA's torch torchvision's library loads"
)
def test_torchvision_with_cpu_torch_needs_its_operators_declared() -> None:
    assert "torchvision::nms does not exist" in run("import torchvision", shim=False).stderr


def test_the_stand_in_of_torchvision_leaves_the_real_one_in_its_place() -> None:
    result = run("import torchvision; print(torchvision.__file__)")
    assert result.returncode == 0 and sglang_cpu.SHIM not in result.stdout, result.stderr


def test_sglang_still_imports_torchvision_and_kernels_for_every_model() -> None:
    hidden = "sys.modules['{}'] = None\nimport sglang.srt.mem_cache.memory_pool_host"
    for name in ("torchvision", "sgl_kernel"):
        assert name in run(hidden.format(name)).stderr
    assert run("import sglang.srt.mem_cache.memory_pool_host").returncode == 0


def test_sglang_still_pins_memory_for_prompt_log_probs() -> None:
    assert "pin" in run(PRUNED_LENGTHS).stderr
    loaded = "from sglang.srt.plugins import load_plugins; load_plugins()"
    result = run(loaded + PRUNED_LENGTHS)
    assert result.returncode == 0, result.stderr


def test_spawned_processes_have_the_stand_ins_too() -> None:
    code = """
        import importlib.util, multiprocessing
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.apply(importlib.util.find_spec, ("torchvision",)).origin)
        """
    result = run(textwrap.dedent(code))
    assert sglang_cpu.SHIM in result.stdout, result.stderr
