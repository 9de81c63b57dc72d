"""The prompts of the ``baseline`` profile under the original's names; docs/prompts.md has both line
by line.

:func:`profile_files` makes a profile with the texts of a user's own checkout of the original.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

from medserl_agentloop.games.medical.prompting import load_profile
from medserl_agentloop.games.medical.types import Category, Role
from medserl_agentloop.paths import regular_file


def _parts(role: Role, category: Category) -> tuple[str, str]:
    """A template's system prompt, and the request in its last paragraph, which the note follows."""
    [message] = load_profile("baseline").messages(role, category, "")
    system, _, request = message["content"].rpartition("\n\n")
    return system, request.strip()


ATTACKER_PROMPTS = {
    "harmful": _parts(Role.ATTACKER, Category.ADVERSARIAL_HARMFUL),
    "benign": _parts(Role.ATTACKER, Category.DECOY_BENIGN),  # the original asks for no error here
    "vanilla": _parts(Role.ATTACKER, Category.VANILLA_BENIGN),
}
"""System prompt and request for each game type."""

MEDICAL_ATTACKER_BASE_PROMPT_HARMFUL = ATTACKER_PROMPTS["harmful"][0]
MEDICAL_ATTACKER_BASE_PROMPT_BENIGN = ATTACKER_PROMPTS["benign"][0]
MEDICAL_ATTACKER_BASE_PROMPT_VANILLA = ATTACKER_PROMPTS["vanilla"][0]
MEDICAL_ASSESSOR_BASE_PROMPT, ASSESSOR_REQUEST = _parts(Role.ASSESSOR, Category.VANILLA_BENIGN)
DEFENDER_INSTRUCTION_COT_PROMPT = (
    f"{MEDICAL_ASSESSOR_BASE_PROMPT}\n\n{ASSESSOR_REQUEST}\n\n{{user_query}}"
)
"""The assessor's prompt in one, as the trainer of OpenRLHF's fork imports it."""
MEDICAL_ASSISTANT_THINKING_PREFIX = (
    "<think>"  # how the prompt begins every turn, unless chain of thought is off
)

# No prompt uses these two, here as in the original: the base prompts say the same.
MEDICAL_ATTACKER_SYSTEM_PROMPT = (
    "You help to train the detection of medical errors: you put subtle, realistic errors into "
    "clinical notes, as they "
    "could happen in practice."
)
MEDICAL_ASSESSOR_SYSTEM_PROMPT = (
    "You are an expert who reviews clinical notes. Read each one carefully for medical accuracy "
    "and for what could "
    "harm the patient."
)


# -- the texts of a user's own checkout: ``medserl data profile`` ----------------------------------

# The checkout's code is read as a syntax tree and never run.
_PREFIX = "MEDICAL_ASSISTANT_THINKING_PREFIX"
_SYSTEM = {
    "attacker/adversarial_harmful": "MEDICAL_ATTACKER_BASE_PROMPT_HARMFUL",
    # the one that asks for an error
    "attacker/adversarial_benign": "MEDICAL_ATTACKER_BASE_PROMPT_HARMFUL",
    "attacker/decoy_benign": "MEDICAL_ATTACKER_BASE_PROMPT_BENIGN",
    "attacker/copy": "MEDICAL_ATTACKER_BASE_PROMPT_VANILLA",
    "assessor/assess": "MEDICAL_ASSESSOR_BASE_PROMPT",
}
"""The constant with the system message of each template.

The user's message is set beside it, in ``utils.py``.
"""


def profile_files(checkout: Path) -> dict[str, str]:
    """The files of the profile, by their names; a ValueError says what the checkout lacks."""
    prompts, utils = (checkout / "medical_team" / name for name in ("prompts.py", "utils.py"))
    constants = _assigned(_tree(prompts).body)
    texts = {
        name: str(node.value) for name, node in constants.items() if isinstance(node, ast.Constant)
    }
    if missing := sorted({*_SYSTEM.values(), _PREFIX} - texts.keys()):
        raise ValueError(
            f"{prompts} sets no text for {', '.join(missing)}; give a checkout that does."
        )
    requests: dict[str, str] = {}
    for node in ast.walk(_tree(utils)):
        for branch in (node.body, node.orelse) if isinstance(node, ast.If) else ():
            system, request = map(_assigned(branch).get, ("system_prompt", "user_query"))
            if isinstance(system, ast.Name) and isinstance(request, ast.JoinedStr):
                requests[system.id] = "".join(map(_shown, request.values))
    files = {"profile.yaml": f"parser: baseline\nassistant_prefix: {json.dumps(texts[_PREFIX])}\n"}
    for template, constant in _SYSTEM.items():
        if requests.get(constant, "").count("{{ note }}") != 1:
            expected = f"system_prompt = {constant} beside user_query = f'...' with the note in it"
            raise ValueError(f"{utils}: expected {expected}; give a checkout that has them.")
        system_text = _shown(ast.Constant(texts[constant]))
        # Jinja drops one line break at the end of a file.
        files |= {
            f"{template}.system.jinja": f"{system_text}\n",
            f"{template}.jinja": f"{requests[constant]}\n",
        }
    return files


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(regular_file(path).read_bytes())
    except (OSError, SyntaxError) as error:
        raise ValueError(
            f"{path}: cannot be read ({error}); give a checkout of the system."
        ) from error


def _assigned(statements: list[ast.stmt]) -> dict[str, ast.expr]:
    assigned = [each for each in statements if isinstance(each, ast.Assign)]
    return {
        each.targets[0].id: each.value for each in assigned if isinstance(each.targets[0], ast.Name)
    }


def _shown(part: ast.expr) -> str:
    """A part of a text as a template that shows it: braces are no variables, and what Python fills
    in is the note.
    """
    return (
        str(part.value).replace("{", "{{ '{' }}")
        if isinstance(part, ast.Constant)
        else "{{ note }}"
    )
