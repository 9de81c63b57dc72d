"""The pages: every one has its place, every link leads somewhere, every command and example can be
typed.
"""

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import dropwhile, groupby
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml
from make_reference import REFERENCE, TABLES, entries, is_node, with_reference
from omegaconf import OmegaConf
from planning.gpu_recipes import JUDGE_SERVER

from medserl_agentloop.cli import app
from medserl_agentloop.core.run_check import check_run, unknown_keys
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.testing import compose_run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STUDIES = sorted(ROOT.glob("experiments/*/README.md"))
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *STUDIES])
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
SCRIPTS = {"medec_to_parquet": "convert", "sft_to_parquet": "sft", "verify_parquet": "verify"}
OWN = ("medserl_agentloop", "experiments", "benchmarks")
WITHOUT_OVERRIDES = cache(compose_run)
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
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    titles = re.findall(r"^#+ (.+)$", prose, re.M)
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
            assert anchor in anchors(found), f"{page.name}: {target}"


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"([\w/]+\.md)$", text_of(ROOT / "mkdocs.yml").partition("\nnav:")[2], re.M)
    pages = [
        *(page.relative_to(DOCS) for page in DOCS.rglob("*.md")),
        *(page.relative_to(ROOT) for page in STUDIES),
    ]
    assert sorted(listed) == sorted(map(str, pages))


