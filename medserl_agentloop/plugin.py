"""The one place that registers this package with verl, and Hydra's callbacks of the recipes.

verl imports this module through the ``verl.plugins`` entry point at the end of its own
``__init__``, in every process of a run. It swallows a plugin's exceptions (logged at DEBUG), so
errors are printed here.
"""

from __future__ import annotations

import io
import logging
import os
import secrets
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import Any, TextIO

import ray
import verl
from hydra import compose
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from medserl_agentloop import backends
from medserl_agentloop.paths import resource
from medserl_agentloop.terminal import MARK, announce, visible

VERSION, VERL_VERSION = version("medserl-agentloop"), "0.9.1"

RESOLVERS = {  # what recipes may write
    # The path of a file or folder that travels with the package.
    "medserl": lambda name: str(resource(name)),
    # The name of the folder that a data file, or the first of a list, is in.
    "medserl_folder": lambda files: (
        Path(files if isinstance(files, str) else files[0]).resolve().parent.name
    ),
    # Add an ending to a run's name, once.
    "medserl_ending": lambda name, ending: name if name.endswith(ending) else f"{name}_{ending}",
    # True if an advantage estimator reads a critic's values.
    "medserl_needs_critic": lambda name: name in ("gae", "role_gae"),
}


def register() -> None:
    """Register everything with verl. Runs when this module is imported, once per process."""
    if verl.__version__ != VERL_VERSION:
        raise SystemExit(  # verl would swallow an ordinary exception
            f"medserl-agentloop {VERSION} needs verl {VERL_VERSION}, but verl {verl.__version__} "
            f"is installed. Run: pip install 'verl=={VERL_VERSION}'"
        )
    backends.use_wheels()
    try:
        for name, resolver in RESOLVERS.items():
            OmegaConf.register_new_resolver(name, resolver, replace=True)
        backends.register()
        if "recipes=" in " ".join(sys.argv):  # the run's check says what it lacks
            warnings.filterwarnings(
                "ignore", r"\w+ engine is not available", module=r"verl\.workers\.engine"
            )
            logging.getLogger("verl.plugin.platform.platform_manager").setLevel(logging.ERROR)
        if ray.is_initialized():  # a process of a run; elsewhere these imports cost seconds
            from verl.experimental.agent_loop.agent_loop import register as register_agent_loop

            # Registered by being imported.
            from medserl_agentloop.core import advantages, trainer  # noqa: F401
            from medserl_agentloop.core.agent_loop import SelfPlayAgentLoop
            from medserl_agentloop.core.interaction import AGENT_NAME

            register_agent_loop(AGENT_NAME)(SelfPlayAgentLoop)
            backends.register_adapters()
    except Exception as error:
        announce(f"the plugin failed to load, so self-play cannot run: {error!r}")
        raise


@contextmanager
def _or_no_run() -> Iterator[None]:
    """End the run with any exception: Hydra turns one in a callback into a warning."""
    try:
        yield
    except Exception as error:
        from medserl_agentloop.core.config import ConfigError

        if not isinstance(error, ConfigError):
            traceback.print_exc()
            error = RuntimeError(
                f"the run cannot be checked, so it is not started: {type(error).__name__}: {error}"
            )
        raise SystemExit("[medserl] " + "\n[medserl] ".join(str(error).splitlines())) from None


class StartupCheck(Callback):  # type: ignore[misc]  # hydra is untyped
    """Hydra callback of the recipes: checks the run before Ray. verl detects the platform if
    ``platform`` is None.
    """

    def __init__(self, platform: str | None = None) -> None:
        self.platform = platform

    @_or_no_run()
    def on_multirun_start(self, config: DictConfig, **kwargs: object) -> None:
        from medserl_agentloop.core.config import refuse

        refuse(["--multirun shares one process and one Ray: give each run its own command"])

    @_or_no_run()
    def on_run_start(self, config: DictConfig, **kwargs: object) -> None:
        from ray._private.worker import _post_init_hooks

        from medserl_agentloop.core.config import game_class, refuse
        from medserl_agentloop.core.run_check import (
            RunConfig,
            check_run,
            check_warm_start,
            warnings,
        )
        from medserl_agentloop.core.run_check.machine import CHECKS

        announce(f"medserl-agentloop {VERSION} loaded into verl {verl.__version__}")
        _choose_platform(self.platform)
        for warning in warnings(config, compose(config.hydra.job.config_name)):
            announce(f"warning: {warning}")
        if "selfplay" not in config:  # a warm start
            refuse(check_warm_start(config))
            return
        run = RunConfig(config, check_run(config))
        # A Ray client's machine has nothing of the run.
        elsewhere = str(run["ray_kwargs.ray_init.address"]).startswith("ray://")
        findings = [one for check in CHECKS.values() if not elsewhere for one in check(run)]
        refuse(one for one in findings if isinstance(one, str))
        for finding in findings:
            announce(f"warning: {finding[1]}")
        game = game_class(run.selfplay.game)
        for line in (
            *filter(None, [run.selfplay.who_trains(game.roles)]),
            *game.View.caveats(config, run.selfplay),
            *game.View.startup_lines(config, run.selfplay),
            "starting Ray",
        ):
            announce(line)
        folder = config.trainer.default_local_dir
        sys.excepthook = partial(_say_how_to_resume, sys.excepthook, folder)
        # Ray's core aborts the process at SIGTERM, and takes the signal when it starts.
        _post_init_hooks.append(partial(signal.signal, signal.SIGTERM, signal.default_int_handler))


