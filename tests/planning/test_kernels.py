"""The kernels of a GPU run compile with the lock's own compiler, without a GPU; `make test-shipped` installs it."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# The smallest Qwen3 has all that the others have, and kernels of its own for decoding.
KERNELS = {"silu_and_mul", "clamp_position", "resolve_future_token_ids", "rope", "qknorm", "store_cache"}
KERNELS |= {"merge_state", "sampling", "prefill (fa2)", "decode"}


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(find_spec("flashinfer") is None, reason="`make test-shipped` installs what this needs")
@pytest.mark.parametrize(("card", "more"), [("9.0", {"prefill (fa3)"}), ("12.0", set())])
def test_all_kernels_of_a_qwen3_run_compile(card: str, more: set[str], tmp_path: Path) -> None:
    caches = {"HOME": str(tmp_path), "TVM_FFI_CACHE_DIR": str(tmp_path), "FLASHINFER_CUDA_ARCH_LIST": card}
    command = [Path(sys.executable).with_name("medserl"), "doctor", "qwen3_0_6b", "--compile", "--json"]
    said = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE, text=True, timeout=7000).stdout
    found = [finding for finding in json.loads(said) if finding["check"] == "kernels"]
    print(f"sm_{card}", *(finding["text"] for finding in found), sep="\n")
    assert {finding["status"] for finding in found} == {"ok"}
    assert {finding["text"].partition(":")[0] for finding in found} == KERNELS | more
