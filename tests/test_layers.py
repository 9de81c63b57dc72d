"""The arrows between the parts of the package point one way, and the core names no game."""

import ast
import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import medserl_agentloop

PACKAGE = Path(medserl_agentloop.__file__).parent
MODULES = {
    ".".join(("medserl_agentloop", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in PACKAGE.rglob("*.py")
    if "shim" not in path.parts
}
WORDS_OF_MEDICINE = re.compile(
    r"attacker|assessor|note\b|medic|judge|categor|agentloop\.games", re.IGNORECASE
)

MAY_IMPORT = {
    "core": {"backends"},
    "backends": {"core"},
    "games": {"core", "scoring"},
    "data": {"core", "games"},
    "report": {"core", "games", "scoring"},
    "scoring": set(),
    "testing": {"backends", "core"},
}
"""Parts of the package that may import only these others, and ``ANYWHERE``, however deep in a
function.

None may import ``medical_team``, the room of the old systems: what is there is found by a user's
name.
"""

ANYWHERE = {"paths", "terminal"}


VERLS_NAMES = {"ServerAdapter"}
"""Names that verl gives a part of each rollout, and that ours have too: who knows one rollout of
verl's knows ours.
"""


def imports(module: str, *, everywhere: bool) -> set[str]:
    """Modules of ours that a module imports: at its top, or ``everywhere``; not for types alone."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{name.name}" for name in node.names} | {node.module}
    return found & MODULES.keys()


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_arrows_between_parts_point_one_way(part: str) -> None:
    own = [name for name in MODULES if name.split(".")[1:2] == [part]]
    assert own
    allowed = {part, *MAY_IMPORT[part], *ANYWHERE}
    wrong = {
        (name, other)
        for name in own
        for other in imports(name, everywhere=True)
        if other.count(".") and other.split(".")[1] not in allowed
    }
    assert not wrong


def test_no_module_imports_itself_through_others() -> None:
    graph = {name: imports(name, everywhere=False) - {name} for name in MODULES}
    TopologicalSorter(graph).prepare()  # a CycleError names the circle


def test_the_core_names_no_game() -> None:
    said = [
        f"{path.name}, line {number}: {line}"
        for path in (PACKAGE / "core").rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if WORDS_OF_MEDICINE.search(line)
    ]
    assert not said


def test_no_two_public_classes_have_one_name() -> None:
    names = Counter(
        node.name
        for path in MODULES.values()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == VERLS_NAMES
