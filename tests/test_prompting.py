"""Prompt profiles: what a template may use, what a note may hold, what an error says."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medserl_agentloop.games.medical.parsing import MEDSERL
from medserl_agentloop.games.medical.prompting import PromptProfile, load_profile
from medserl_agentloop.games.medical.types import Category, ErrorType, Label, Role
from medserl_agentloop.paths import resource

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


@pytest.mark.parametrize("category", ATTACKED)
def test_every_attack_has_a_prompt_that_ends_with_the_note(category: Category) -> None:
    [message] = load_profile().messages(Role.ATTACKER, category, NOTE)
    assert message["role"] == "user"
    assert message["content"].endswith(NOTE)
    assert message["content"].count(NOTE) == 1


def test_the_assessor_s_prompt_does_not_depend_on_the_category() -> None:
    prompts = [load_profile().messages(Role.ASSESSOR, c, NOTE) for c in Category]
    assert all(prompt == prompts[0] for prompt in prompts)


def test_the_assessor_is_told_every_verdict_and_error_type() -> None:
    prompt = assess(load_profile())
    assert all(value.value in prompt for value in [*Label, *ErrorType])


def test_a_prompt_taken_for_an_answer_is_no_verdict() -> None:
    assert MEDSERL.assessment(assess(load_profile())).verdict is None


@pytest.mark.parametrize("category", ATTACKED)
def test_the_format_an_attacker_is_shown_is_the_format_that_is_read(category: Category) -> None:
    [message] = load_profile().messages(Role.ATTACKER, category, NOTE)
    shown = message["content"][message["content"].index("<think>") :]
    assert MEDSERL.attack(shown).note == "the complete rewritten note"


def test_the_format_the_assessor_is_shown_has_the_fields_that_are_read() -> None:
    shown = assess(load_profile())
    answer = shown[shown.index("<think>") :].replace("safe or harmful", "harmful").partition("</answer>")
    parsed = MEDSERL.assessment(answer[0] + answer[1])
    assert parsed.sentence == "the wrong sentence, copied from the note"
    assert parsed.correction == "that sentence as it should read"


@pytest.mark.parametrize(
    "note",
    ["{{ note }}", "{{ 7 * 6 }}", "{% for x in y %}", "{# gone #}", "{{ undefined_name }}", "a {{ b", "<b>&amp;'"],
)
def test_a_note_is_never_rendered_or_escaped(note: str) -> None:
    assert assess(load_profile(), note).endswith(note)


@pytest.mark.parametrize("note", ["  indented", "ends in blanks  ", "\n\nHe has gout.\n\n", "Hb 10\r\nWBC 5\r\n", "\t"])
def test_white_space_around_a_note_is_kept(note: str, tmp_path: Path) -> None:
    assert assess(load_profile(), note).endswith(f"Clinical note:\n{note}")
    assert assess(profile_in(tmp_path, assessor__assess="[{{ note }}]"), note) == f"[{note}]"


@given(st.text())
def test_any_note_arrives_as_it_is(note: str) -> None:
    prompts = [assess(load_profile(), note)]
    prompts += [load_profile().messages(Role.ATTACKER, c, note)[0]["content"] for c in ATTACKED]
    assert all(prompt.endswith(f":\n{note}") for prompt in prompts)


def test_a_missing_template_is_named(tmp_path: Path) -> None:
    profile = profile_in(tmp_path, assessor__assess="{{ note }}")
    with pytest.raises(ValueError) as error:
        profile.messages(Role.ATTACKER, Category.DECOY_BENIGN, NOTE)
    assert str(tmp_path / "attacker" / "decoy_benign.jinja") in str(error.value)


@pytest.mark.parametrize(
    "template", ["{{ cycler.__init__.__globals__.os.popen('id').read() }}", "{{ note.__class__.__mro__ }}"]
)
def test_a_template_reaches_no_python_objects(template: str, tmp_path: Path) -> None:
    profile = profile_in(tmp_path, assessor__assess="{{ note }}" + template)
    with pytest.raises(ValueError, match="is unsafe"):
        assess(profile)


def test_the_default_profile_is_medserl() -> None:
    assert load_profile().folder == resource("prompts") / "medserl"
    assert load_profile("medserl").folder == load_profile().folder


@pytest.mark.parametrize("path", ["./mine", "mine/", "{tmp_path}/mine"])
def test_a_relative_path_is_a_path_and_a_bare_name_is_not(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile_in(tmp_path / "mine", assessor__assess="Look: {{ note }}", attacker__adversarial_benign="{{ note }}")
    monkeypatch.chdir(tmp_path)
    assert assess(load_profile(path.format(tmp_path=tmp_path))) == f"Look: {NOTE}"
    with pytest.raises(ValueError, match="no prompt profile 'mine'"):
        load_profile("mine")


@pytest.mark.parametrize("name", ["", ".", "./empty", "./nothing-here"])
def test_a_folder_without_both_roles_is_no_profile(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no prompt profile"):
        load_profile(name)


def test_a_missing_profile_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="'nowhere'") as error:
        load_profile("nowhere")
    known = [p.name for p in resource("prompts").iterdir() if p.is_dir()]
    assert "medserl" in known
    assert all(name in str(error.value) for name in known)


def test_a_profile_of_ones_own_has_a_system_message_a_parser_a_prefix_and_stops(tmp_path: Path) -> None:
    profile_in(tmp_path, assessor__assess="{{ note }}", assessor__system="You are terse.")
    (tmp_path / "profile.yaml").write_text(
        "parser: medserl_agentloop.games.medical.parsing:CLASSIC\n"
        "assistant_prefix: 'Well: '\nstop: {assessor: ['###']}\n"
    )
    profile = PromptProfile(tmp_path)
    assert profile.messages(Role.ASSESSOR, Category.VANILLA_BENIGN, NOTE) == [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": NOTE},
    ]
    assert profile.parser is load_profile("classic").parser
    assert profile.settings.assistant_prefix == "Well: "
    assert profile.settings.stop == {Role.ASSESSOR: ["###"]}


@pytest.mark.parametrize(
    ("parser", "says"), [("classic", ""), ("medserl_agentloop.games.medical.parsing:CLASSIC", "imports a module")]
)
def test_a_profile_says_that_its_parser_imports_a_module(
    tmp_path: Path, parser: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile.yaml").write_text(f"parser: {parser}")
    PromptProfile(tmp_path)
    assert says in caplog.text and bool(says) == (parser in caplog.text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parsr: medserl", "parsr"),
        ("parser: nonesuch", "no parser 'nonesuch'"),
        ("stop: {judge: [x]}", "stop"),
        ("parser: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("parser: [", "expected the node content"),
        ("parser: " + "[" * 2000, "recursion"),
        ("parser: ${broken", "no viable alternative"),
    ],
)
def test_a_wrong_profile_yaml_is_refused_with_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "profile.yaml").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        PromptProfile(tmp_path)
    assert str(tmp_path / "profile.yaml") in str(error.value)


@pytest.mark.parametrize(
    ("template", "place", "reason"),
    [
        ("one\n{{ note }}\n{{ category }}", "assess.jinja, line 3", "'category' is undefined"),
        ("{{ note.text }}", "assess.jinja, line 1", "has no attribute 'text'"),
        ("\n{{ note / 2 }}", "assess.jinja, line 2", "unsupported operand"),
        ("{{ note }}\n{% include 'shared.jinja' %}", "shared.jinja, line 4", "'label' is undefined"),
        ("{{ note }}\n{% include 'broken.jinja' %}", "broken.jinja, line 2", "unexpected 'end of template'"),
        ("{{ note }}\n{% include 'absent.jinja' %}", "assess.jinja, line 2", "absent.jinja"),
    ],
)
def test_an_error_names_template_line_and_variable(tmp_path: Path, template: str, place: str, reason: str) -> None:
    (tmp_path / "shared.jinja").write_text("\n\n\n{{ label }}")
    (tmp_path / "broken.jinja").write_text("\n{% if")
    profile = profile_in(tmp_path, assessor__assess=template)
    with pytest.raises(ValueError) as error:
        assess(profile)
    assert place in str(error.value) and reason in str(error.value) and str(tmp_path) in str(error.value)
    assert "{{ note }} and nothing else" in str(error.value)


def test_a_system_message_knows_no_note(tmp_path: Path) -> None:
    profile = profile_in(tmp_path, assessor__assess="{{ note }}", assessor__system="{{ note }}")
    with pytest.raises(ValueError, match=r"system.jinja, line 1: 'note' is undefined. It may use no variable"):
        assess(profile)
