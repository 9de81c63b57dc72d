"""What the package loads runs no code of whoever made the file, but for verl's own checkpoints; see SECURITY.md."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("medserl_agentloop", "hydra_plugins", "data_prep", "prompts", "tool_configs", "recipes")
RUNS_WHAT_IT_READS = {
    *["pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"]
}
TRUSTED = {"medserl_agentloop/evaluation/local_models.py": ["torch.load"]}
"""Shards of verl's checkpoints hold tensors of torch.distributed, which weights_only refuses."""


def unsafe(source: str) -> list[str]:
    """What in a module reads data as code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [name for name in names if name.partition(".")[0] in RUNS_WHAT_IT_READS]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {key.arg: ast.unparse(key.value) for key in node.keywords}
            if name.endswith("torch.load") and given.get("weights_only") != "True":
                found.append("torch.load")
            elif name.endswith(("read_pickle", "yaml.load", "unsafe_load", "full_load")) or name in ("eval", "exec"):
                found.append(name)
            found += [f"{key}=True" for key in ("trust_remote_code", "allow_pickle") if given.get(key) == "True"]
    return found


def test_the_search_finds_what_runs_data() -> None:
    assert unsafe("import pickle; from joblib.x import load") == ["pickle", "joblib.x"]
    runs = "torch.load(f, weights_only=False); pd.read_pickle(f); yaml.load(f); np.load(f, allow_pickle=True)"
    assert unsafe(runs) == ["torch.load", "pd.read_pickle", "yaml.load", "allow_pickle=True"]
    assert unsafe("AutoModel.from_pretrained(p, trust_remote_code=True)") == ["trust_remote_code=True"]
    assert not unsafe("torch.load(f, weights_only=True); yaml.safe_load(f); model.eval(); f(trust_remote_code=asked)")


def test_nothing_that_is_read_is_run_but_verl_s_own_checkpoints() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 80
    found = {path.relative_to(ROOT).as_posix(): unsafe(path.read_text(encoding="utf-8")) for path in files}
    assert {path: what for path, what in found.items() if what} == TRUSTED
    recipes = [path.read_text(encoding="utf-8") for folder in FOLDERS for path in (ROOT / folder).rglob("*.y*ml")]
    assert recipes and not any("trust_remote_code: true" in text.lower() for text in recipes)
