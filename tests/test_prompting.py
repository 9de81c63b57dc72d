"""Prompt profiles: those of the package, what a template may use, what a note may hold, what an
error says.
"""

from pathlib import Path
from typing import Any

import pytest
from game.builders import assessment_text

from medserl_agentloop.games.medical.case import Category, ErrorType, Role
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.prompting import PromptProfile, load_profile

NOTE = "He has gout. He rests."
ATTACKED = [c for c in Category if c.has_attack]


def profile_in(folder: Path, **templates: str) -> PromptProfile:
    """A profile of the given templates, ``role__name="text"``."""
    for name, text in templates.items():
        path = folder / (name.replace("__", "/") + ".jinja")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return PromptProfile(folder)


def assess(profile: PromptProfile, note: str = NOTE) -> str:
    [*_, message] = profile.messages(Role.ASSESSOR, Category.VANILLA_BENIGN, note)
    return message["content"]


PROFILES = pytest.mark.parametrize("name", ["baseline", "classic", "edits", "medserl"])


@PROFILES
def test_a_profile_has_a_prompt_for_every_turn_that_ends_with_the_note(name: str) -> None:
    profile = load_profile(name)
    prompts = [profile.messages(Role.ATTACKER, category, NOTE) for category in ATTACKED]
    prompts.append(profile.messages(Role.ASSESSOR, Category.VANILLA_BENIGN, NOTE))
    for *system, user in prompts:
        text = user["content"]
        assert user["role"] == "user" and text.endswith(f"\n{NOTE}") and text.count(NOTE) == 1
        assert [message["role"] for message in system] == (["system"] if name == "classic" else [])
        assert all(NOTE not in message["content"] for message in system)
    assert (profile.settings.assistant_prefix == "<think>\n") == (name == "baseline")
    assert len({str(prompt) for prompt in prompts}) == len(prompts)


@PROFILES
@pytest.mark.parametrize("category", ATTACKED)
def test_the_format_that_an_attacker_is_shown_is_read(name: str, category: Category) -> None:
    """From the first line that looks like an answer, as if the model had copied the example."""
    prompt = load_profile(name).messages(Role.ATTACKER, category, NOTE)[-1]["content"]
    shown = {"classic": "generated_note:", "baseline": "</think><answer>"}.get(name, "<think>")
    parsed = load_profile(name).parser.attack(prompt[prompt.index(shown) :])
    if name == "edits":
        assert parsed.edit is not None and parsed.edit.old == "its number"
    else:
        assert parsed.note is not None and parsed.note.startswith("the complete")


def test_the_format_the_assessor_is_shown_has_the_fields_that_are_read() -> None:
    shown = assess(load_profile())
    assert all(kind.value in shown for kind in ErrorType)
    parsed = MEDSERL.assessment(
        shown[shown.index("<think>") :].replace("safe or harmful", "harmful")
    )
    assert parsed.sentence == "the wrong sentence, copied from the note"
    assert parsed.correction == "that sentence as it should read"


def test_error_types_of_a_run_are_used_by_prompts_answers_and_rows() -> None:
    types = ("dosage", "drug_interaction")
    names = ("medserl", "classic", "baseline", "edits")
    told = {name: load_profile(name, types).templates() for name in names}
    said = {name: " ".join(str(row["messages"]) for row in rows) for name, rows in told.items()}
    assert all("dosage or " in text and "drug interaction" in text for text in said.values())
    assert not any("treatment, " in text for text in said.values())
    assert "error_type: dosage or drug_interaction" in said["medserl"]

    medical = MedicalGameInteraction(MedicalConfig(judge="labels", error_types=types))
    facts = {"category": "vanilla_harmful", "error_note": NOTE}
    for answered, known in (("Drug interaction", "drug_interaction"), ("diagnosis", None)):
        game = medical.new_game(facts | {"error_type": answered})
        located = ("sentence: He rests.", f"error_type: {answered}", "correction: He runs.")
        game.play(assessment_text("verdict: harmful", *located))
        (answer,) = game.record.assessments
        assert game.record.spec.error_type == answer.error_type == known
        assert answer.violations == ([] if known else ["no_error_type"])


