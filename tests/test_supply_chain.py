"""Loading a file runs no code of its author, see SECURITY.md; lock files hold nothing but
versions."""

import ast
import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOLDERS = ("medserl_agentloop", "hydra_plugins", "data_prep", "prompts", "tool_configs", "recipes")
UNSAFE_READERS = {
    *[
        "pickle",
        "cPickle",
        "_pickle",
        "dill",
        "cloudpickle",
        "joblib",
        "marshal",
        "shelve",
        "jsonpickle",
    ]
}
TRUSTED = {"medserl_agentloop/evaluation/local_models.py": ["torch.load"]}
"""Shards of verl's checkpoints hold tensors of torch.distributed, which weights_only refuses."""


def unsafe(source: str) -> list[str]:
    """Return the imports and calls of a module that read data as code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            found += [name for name in names if name.partition(".")[0] in UNSAFE_READERS]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {key.arg: ast.unparse(key.value) for key in node.keywords}
            if name.endswith("torch.load") and given.get("weights_only") != "True":
                found.append("torch.load")
            elif name.endswith(
                ("read_pickle", "yaml.load", "unsafe_load", "full_load")
            ) or name in ("eval", "exec"):
                found.append(name)
            found += [
                f"{key}=True"
                for key in ("trust_remote_code", "allow_pickle")
                if given.get(key) == "True"
            ]
    return found


def test_the_search_finds_what_runs_data() -> None:
    assert unsafe("import pickle; from joblib.x import load") == ["pickle", "joblib.x"]
    runs = (
        "torch.load(f, weights_only=False); pd.read_pickle(f); yaml.load(f); np.load(f, "
        "allow_pickle=True)"
    )
    assert unsafe(runs) == ["torch.load", "pd.read_pickle", "yaml.load", "allow_pickle=True"]
    assert unsafe("AutoModel.from_pretrained(p, trust_remote_code=True)") == [
        "trust_remote_code=True"
    ]
    assert not unsafe(
        "torch.load(f, weights_only=True); yaml.safe_load(f); model.eval(); "
        "f(trust_remote_code=asked)"
    )


def test_package_executes_no_file_it_reads_but_verl_checkpoints() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 80
    found = {
        path.relative_to(ROOT).as_posix(): unsafe(path.read_text(encoding="utf-8"))
        for path in files
    }
    assert {path: what for path, what in found.items() if what} == TRUSTED
    recipes = [
        path.read_text(encoding="utf-8")
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.y*ml")
    ]
    assert recipes and not any("trust_remote_code: true" in text.lower() for text in recipes)


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


@pytest.mark.parametrize("file", sorted(ROOT.glob("constraints-*.txt")), ids=lambda file: file.name)
def test_a_lock_file_names_no_index_of_its_own(file: object) -> None:
    text = "\n".join(
        line for line in (ROOT / str(file)).read_text().splitlines() if not line.startswith("#")
    )
    assert "://" not in text and "--index" not in text and "--find-links" not in text
