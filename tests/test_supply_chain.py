"""Loading a file runs no code of its author, see SECURITY.md; lock files hold nothing but
versions."""

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOLDERS = ("medserl_agentloop", "hydra_plugins", "data_prep", "prompts", "tool_configs", "recipes")
TRUSTED = {"medserl_agentloop/evaluation/local_models.py": ["torch.load("]}
"""Shards of verl's checkpoints hold tensors of torch.distributed, which weights_only refuses."""
UNSAFE = re.compile(
    r"\b(?:import|from) (?:c?pickle|_pickle|dill|cloudpickle|joblib|marshal|shelve|jsonpickle)\b"
    r"|torch\.load\((?!.*weights_only=True)|read_pickle|yaml\.load\(|unsafe_load|full_load"
    r"|(?<![\w.])(?:eval|exec)\(|(?:trust_remote_code|allow_pickle)(?:=True|: true)"
)
"""What reads data as code."""


def test_package_executes_no_file_it_reads_but_verl_checkpoints() -> None:
    assert UNSAFE.search("import pickle") and UNSAFE.search("AutoModel(p, trust_remote_code=True)")
    assert not UNSAFE.search("torch.load(f, weights_only=True); yaml.safe_load(f); model.eval()")
    files = [
        path
        for folder in FOLDERS
        for kind in ("*.py", "*.y*ml")
        for path in (ROOT / folder).rglob(kind)
    ]
    assert len(files) > 80
    found = {
        path.relative_to(ROOT).as_posix(): UNSAFE.findall(path.read_text(encoding="utf-8"))
        for path in files
    }
    assert {path: what for path, what in found.items() if what} == TRUSTED


# --- the lock files are of one piece with pyproject.toml ---


def pins(name: str) -> dict[str, str]:
    lines = [
        line.split()[0]
        for line in (ROOT / name).read_text().splitlines()
        if not line.startswith("#")
    ]
    return {
        canonicalize_name(package): version
        for package, version in (line.split("==") for line in lines)
    }


def test_the_gpu_lock_has_what_this_package_verl_and_the_engine_ask_for() -> None:
    locked = pins("constraints-gpu.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        *project["dependencies"],
        *project["optional-dependencies"]["gpu"],
        *(requires("verl") or ()),
    ]
    of_verl = ("", "sglang", "fsdp", "verl-core")
    for needed in map(Requirement, asked):
        if needed.marker is None or any(
            needed.marker.evaluate({"extra": name}) for name in of_verl
        ):
            found = locked.get(canonicalize_name(needed.name))
            assert found is not None and needed.specifier.contains(found), (str(needed), found)
    assert not {"flash-attn", "flash-attn-4"} & locked.keys()  # PyPI has no wheel of the first


def test_the_hashes_are_those_of_the_pinned_set() -> None:
    assert pins("constraints-cpu.hashes.txt") == pins("constraints-cpu.txt")
    lines = (ROOT / "constraints-cpu.hashes.txt").read_text().splitlines()
    assert all(
        re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line)
        for line in lines
        if line[0] != "#"
    )
