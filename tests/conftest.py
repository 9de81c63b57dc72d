"""Shared by all tests.

Two seams are faked: the LLM server client, and the tokenizer, which is tiny and made here.
"""

import functools
import gc
import os
import pickle
import sys
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import pytest

# Two processes of tests share the cores; threads of one more would only wait for each other. Read
# while torch loads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Every process that a test starts would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Without a deadline: a busy machine says nothing about the code; benchmarks/ measures speed.
hypothesis.settings.register_profile("quick", max_examples=10, deadline=None)
hypothesis.settings.register_profile("thorough", max_examples=100, deadline=None)
hypothesis.settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(
        100_000
    )  # a fifth of the time of an import goes into counting objects that stay
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests:
        # Before the plugin is loaded, which takes over hydra.compose.
        import hydra

        _remember(
            hydra,
            "compose",
            lambda config_name, overrides=(), **options: (
                config_name,
                *overrides,
                *options.items(),
            ),
        )

        import verl  # noqa: F401  # loads the plugin, as every run does
        from hydra._internal.config_loader_impl import ConfigLoaderImpl
        from hydra._internal.sources_registry import SourcesRegistry
        from hydra.core.plugins import Plugins

        # it loads the modules of its sources, again if they were imported before
        Plugins.instance()
        for scheme in ("file", "pkg"):
            source = SourcesRegistry.instance().resolve(scheme)
            _remember(
                source,
                "load_config",
                lambda self, config_path: (self.provider, self.path, config_path),
            )
        _remember(ConfigLoaderImpl, "_compose_config_from_defaults_list", _files_of_a_config)
        # typer reads the signatures of all commands of an application whenever a test invokes one
        # of them.
        import typer.testing

        typer.testing._get_command = functools.lru_cache(typer.testing._get_command)


_ENVIRONMENT = os.environ


def pytest_runtest_teardown() -> None:
    # of which datasets leaves a copy there (map with several processes)
    os.environ = _ENVIRONMENT  # noqa: B003


def _remember(owner: Any, name: str, key: Callable[..., Hashable]) -> None:
    """Let a function of Hydra's answer once for each ``key``: hundreds of tests compose the same
    few runs.
    """
    function, answers = getattr(owner, name), dict[Hashable, bytes]()

    def remembered(*args: Any, **kwargs: Any) -> Any:
        asked = key(*args, **kwargs)
        if asked not in answers:
            answers[asked] = pickle.dumps(function(*args, **kwargs))
        return pickle.loads(answers[asked])

    pytest.MonkeyPatch().setattr(owner, name, remembered)


def _files_of_a_config(loader: Any, defaults: list[Any], repo: Any) -> Hashable:
    """Return a key of the files that a run's config is merged from, before single keys are set."""
    return repr(defaults), *((source.provider, source.path) for source in repo.get_sources())


LONGEST = (
    "test_newcomer.py",
    "test_main_ppo.py",
    "test_main_ppo_certificate.py",
    "test_main_ppo_adapters.py",
    "learning/test_experiments.py",
    "test_old_commands.py",
    "test_main_ppo_nodes.py",
    "test_main_ppo_health.py",
    "benchmarks/test_gpu.py",
    "backends/test_role_adapters.py",
    "training/test_certificate.py",
    "test_warm_start.py",
    "benchmarks/test_short_forms.py",
    "test_recipes.py",
    "test_docs.py",
    "planning/test_plan.py",
    "evaluation/test_evaluate_command.py",
)
"""The files that take longest, in this order: one of them begun last would keep one process busy
alone.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, then those that start other processes, then the rest."""
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    folder, with_runs = (
        Path(__file__).parent,
        {item.path for item in items if item.get_closest_marker("slow")},
    )
    places = {folder / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST) + (item.path not in with_runs)))


def pytest_collection_finish() -> None:
    gc.freeze()  # what the imports made stays; no collection has to look at it again


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody has started Ray here, whatever else runs on this machine."""
    for variable in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(variable)
    with TemporaryDirectory() as folder:  # tmp_path is too long for Ray's sockets
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides that name the sample data as parquet."""
    from medec.builders import run
    from note_files import SAMPLE

    folder: Path = tmp_path_factory.mktemp("data")
    done = run("medec_to_parquet", "--input", SAMPLE, "--output", folder)
    assert done.exit_code == 0, done.output
    return f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/val.parquet"


@pytest.fixture
def files(data: tuple[str, ...]) -> dict[str, Any]:
    """The same as keys with their values."""
    return dict(override.split("=", 1) for override in data)
