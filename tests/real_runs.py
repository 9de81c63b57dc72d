"""Real runs of verl's own entry points on the CPU backend, as a user would type them: nothing is
faked here.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from medserl_agentloop.core.step_file import GAMES_FILE, METRICS_FILE, StepFile
from medserl_agentloop.games.medical.records import read_games
from medserl_agentloop.paths import PACKAGE

REPOSITORY = PACKAGE.parent
GAMES_PER_STEP = 16
SMALL = (
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=2",
)
RAY = {
    "RAY_ADDRESS": "local"
}  # or a run would join a cluster that somebody has started on this machine
# What verl's single controller sets for a training worker, for a world of one.
WORKER = {
    "VERL_PLATFORM": "cpu",
    "WORLD_SIZE": "1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
}
WORKER |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
ADAPTERS = (
    "selfplay.adapters=per_role",
    # verl's reference pass switches the adapters off and on
    "actor_rollout_ref.actor.use_kl_loss=True",
    *(
        f"actor_rollout_ref.model.{of}"
        for of in ("lora_rank=4", "lora_alpha=8", "target_modules=all-linear")
    ),
)
CERTIFIED = "certificate: isolation of actor"
AGREEMENT = 1e-4
"""Largest difference between rollout and actor that counts as none, in probability and in
log-probability: float32
rounding depends on the processor and reaches some 1e-5, a wrong token or position moves it by 1e-2
and more."""

SILENT_S = 240
"""A run that prints no line for so long has stopped; the longest part, its start, takes 30 s on two
idle cores.
"""


def environment(*modules: Path, **changes: str) -> dict[str, str]:
    """Environment of a run; its processes find the modules in the given folders."""
    folders = (*modules, Path(__file__).parent / "quick_start", os.environ.get("PYTHONPATH", ""))
    return (
        os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, map(str, folders)))}
        | RAY
        | changes
    )


def answers_of(program: Path, folder: Path, questions: Any, *modules: Path) -> dict[str, Any]:
    """Run a program with verl's worker and engine in its own process, without Ray; return its
    answers.

    It is a program because verl binds a process to one platform and one process group. It is called
    with ``folder``, reads ``questions.json`` there and writes ``answers.json``.
    """
    (folder / "questions.json").write_text(json.dumps(questions))
    printed_by(folder, program, folder, **WORKER, PYTHONPATH=environment(*modules)["PYTHONPATH"])
    answers: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    return answers


def printed_by(folder: Path, *command: Any, **changes: str) -> str:
    """Run a Python program in ``folder`` as a user would, with ``changes`` of the environment;
    return its output.
    """
    outputs: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "timeout": 500,
    }
    program = [sys.executable, *map(str, command)]
    done = subprocess.run(program, cwd=folder, env=environment(**changes), **outputs)
    assert done.returncode == 0 and "Error in _run_prompt" not in done.stdout, done.stdout[-5000:]
    return done.stdout


def log_probs(
    model: torch.nn.Module,
    ids: torch.Tensor,
    positions: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Log-probs (T - 1,) of the next tokens of ``ids`` (T,), by one forward with the positions (T,)
    that are given.
    """
    with torch.no_grad():
        at = None if positions is None else positions[None]
        logits = (
            model(input_ids=ids[None], position_ids=at, use_cache=False).logits[0].float()
            / temperature
        )
    return logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]


def same(one: Path, other: Path) -> bool:
    """Return whether two folders hold the same bf16 weights, all of a model's, as verl's merger
    writes them.
    """
    weights = []
    for folder in (one, other):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"]
        weights.append(model.state_dict())
    return all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


class Run:
    """A run in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        recipe: str = "own_notes",
        env: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.log = folder / f"log{len(list(folder.glob('log*')))}.txt"
        """What a user would see on the terminal."""
        self.train_log = folder / "run" / "train.log"
        self._earlier = self.train_log.stat().st_size if self.train_log.exists() else 0
        self._command = [
            sys.executable,
            "-m",
            "verl.trainer.main_ppo",
            f"+recipes={recipe}",
            *SMALL,
            *overrides,
        ]
        self._command += [
            f"trainer.default_local_dir={folder}/run",
            f"hydra.run.dir={folder}/hydra",
        ]
        self._env, self._tries = env or environment(), 0
        self._start()

    def _start(self) -> None:
        self._tries += 1
        with self.log.open("w") as log:
            outputs: dict[str, Any] = {
                "stdout": log,
                "stderr": subprocess.STDOUT,
                "start_new_session": True,
            }
            self.process = subprocess.Popen(
                self._command, cwd=self.folder, env=self._env, **outputs
            )

    def _is_over(self) -> bool:
        """Return whether the run has ended. Ray gives its node 30 s to start; a busy machine may
        need a second try.
        """
        if self.process.poll() is None:
            return False
        if self._tries == 1 and "The current node timed out during startup" in self.log.read_text():
            self._start()
            return False
        return True

    def wait(self) -> None:
        assert self.wait_for_end() == 0, self.said()
        log = self.train_log.read_bytes()[self._earlier :]
        for crash in (b"Error in _run_prompt", b"the rollout server gave no turn"):
            assert crash not in log

    def lines(self) -> Iterator[str]:
        yield from re.findall(r"\[medserl\] (.*)", self.log.read_text())

    @property
    def reached(self) -> int:
        """The last step that has been checkpointed; 0 without any."""
        tracker = self.folder / "run" / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text() or 0) if tracker.exists() else 0

    def wait_for_checkpoint(self, step: int) -> None:
        self._wait_until(lambda: self.reached >= step or self._is_over())
        assert self.reached >= step, self.said()

    def wait_for_end(self) -> int:
        self._wait_until(self._is_over)
        return self.process.wait()

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Wait as long as the run goes on printing: how fast it is depends on what else the machine
        does.
        """
        printed, silent_since = 0, time.monotonic()
        while not done():
            if (size := self.log.stat().st_size) != printed:
                printed, silent_since = size, time.monotonic()
            assert time.monotonic() < silent_since + SILENT_S, (
                f"silent for {SILENT_S} s\n{self.said()}"
            )
            time.sleep(0.2)

    def said(self) -> str:
        """The ends of both logs."""
        logs = (
            log.read_text(errors="replace")[-5000:]
            for log in (self.train_log, self.log)
            if log.exists()
        )
        return "\n== and on the terminal\n".join(logs)

    def copy_after_step(self, step: int, folder: Path) -> None:
        """Copy to ``folder`` what a SIGKILL to the whole run would leave, once it has checkpointed
        ``step``.
        """
        self.wait_for_checkpoint(step)
        run = psutil.Process(self.process.pid)
        stopped = [run, *run.children(recursive=True)]
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        try:
            shutil.copytree(self.folder / "run", folder / "run")
        finally:
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    def kill(self) -> None:
        """SIGKILL to the run and all it started, if it is still there."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        by_step: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        for row in StepFile(self.folder / "run" / METRICS_FILE).read():
            by_step[row["step"]].update(row)
        return list(by_step.values())

    def steps_of_games(self) -> Counter[int]:
        return Counter(game.step for game in read_games(self.folder / "run" / GAMES_FILE))
