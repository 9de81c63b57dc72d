"""The lock files are of one piece with pyproject.toml, and hold nothing but versions."""

import re
import tomllib
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from medserl_agentloop.paths import PACKAGE

ROOT = PACKAGE.parent


def pins(name: str) -> dict[str, str]:
    lines = [line.split()[0] for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize("engine", ["gpu", "vllm"])
def test_a_gpu_lock_has_what_this_package_verl_and_the_engine_ask_for(engine: str) -> None:
    locked = pins(f"constraints-{engine}.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"][engine], *(requires("verl") or ())]
    of_verl = ("", "sglang" if engine == "gpu" else "vllm", "fsdp", "verl-core")
    for needed in map(Requirement, asked):
        if needed.marker is None or any(needed.marker.evaluate({"extra": name}) for name in of_verl):
            found = locked.get(canonicalize_name(needed.name))
            assert found is not None and needed.specifier.contains(found), (str(needed), found)
    assert locked["flash-attn"] == "2.8.3" and "flash-attn-4" not in locked


def test_the_hashes_are_those_of_the_pinned_set() -> None:
    assert pins("constraints-cpu.hashes.txt") == pins("constraints-cpu.txt")
    lines = (ROOT / "constraints-cpu.hashes.txt").read_text().splitlines()
    assert all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines if line[0] != "#")


@pytest.mark.parametrize("file", sorted(ROOT.glob("constraints-*.txt")), ids=lambda file: file.name)
def test_a_lock_file_names_no_index_of_its_own(file: object) -> None:
    text = "\n".join(line for line in (ROOT / str(file)).read_text().splitlines() if not line.startswith("#"))
    assert "://" not in text and "--index" not in text and "--find-links" not in text
