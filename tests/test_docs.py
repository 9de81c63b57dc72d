"""The pages: every one has its place, every link leads somewhere, every command and example can be typed."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from typer.testing import CliRunner

from medserl_agentloop.cli import app
from medserl_agentloop.core.run_check import check_run, unknown_keys
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.testing.tiny import compose_run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STUDIES = sorted(ROOT.glob("experiments/*/README.md"))
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *STUDIES])
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
SCRIPTS = {
    "medec_to_parquet": "convert", "medec_eval_to_parquet": "eval", "sft_to_parquet": "sft", "verify_parquet": "verify",
}  # fmt: skip
IN_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, those inside lists too, without their indentation."""
    found = re.finditer(rf"^( *)```{language}\n(.*?)^ *```", text_of(page), re.S | re.M)
    return [re.sub(rf"^{match[1]}", "", match[2], flags=re.M) for match in found]


@cache
def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    prose = re.sub(r"^ *```.*?^ *```", "", text_of(page), flags=re.S | re.M)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", prose, re.M)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@IN_PAGE
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page: Path) -> None:
    prose = re.sub(r"^ *```.*?^ *```|`[^`\n]*`", "", text_of(page), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(found), f"{page.name}: {target}; headings: {sorted(anchors(found))}"


def test_every_page_is_in_the_navigation_once() -> None:
    class Loader(yaml.SafeLoader):
        """mkdocs.yml names Python functions, which only mkdocs imports."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    site = yaml.load(text_of(ROOT / "mkdocs.yml"), Loader)

    def files(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [file for part in (entry.values() if isinstance(entry, dict) else entry) for file in files(part)]

    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert sorted(files(site["nav"])) == sorted([*pages, *(str(page.relative_to(ROOT)) for page in STUDIES)])


def commands(page: Path) -> list[list[str]]:
    """The commands of a page's shell blocks, in words, without pipes, ``&``, assignments and comments."""
    found = []
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in (*lexer, "|"):
                if set(word) <= set("|&;"):
                    found.append(words)
                    words = []
                elif words or not re.fullmatch(r"\w+=.*", word):  # VARIABLE=value before a command
                    words.append(word)
    return [words for words in found if words]


def check(words: list[str]) -> None:
    """An exception says why a command could not be typed as it stands; programs of others are not looked at."""
    program, *rest = words
    program = program.removeprefix(".venv/bin/").removeprefix(".venv-sglang/bin/")
    if program == "medserl":
        check_medserl(rest)
    elif program == "make":
        for target in (word for word in rest if "=" not in word):
            assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.M), f"make has no target {target}"
    elif program == "python" and rest[0] == "-m":
        module, *more = rest[1:]
        if module in ("verl.trainer.main_ppo", "verl.trainer.sft_trainer_ray"):
            check_overrides(more, "ppo_trainer" if module.endswith("main_ppo") else "sft_trainer_engine")
        elif module.split(".")[0] in ("medserl_agentloop", "experiments", "benchmarks"):
            place = ROOT.joinpath(*module.split("."))
            assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), f"no module {module}"
    elif program == "python" and rest[0].startswith(("data_prep/", "benchmarks/", "docs/")):
        assert (ROOT / rest[0]).exists(), f"no file {rest[0]}"
        if (name := SCRIPTS.get(Path(rest[0]).stem)) is not None:
            check_medserl(["data", name, *rest[1:]])


def check_medserl(words: list[str]) -> None:
    command: click.Command = typer.main.get_command(app)
    while isinstance(command, click.Group):
        assert words and words[0] in command.commands, f"medserl has no command {' '.join(words[:1])}"
        command, words = command.commands[words[0]], words[1:]
    whole = "..." not in words
    words = [word for word in words if word not in ("...", "--help") and not word.startswith("$")]
    command.make_context("medserl", words, resilient_parsing=not whole)
    context = click.Context(command, ignore_unknown_options=command.ignore_unknown_options)
    command.make_parser(context).parse_args(words)  # with resilient_parsing an unknown option is no error


def test_the_list_of_commands_fits_a_screen_and_every_command_has_its_panel() -> None:
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["--help"]).output
    assert len(shown.splitlines()) <= 40
    assert "─ Commands ─" not in shown and "─ Before a run ─" in shown


@cache
def without_overrides(config: str) -> DictConfig:
    return compose_run(config_name=config)


def check_overrides(words: list[str], config: str) -> None:
    words = [word.replace("$PWD", "/here") for word in words if re.match(r"[+~]*[\w.@/]+=", word)]
    if any("$" in word.replace("${", "") or word.endswith("=...") for word in words):
        return
    assert any(word.startswith("+recipes=") for word in words), "a command without a recipe"
    made_by_another_command = ("selfplay.judge_report=", "selfplay.game=rps:")
    words = [word for word in words if not word.startswith(made_by_another_command)]
    run = compose_run(*words, config_name=config)
    if unknown := unknown_keys(run, without_overrides(config)):
        raise ValueError(f"keys that verl does not have: {unknown}")
    if config == "ppo_trainer" and "+recipes=own_game" not in words:
        check_run(run)


@IN_PAGE
def test_every_command_could_be_typed(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "k")
    for words in commands(page):
        try:
            check(words)
        except (click.ClickException, HydraException, OmegaConfBaseException, ValueError, AssertionError) as error:
            message = error.format_message() if isinstance(error, click.ClickException) else error
            pytest.fail(f"{page.name}: {shlex.join(words)}: {message}")


@IN_PAGE
def test_every_example_in_python_and_yaml_can_be_read(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)
    for block in blocks(page, "yaml"):
        yaml.safe_load(block)


def test_every_criterion_has_tests_that_exist_or_a_page_or_a_named_gap() -> None:
    rows = re.findall(r"^\| (\d+\.\d) .*? \| (.+) \|$", text_of(DOCS / "traceability.md"), re.M)
    assert [number for number, _ in rows] == [f"{n}.{i}" for n in range(1, 16) for i in range(1, 6)]
    for number, evidence in rows:
        assert "](" in evidence or "`make" in evidence or "**gap**" in evidence, number
        for file, names in re.findall(r"\]\(\.\./(tests/[\w/]+\.py)\)((?:[:,] `test_\w+`)*)", evidence):
            for name in re.findall(r"test_\w+", names):
                assert re.search(rf"^(async )?def {name}\(", text_of(ROOT / file), re.M), f"{number}: {file}::{name}"


def test_every_key_of_a_run_that_a_page_names_exists() -> None:
    run = OmegaConf.to_container(compose_run("+recipes=quickstart"))
    assert isinstance(run, dict)
    run["selfplay"] = MedicalConfig().model_dump()

    def exists(key: str) -> bool:
        node: Any = run
        for part in key.split("."):
            if isinstance(node, dict) and node and part not in node and not part.startswith("<"):
                return False
            node = node.get(part) if isinstance(node, dict) else None
        return True

    nodes = "actor_rollout_ref|data|trainer|algorithm|critic|selfplay|reward|ray_kwargs|global_profiler"
    named = {
        (page.name, key)
        for page in PAGES
        for key in re.findall(rf"`'?((?:{nodes})(?:\.[\w<>]+)+)(?:=[^`]*)?`", text_of(page))
        if page.name != "CHANGELOG.md"
    }
    assert len(named) > 100
    assert {found for found in named if not exists(found[1])} == set()
