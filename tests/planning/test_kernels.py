"""The lock's compiler compiles without a GPU; `make test-shipped`
installs them.
"""

import os
import re
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from medserl_agentloop import backends

pytestmark = pytest.mark.skipif(
    find_spec("sgl_kernel") is None, reason="`make test-shipped` installs what this needs"
)

# The smallest Qwen3 has all that the others have, and kernels of its own for decoding. The recipe
# makes SGLang prefill with fa2 on every card.
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
    backends.use_wheels()
    subprocess.run(preload, check=True)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("card", ["9.0", "12.0"])
def test_all_kernels_of_a_qwen3_run_compile(card: str, tmp_path: Path) -> None:
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
    ]
    said = subprocess.run(
        command, env=os.environ | caches, stdout=subprocess.PIPE, text=True, timeout=7000
    ).stdout
    found = re.findall("^(\\w+) +kernels: (.*?):", said, re.M)
    print(f"sm_{card}", said, sep="\n")
    assert {status for status, _ in found} == {"ok"}
    assert {name for _, name in found} == KERNELS
