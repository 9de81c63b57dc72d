"""A prompt profile with the texts of a user's own checkout of the OpenRLHF system: ``medserl data profile``.

The checkout's code is read as a syntax tree and never run.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from medserl_agentloop.paths import regular_file

PROMPTS, REQUESTS = "medical_team/prompts.py", "medical_team/utils.py"
_PREFIX = "MEDICAL_ASSISTANT_THINKING_PREFIX"
_SYSTEM = {
    "attacker/adversarial_harmful": "MEDICAL_ATTACKER_BASE_PROMPT_HARMFUL",
    "attacker/adversarial_benign": "MEDICAL_ATTACKER_BASE_PROMPT_HARMFUL",  # the one that asks for an error
    "attacker/decoy_benign": "MEDICAL_ATTACKER_BASE_PROMPT_BENIGN",
    "attacker/copy": "MEDICAL_ATTACKER_BASE_PROMPT_VANILLA",
    "assessor/assess": "MEDICAL_ASSESSOR_BASE_PROMPT",
}
"""The constant with the system message of each template."""


def profile_files(checkout: Path) -> dict[str, str]:
    """The files of the profile, by their names; a ValueError says what the checkout lacks."""
    constants = {
        name: value.value
        for name, value in _assigned(_tree(checkout, PROMPTS).body)
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    }
    if missing := sorted({*_SYSTEM.values(), _PREFIX} - constants.keys()):
        raise ValueError(f"{checkout / PROMPTS} sets no text for {', '.join(missing)}; give a checkout that does.")
    requests = dict(_requests(_tree(checkout, REQUESTS)))
    files = {"profile.yaml": f"parser: baseline\nassistant_prefix: {json.dumps(constants[_PREFIX])}\n"}
    for template, constant in _SYSTEM.items():
        if requests.get(constant, "").count("{{ note }}") != 1:
            raise ValueError(
                f"{checkout / REQUESTS}: expected system_prompt = {constant} beside user_query = f'...' with the note "
                "in it; give a checkout that has them."
            )
        # Jinja drops one line break at the end of a file.
        files[f"{template}.system.jinja"] = f"{_literal(constants[constant])}\n"
        files[f"{template}.jinja"] = f"{requests[constant]}\n"
    return files


def _tree(checkout: Path, name: str) -> ast.Module:
    try:
        return ast.parse(regular_file(checkout / name).read_bytes())
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{checkout / name}: cannot be read ({error}); give a checkout of the system.") from error


def _assigned(statements: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for statement in statements:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            yield statement.targets[0].id, statement.value


def _requests(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The user's message that is set beside each system message, by the constant of the latter."""
    for node in ast.walk(tree):
        for branch in (getattr(node, "body", None), getattr(node, "orelse", None)):
            values = dict(_assigned(branch)) if isinstance(branch, list) else {}
            system, request = values.get("system_prompt"), values.get("user_query")
            if isinstance(system, ast.Name) and isinstance(request, ast.JoinedStr):
                parts = request.values
                texts = (_literal(str(p.value)) if isinstance(p, ast.Constant) else "{{ note }}" for p in parts)
                yield system.id, "".join(texts)


def _literal(text: str) -> str:
    """``text`` for a template that shows it as it is."""
    return text.replace("{", "{{ '{' }}")
