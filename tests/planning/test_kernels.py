"""The lock's compiled packages load and its compiler compiles without a GPU; `make test-shipped`
installs them.
"""

import json
import os
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
from run_check.runs import run_of

from medserl_agentloop import compiler, engine_check

pytestmark = pytest.mark.skipif(
    find_spec("sgl_kernel") is None, reason="`make test-shipped` installs what this needs"
)

# The smallest Qwen3 has all that the others have, and kernels of its own for decoding.
KERNELS = {"qknorm", "store_cache", "merge_state", "sampling", "prefill (fa2)", "decode"}


@pytest.mark.parametrize("named", ["", "/opt/cuda"])
def test_memory_savers_hook_needs_no_cuda_but_the_wheels(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_memory_saver import configure_subprocess

    # A driver is here in name only: the compiler's stand-in for it.
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{sysconfig.get_path('purelib')}/nvidia/cu13/lib/stubs")
    monkeypatch.setenv("CUDA_HOME", named)
    with configure_subprocess():
        hook = os.environ["LD_PRELOAD"]
    assert Path(hook).is_file()  # one that is missing is ignored
    # Without the loader's cache, in which a CUDA toolkit of this machine would hide what is
    # missing.
    preload = ["/lib64/ld-linux-x86-64.so.2", "--inhibit-cache", "--preload", hook, "/bin/true"]
    assert subprocess.run(preload).returncode == 127, (
        "the wheels' libraries are found without `use_wheels`"
    )
    compiler.use_wheels()
    subprocess.run(preload, check=True)


def test_compiled_packages_load_without_a_gpu() -> None:
    assert not list(engine_check.libraries(run_of({}, "qwen3_0_6b")))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("card", "more"), [("9.0", {"prefill (fa3)"}), ("12.0", set())])
def test_all_kernels_of_a_qwen3_run_compile(card: str, more: set[str], tmp_path: Path) -> None:
    caches = {
        "HOME": str(tmp_path),
        "TVM_FFI_CACHE_DIR": str(tmp_path),
        "FLASHINFER_CUDA_ARCH_LIST": card,
    }
    command = [
        Path(sys.executable).with_name("medserl"),
        "doctor",
        "qwen3_0_6b",
        "--compile",
        "--json",
    ]
    said = subprocess.run(
        command, env=os.environ | caches, stdout=subprocess.PIPE, text=True, timeout=7000
    ).stdout
    found = [finding for finding in json.loads(said) if finding["check"] == "kernels"]
    print(f"sm_{card}", *(finding["text"] for finding in found), sep="\n")
    assert {finding["status"] for finding in found} == {"ok"}
    assert {finding["text"].partition(":")[0] for finding in found} == KERNELS | more