def _say_how_to_resume(
    others: Any, folder: str, kind: type[BaseException], error: Any, trace: Any
) -> None:
    """Ctrl-C and SIGTERM end a run with one line; other errors are printed as usual."""
    if issubclass(kind, KeyboardInterrupt):
        from medserl_agentloop.core.step_file import LATEST

        resumes = f"resumes from the last checkpoint in {folder}"
        there = Path(folder, LATEST).is_file()
        announce(f"stopped. The same command {resumes if there else 'starts over'}")
    else:
        others(kind, error, trace)


class TrainLog(Callback):  # type: ignore[misc]  # hydra is untyped
    """Hydra callback of the recipes: write the output of a run and its processes to ``train.log``.

    This package's lines also go to the terminal, and so does the error of a run that fails.
    ``hydra.verbose=true`` leaves everything on the terminal.
    """

    before: tuple[TextIO, TextIO, int, int] | None = None

    def __init__(self, hints: bool = True) -> None:
        """``hints``: print at the end what was gained and what to look at next."""
        self.hints = hints

    @_or_no_run()
    def on_run_start(self, config: DictConfig, **kwargs: object) -> None:
        """Mark the run's own lines in all its processes, as no model or server can."""
        if not config.hydra.verbose:
            os.environ[MARK] = f":{secrets.token_hex(8)}"
            # A cluster that is already running does not inherit this environment.
            node = "ray_kwargs.ray_init.runtime_env.env_vars"
            OmegaConf.update(config, f"{node}.{MARK}", os.environ[MARK], force_add=True)

    @_or_no_run()
    def on_job_start(self, config: DictConfig, **kwargs: object) -> None:
        """Ray writes its workers' lines to ``sys.stdout`` and ``sys.stderr``; its own processes
        inherit 1 and 2.
        """
        if config.hydra.verbose:
            return
        path = Path(config.selfplay.records) / "train.log"
        line = f"verl's and Ray's lines are in {path} (hydra.verbose=true shows them)"
        print(f"[medserl] {line}", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        sys.stderr.flush()
        self.before = sys.stdout, sys.stderr, os.dup(1), os.dup(2)
        how: Any = {"errors": "backslashreplace", "line_buffering": True}
        log = _OwnLinesToo(path.open("ab"), encoding="utf-8", **how)
        log.terminal, log.mark = self.before[2], os.environ[MARK]
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: object) -> None:
        """Hydra prints the error of a run that failed after this."""
        folder = config.selfplay.records
        played = config.selfplay.get("certify") != "only"
        if self.hints and played and job_return.status is JobStatus.COMPLETED:
            from medserl_agentloop.report import headline

            place = quote(folder)
            announce(
                f"done: {folder}. Next: medserl report {place} writes its page, medserl progress "
                f"{place} plays its first player against its last"
            )
            announce(headline(folder) or "no gain was measured: trainer.test_freq is off")
        if self.before is not None and job_return.status is JobStatus.FAILED:
            sys.stdout, sys.stderr, *files = self.before
            for number, file in zip((1, 2), files, strict=True):
                os.dup2(file, number)


class _OwnLinesToo(io.TextIOWrapper):
    """A log file that also copies lines with the run's mark to a terminal."""

    terminal: int
    mark: str

    def write(self, text: str) -> int:
        for line in text.splitlines():
            _, own, message = line.partition(f"[medserl{self.mark}] ")
            if own:
                os.write(self.terminal, f"[medserl] {visible(message)}\n".encode())
        return super().write(text.replace(f"[medserl{self.mark}] ", "[medserl] "))


def _choose_platform(name: str | None) -> None:
    if name is None:
        return
    # Not at the top: in another verl this import could fail before the version is checked.
    from verl.plugin.platform import PlatformRegistry, get_platform, set_platform

    os.environ["VERL_PLATFORM"] = name  # for Ray's processes
    backends.register()
    platform = PlatformRegistry.get(name)
    if platform is None:
        raise SystemExit(
            f"[medserl] no platform {name!r}: {', '.join(PlatformRegistry.registered_names())}"
        )
    # verl looked for an accelerator while it was imported (trainer/constants_ppo.py).
    if get_platform().device_name != name:
        set_platform(platform())


register()