def test_the_configuration_page_lists_every_recipe_once() -> None:
    table = text_of(DOCS / "configuration.md").partition("| recipe |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    listed = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(listed) == sorted(path.stem for path in ROOT.glob("recipes/*.yaml"))


def commands(page: Path) -> Iterator[list[str]]:
    """The commands of a page's shell blocks, in words, without what stands around them."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
            lexer.whitespace_split = True
            for is_end, words in groupby(lexer, key=lambda word: set(word) <= set("|&;")):
                command = list(dropwhile(re.compile(r"\w+=").match, words))  # VARIABLE=value
                if command and not is_end:
                    yield command


def check(words: list[str]) -> None:
    """An exception says why a command could not be typed; programs of others are not looked at."""
    program, *rest = words
    match program.rpartition("/")[2], rest:
        case "medserl", _:
            check_medserl(rest)
        case "make", _:
            for target in (word for word in rest if "=" not in word):
                assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.M), target
        case "python", ["-m", "verl.trainer.main_ppo", *more]:
            check_overrides(more, "ppo_trainer")
        case "python", ["-m", "verl.trainer.sft_trainer_ray", *more]:
            check_overrides(more, "sft_trainer_engine")
        case "python", ["-m", module, *_] if module.split(".")[0] in OWN:
            place = ROOT.joinpath(*module.split("."))
            assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module
        case "python", [script, *more] if script.startswith(("data_prep/", "benchmarks/", "docs/")):
            assert (ROOT / script).exists(), f"no file {script}"
            if (name := SCRIPTS.get(Path(script).stem)) is not None:
                check_medserl(["data", name, *more])


def check_medserl(words: list[str]) -> None:
    command: click.Command = typer.main.get_command(app)
    while isinstance(command, click.Group):
        assert words and words[0] in command.commands, f"medserl has no command {words[:1]}"
        command, words = command.commands[words[0]], words[1:]
    whole = "..." not in words
    words = [word for word in words if word not in ("...", "--help") and not word.startswith("$")]
    command.make_context("medserl", words, resilient_parsing=not whole)
    # With resilient_parsing an unknown option is no error.
    context = click.Context(command, ignore_unknown_options=command.ignore_unknown_options)
    command.make_parser(context).parse_args(words)


def check_overrides(words: list[str], config: str) -> None:
    words = [word.replace("$PWD", "/here") for word in words if re.match(r"[+~]*[\w.@/]+=", word)]
    if any("$" in word.replace("${", "") or word.endswith("=...") for word in words):
        return
    assert any(word.startswith("+recipes=") for word in words), "a command without a recipe"
    made_by_another_command = ("selfplay.judge_report=", "selfplay.game=rps:")
    if any("=my_" in word for word in words):  # tests/test_extending.py
        return
    words = [word for word in words if not word.startswith(made_by_another_command)]
    run = compose_run(*words, config_name=config)
    if unknown := unknown_keys(run, WITHOUT_OVERRIDES(config_name=config)):
        raise ValueError(f"keys that verl does not have: {unknown}")
    if config == "ppo_trainer" and "+recipes=[core,cpu,tiny]" not in words:
        check_run(run)


@IN_PAGE
def test_every_command_could_be_typed(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "k")
    for words in commands(page):
        print(shlex.join(words))  # pytest shows the last one where it fails
        check(words)


def test_jobs_of_clusters_can_be_read_and_run_a_command_that_composes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "k")
    folder = DOCS / "clusters"
    sky = yaml.safe_load((folder / "skypilot.yaml").read_text())
    scripts = [(folder / f"{name}.sh").read_text() for name in ("until_done", "slurm")]
    for script in (*scripts, sky["setup"], sky["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    for script in (scripts[1], sky["run"]):
        whole = re.sub(r"\\\n *", "", script)
        [command] = re.findall(r"until_done\.sh \S+ (python .+?)(?: &)?$", whole, re.M)
        set_by_shell = re.sub(r"\$\{JUDGE_API_KEY:\+(.+?)\}", r"\1", command)
        check([re.sub(r"\$\w+", "http://judge", word) for word in shlex.split(set_by_shell)])
    assert {"JUDGE_URL", "JUDGE_MODEL"} <= sky["envs"].keys()


@IN_PAGE
def test_every_example_in_python_and_yaml_can_be_read(page: Path) -> None:
    for language, read in (("python", ast.parse), ("yaml", yaml.safe_load)):
        for block in blocks(page, language):
            read(block)


def test_every_criterion_has_tests_that_exist_or_a_page_or_a_named_gap() -> None:
    rows = re.findall(r"^- (\d+\.\d) .*?: (.+)$", text_of(DOCS / "traceability.md"), re.M)
    assert [number for number, _ in rows] == [f"{n}.{i}" for n in range(1, 16) for i in range(1, 6)]
    gaps = sum("**gap**" in evidence.lower() for _, evidence in rows)
    assert f"{gaps} of the {len(rows)} criteria are open" in text_of(DOCS / "traceability.md")
    for number, evidence in rows:
        assert "](" in evidence or "`make" in evidence or "**gap**" in evidence, number
        tests = re.findall(r"\]\(\.\./(tests/[\w/]+\.py)\)((?:[:,] `test_\w+`)*)", evidence)
        for file, names in tests:
            for name in re.findall(r"test_\w+", names):
                assert re.search(rf"^(async )?def {name}\(", text_of(ROOT / file), re.M), name


def test_every_key_of_a_run_that_a_page_names_exists() -> None:
    run: Any = OmegaConf.to_container(compose_run("+recipes=quickstart"))
    run["selfplay"] = MedicalConfig(judge="labels").model_dump()

    def exists(key: str) -> bool:
        node = run
        for part in key.split("."):
            if isinstance(node, dict) and node and part not in node and not part.startswith("<"):
                return False
            node = node.get(part) if isinstance(node, dict) else None
        return True

    nodes = "|".join([*run, "critic"])
    key_in_text = re.compile(rf"`'?((?:{nodes})(?:\.[\w<>]+)+)(?:=[^`]*)?`")
    named = {(page.name, key) for page in PAGES for key in key_in_text.findall(text_of(page))}
    assert len(named) > 100
    assert [one for one in named if one[0] != "CHANGELOG.md" and not exists(one[1])] == []


# --- the arms of the study, but for what its page marks as planned ---


def arms() -> list[tuple[str, list[str]]]:
    """Name and overrides of the arms that play games, without planned keys."""
    page = text_of(ROOT / "experiments" / "study" / "README.md")
    section = page.partition("## Arms")[2].partition("Arms without self-play")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE)
    return [(name, shlex.split(" ".join(re.findall(r"`([^`]+)`(?!†)", of)))) for name, of in rows]


@pytest.mark.slow
def test_every_arm_of_the_study_starts() -> None:
    judges = {
        name: check_run(compose_run("+recipes=qwen3_4b", *JUDGE_SERVER, *overrides)).judge
        for name, overrides in arms()
    }
    assert judges.keys() >= {"self_play", "assessor_only", "no_gate", "summed_credit"}
    for name, judge in judges.items():
        assert judge == ("labels" if name in ("assessor_only", "labels") else "llm"), name


# --- the reference tables of the site ---


def test_every_table_stands_in_the_one_page_that_asks_for_it() -> None:
    pages = [page.read_text(encoding="utf-8") for page in DOCS.glob("*.md")]
    requests = [(page, name) for page in pages for name in REFERENCE.findall(page)]
    assert sorted(name for _, name in requests) == sorted(TABLES)
    for page, name in requests:
        assert TABLES[name]() in with_reference(page)
        assert len(re.findall(r"^\|.*\|.*\|", TABLES[name](), re.M)) > 10, name


def test_every_key_has_a_description() -> None:
    assert not [key for key, field in entries(MedicalConfig) if not field.description]
    assert 40 < len([key for key, field in entries(MedicalConfig) if not is_node(field)]) <= 65


def test_the_seven_files_hold_what_the_page_says() -> None:
    page = (DOCS / "how_it_works.md").read_text(encoding="utf-8")
    story = page.partition("tell the whole story")[2].partition("###")[0]
    items = re.split(r"^\d\. ", story, flags=re.M)[1:]
    assert len(items) == 7
    said = []
    for item in items:
        file = item.partition("(../")[2].partition(")")[0]
        said += [(file, name) for name in re.findall(r"(?<!\[)`(\w+)`", item)]
        # A name in a link of its own stands in the file of that link.
        linked = re.findall(r"\[`(\w+)`\]\(\.\./([\w/.]+)\)", item)
        said += [(other, name) for name, other in linked]
    names = {name for _, name in said}
    assert {"build_rows", "play_game", "MedicalGame", "reward_game", "ask_judge"} <= names
    for file, name in said:
        code = text_of(ROOT / file)
        assert re.search(rf"^(async )?(def|class) {name}\b|^{name}\b", code, re.M), (file, name)


def test_shares_in_the_readme_stand_in_tables_of_linked_pages() -> None:
    table = re.compile(r"<!-- table: .*? -->(.*?)<!-- end -->", re.DOTALL)
    printed = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)  # by one run, of any machine
    text = printed.sub("", table.sub("", text_of(ROOT / "README.md")))
    checked = 0
    for paragraph in re.split(r"\n\n|\n- ", text.replace("95 %\nintervals", "")):
        several = re.findall(r"(\d+(?: (?:to|and) \d+)*) %", paragraph)
        shares = {int(n) for each in several for n in each.split()[::2]}
        links = re.findall(r"\]\(([^)#:]*)(?:#[^)]*)?\)", paragraph)
        pages = {link or "README.md" for link in links if link.endswith(".md") or not link}
        tables = "".join("".join(table.findall(text_of(ROOT / page))) for page in pages)
        found = {round(float(share)) for share in re.findall(r"\d+\.\d+", tables)}
        assert shares <= found, f"{shares - found} %: {paragraph}"
        checked += len(shares)
    assert checked >= 7