@pytest.mark.parametrize(
    "types", [[], ["dosage", "Dosage"], ["a/b"], ["x" * 41], ["dosage", ""], 5]
)
def test_error_types_that_no_answer_could_name_are_refused(types: Any) -> None:
    with pytest.raises(ValueError, match="error type"):
        MedicalConfig(judge="labels", error_types=types)


@pytest.mark.parametrize("path", ["./mine", "mine/", "{tmp_path}/mine"])
def test_a_relative_path_is_a_path_and_a_bare_name_is_not(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile_in(
        tmp_path / "mine",
        assessor__assess="Look: {{ note }}",
        attacker__adversarial_benign="{{ note }}",
    )
    monkeypatch.chdir(tmp_path)
    assert assess(load_profile(path.format(tmp_path=tmp_path))) == f"Look: {NOTE}"
    with pytest.raises(ValueError, match="no prompt profile 'mine'"):
        load_profile("mine")


def test_custom_profile_has_a_system_message_parser_prefix_and_stops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profile_in(tmp_path, assessor__assess="{{ note }}", assessor__system="You are terse.")
    settings = "assistant_prefix: 'Well: '\nstop: {assessor: ['###']}\n"
    (tmp_path / "profile.yaml").write_text(
        f"parser: medserl_agentloop.medical_team.formats:CLASSIC\n{settings}"
    )
    profile = PromptProfile(tmp_path)
    messages = profile.messages(Role.ASSESSOR, Category.VANILLA_BENIGN, NOTE)
    assert [tuple(each.values()) for each in messages] == [
        ("system", "You are terse."),
        ("user", NOTE),
    ]
    assert "imports a module" in caplog.text and "CLASSIC" in caplog.text
    assert profile.parser is load_profile("classic").parser
    assert profile.settings.assistant_prefix == "Well: "
    assert profile.settings.stop == {Role.ASSESSOR: ["###"]}
    profile_in(tmp_path, assessor__system="{{ note }}")
    with pytest.raises(ValueError, match=r"system.jinja, line 1: 'note' is undefined"):
        assess(PromptProfile(tmp_path))


def test_a_wrong_profile_yaml_is_refused_with_file_and_key(tmp_path: Path) -> None:
    for text, said in (
        ("parsr: medserl", "parsr"),
        ("parser: nonesuch", "no parser 'nonesuch'"),
        ("parser: !!python/object/apply:os.system [id]", "could not determine a constructor"),
    ):
        (tmp_path / "profile.yaml").write_text(text)
        with pytest.raises(ValueError, match=said) as error:
            PromptProfile(tmp_path)
        assert str(tmp_path / "profile.yaml") in str(error.value)


WRONG = [
    ("one\n{{ note }}\n{{ category }}", "assess.jinja, line 3", "'category' is undefined"),
    ("{% include 'broken.jinja' %}", "broken.jinja, line 2", "unexpected 'end of template'"),
    ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "assess.jinja", "is unsafe"),
]


@pytest.mark.parametrize(("template", "place", "reason"), WRONG)
def test_an_error_names_template_line_and_variable(
    tmp_path: Path, template: str, place: str, reason: str
) -> None:
    (tmp_path / "broken.jinja").write_text("\n{% if")
    profile = profile_in(tmp_path, assessor__assess=template)
    with pytest.raises(ValueError) as error:
        assess(profile)
    parts = ("{{ note }} and {{ error_types }}, and nothing else", place, reason, str(tmp_path))
    assert all(part in str(error.value) for part in parts)
    with pytest.raises(ValueError, match=str(tmp_path / "attacker" / "decoy_benign.jinja")):
        profile.messages(Role.ATTACKER, Category.DECOY_BENIGN, NOTE)
