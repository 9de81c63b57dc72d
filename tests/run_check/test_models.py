"""Models whose layers carry state across a restart of position ids are refused by their configuration alone."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from huggingface_hub.errors import RepositoryNotFoundError
from run_check.runs import run_of
from training.model_families import ISOLATED, LEAKING

from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.run_check import inputs
from medserl_agentloop.core.run_check.inputs import check_models, leak_of, missing_models
from medserl_agentloop.core.run_check.run import Run


def run_with(path: Path | str) -> Run:
    return run_of({"actor_rollout_ref.model.path": str(path)})


@pytest.mark.parametrize("family", ISOLATED)
def test_models_of_plain_attention_are_accepted(family: str, tmp_path: Path) -> None:
    ISOLATED[family]().save_pretrained(tmp_path)  # the configuration alone, no weights
    check_models(run_with(tmp_path))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_next", "its layers of type linear_attention do not start anew"),
        ("qwen3_5_text", "its layers of type linear_attention do not start anew"),
        ("bamba", "its layers of type mamba do not start anew"),
        ("qwen2_vl", "its rotary positions have several dimensions"),
    ],
)
def test_models_that_would_leak_are_refused_before_anything_is_loaded(family: str, reason: str, tmp_path: Path) -> None:
    LEAKING[family]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason) as error:
        check_models(run_with(tmp_path))
    assert f"model.path={tmp_path}" in str(error.value)
    assert "selfplay.context=shared" in str(error.value)


def test_the_critics_model_is_checked_too(tmp_path: Path) -> None:
    LEAKING["bamba"]().save_pretrained(tmp_path)
    run = run_of({"algorithm.adv_estimator": "role_gae", "critic.model.path": str(tmp_path)})
    with pytest.raises(ConfigError, match="bamba"):
        check_models(run)


def test_a_path_that_cannot_be_read_here_is_left_to_the_certificate(tmp_path: Path) -> None:
    check_models(run_with(tmp_path / "nothing"))


@pytest.mark.parametrize(
    "config",
    [
        transformers.RwkvConfig(),  # no list of layers, but stateful
        transformers.Lfm2Config(layer_types=["conv"] * 20 + ["full_attention"] * 12),
        transformers.Llama4TextConfig(),  # chunks are counted from the start of the row
    ],
)
def test_other_layers_that_do_not_restart_are_known(config: Any) -> None:
    assert leak_of(config) is not None


class Hub:
    """The hub's answer to whether it has a model."""

    def __init__(self, answer: Exception | None) -> None:
        self.answer = answer

    def model_info(self, name: str, *, timeout: float) -> None:
        assert timeout <= 5
        if self.answer is not None:
            raise self.answer


def missing(path: str, monkeypatch: pytest.MonkeyPatch, hub: Exception | None = None) -> str:
    monkeypatch.setattr(inputs, "HfApi", lambda: Hub(hub))
    return "".join(missing_models(run_with(path)))


def test_a_model_that_nobody_has_is_refused_with_its_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer = missing("someone/no-such-model", monkeypatch, httpx.ConnectError("Name or service not known"))
    assert answer.startswith("actor_rollout_ref.model.path=someone/no-such-model: it is no folder here")
    assert "cannot be asked (Name or service not known)" in answer and "hf download someone/no-such-model" in answer
    unknown = RepositoryNotFoundError("404", response=httpx.Response(404, request=httpx.Request("GET", "http://h")))
    assert "has no model of this name, or none for you" in missing("someone/no-such-model", monkeypatch, unknown)
    assert "there is no such folder (seen from" in missing("./models/nothing", monkeypatch)
    assert "the folder has no config.json" in missing(str(tmp_path), monkeypatch)


def test_a_model_that_is_here_or_on_the_hub_is_not_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert missing("someone/some-model", monkeypatch) == ""
    assert missing("hdfs://cluster/model", monkeypatch) == ""
    (tmp_path / "config.json").write_text("{}")
    assert missing(str(tmp_path), monkeypatch) == ""
    monkeypatch.setattr(inputs, "try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    assert missing("someone/cached", monkeypatch, httpx.ConnectError("")) == ""
