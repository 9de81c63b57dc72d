"""Every recipe for a GPU starts and fits its card; a broken copy of it is refused with the key and what to write."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict
from planning.gpu_recipes import CARDS, WARM_STARTS, WITHOUT_JUDGE
from typer.testing import CliRunner

from medserl_agentloop.cli import app
from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.run_check import check_run, unknown_keys
from medserl_agentloop.core.run_check.run import Run
from medserl_agentloop.paths import resource
from medserl_agentloop.planning.plan import GIB, composed, plan_run, read_shape, remedies
from medserl_agentloop.testing.tiny import compose_run

JUDGE = ("selfplay.judge_server.url=http://localhost:30000/v1", "selfplay.judge_server.model=judge")


@pytest.fixture(params=CARDS)
def recipe(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("JUDGE_URL", "JUDGE_MODEL", "JUDGE_API_KEY"):
        monkeypatch.setenv(name, "http://localhost:30000/v1")
    return str(request.param)


@cache
def run_of(recipe: str) -> Run:
    """The run of a recipe, composed once."""
    return composed(recipe, list(JUDGE) if recipe in WITHOUT_JUDGE else [])


@cache
def verls_own() -> DictConfig:
    return compose_run()


@contextmanager
def changed(recipe: str, *overrides: str) -> Iterator[Run]:
    """The run with overrides; composing it anew would take a second."""
    run = run_of(recipe)
    wanted = OverridesParser.create().parse_overrides(overrides)
    before = {override.key_or_group: run[override.key_or_group] for override in wanted}
    with open_dict(run.config):
        for override in wanted:
            OmegaConf.update(run.config, override.key_or_group, override.value(), merge=False)
        try:
            yield run
        finally:
            for override in wanted:
                if not override.is_add():
                    key = override.key_or_group
                    OmegaConf.update(run.config, key, before[key], merge=False)


def test_a_recipe_starts_and_fits_its_card(recipe: str) -> None:
    run = run_of(recipe)
    check_run(run.config)
    assert plan_run(run, CARDS[recipe]).fits


def test_a_broken_copy_is_refused_with_the_key_and_what_to_write(recipe: str) -> None:
    card = CARDS[recipe]
    with changed(recipe, "+trainer.save_frq=10") as run:
        assert unknown_keys(run.config, verls_own()) == ["trainer.save_frq (did you mean 'save_freq'?)"]
        del run.config.trainer.save_frq
    with (
        changed(recipe, "data.train_batch_size=many") as run,
        pytest.raises(ValueError, match=r"^data\.train_batch_size=many is no whole number\. Write one"),
    ):
        plan_run(run, card)
    with (
        changed(recipe, "trainer.n_gpus_per_node=3", "actor_rollout_ref.actor.ppo_mini_batch_size=16") as run,
        pytest.raises(ConfigError, match=r"actor\.ppo_mini_batch_size=16 .* Set it to a multiple of (3|6)"),
    ):
        check_run(run.config)
    too_long = ("data.max_prompt_length=1024", "data.max_response_length=400000")
    with (
        changed(recipe, *too_long) as run,
        pytest.raises(ValueError, match=r"max_token_len_per_gpu=\d+ holds no game .* Set it to 401024 or more"),
    ):
        plan_run(run, card)
    room = [f"{engine}.ppo_max_token_len_per_gpu=500000" for engine in ("actor_rollout_ref.actor", "critic")]
    with (
        changed(recipe, *too_long, *room) as run,
        pytest.raises(ValueError, match=r"path=\S+ allows 40960 tokens\. Set data\.max_response_length=39936"),
    ):
        plan_run(run, card)


def test_a_run_that_takes_too_much_gets_the_overrides_that_make_it_fit(recipe: str) -> None:
    with changed(recipe, "actor_rollout_ref.rollout.gpu_memory_utilization=0.98") as run:
        found = plan_run(run, CARDS[recipe])
    assert not found.fits
    assert found.remedy
    with changed(recipe, "actor_rollout_ref.rollout.gpu_memory_utilization=0.98", *found.remedy) as run:
        assert plan_run(run, CARDS[recipe]).fits


@pytest.mark.parametrize("recipe", WARM_STARTS)
def test_a_warm_start_fits_its_card_and_a_broken_copy_is_refused_with_what_to_write(recipe: str) -> None:
    plan = plan_run(composed(recipe, []), 96)
    assert plan.fits
    assert list(plan.phases) == ["update, actor", "optimizer step, actor", "checkpoint, actor"]
    for overrides, answer in (
        (["+trainer.save_frq=10"], "did you mean 'save_freq'"),
        (["data.train_batch_size=many"], r"^data\.train_batch_size=many is no whole number\. Write one"),
        (["trainer.n_gpus_per_node=3"], r"^data\.train_batch_size=64 .* among 3 .* Set it to a multiple of 3\."),
        (["data.max_length=9000"], r"holds no conversation of data\.max_length = 9000 .* Set it to 9000 or more"),
        (["engine.strategy=megatron"], r"^engine\.strategy=megatron: .* Set it to fsdp2\."),
    ):
        with pytest.raises(ValueError, match=answer):
            plan_run(composed(recipe, overrides), 96)
    small = plan_run(composed(recipe, []), 16)
    assert not small.fits
    assert small.remedy
    assert plan_run(composed(recipe, small.remedy), 16).fits


def test_a_warm_start_of_all_weights_needs_what_adam_needs() -> None:
    step = plan_run(composed("warm_start_qwen3_4b", []), 96).phases["optimizer step, actor"]
    same = plan_run(run_of("qwen3_4b"), 96).phases["optimizer step, actor"]
    for part in ("weights", "gradients", "Adam"):
        assert step[part] == same[part]
    remedy = plan_run(composed("warm_start_qwen3_4b", []), 80).remedy
    assert remedy == ["optim.override_optimizer_config={fused:true}"]
    assert plan_run(composed("warm_start_qwen3_4b", remedy), 80).fits


def test_a_misspelt_key_that_was_added_is_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(ValueError, match=r"trainer\.save_frq \(did you mean 'save_freq'\?\)"):
        composed("qwen3_4b", ["+trainer.save_frq=10"])


def test_a_part_of_a_recipe_alone_is_neither_a_run_nor_a_warm_start() -> None:
    with pytest.raises(ValueError, match="the run has no 'selfplay' node"):
        composed("gpu_80g", [])


def test_every_override_that_the_plan_may_name_is_one_of_verls() -> None:
    named = [o for recipe in ("qwen3_4b", "qwen3_4b,role_gae") for part in remedies(run_of(recipe)) for o in part]
    changed = composed("qwen3_4b,role_gae", [*dict.fromkeys(named)])
    assert changed["actor_rollout_ref.actor.optim.override_optimizer_config"] == {"fused": True}
    assert changed["critic.fsdp.offload_policy"] is True


def test_the_arithmetic_of_qwen3_4b_without_its_savings() -> None:
    """AdamW's default, and half of the free memory for SGLang: 75 GiB of weights, gradients and states at its step."""
    before = (
        "actor_rollout_ref.actor.optim.override_optimizer_config=null",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.5",
    )
    with changed("qwen3_4b", *before) as run:
        found = plan_run(run, 80)
        assert plan_run(run, 96).fits  # tight
    step = found.phases["optimizer step, actor"]
    parts = ("weights", "gradients", "Adam", "Adam's square roots")
    assert sum(step[part] for part in parts) / GIB == pytest.approx(75, abs=0.1)
    assert not found.fits
    assert sum(found.phases["generation"].values()) > found.card.memory  # in step 2, when Adam's states are there
    assert found.setup.actor.checkpoint / GIB == pytest.approx(45, abs=0.1)
    assert found.remedy == [
        "actor_rollout_ref.actor.optim.override_optimizer_config={fused:true}",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
    ]


def test_sharding_offload_and_lora_take_what_they_say() -> None:
    one, eight = plan_run(run_of("qwen3_4b"), 80), plan_run(run_of("qwen3_4b,gpus_8x80g"), 80)
    assert eight.phases["checkpoint, actor"]["Adam"] * 8 == one.phases["checkpoint, actor"]["Adam"]
    offloaded = plan_run(run_of("qwen3_4b,gpu_80g"), 80)
    assert "Adam" not in offloaded.phases["generation"]
    assert offloaded.setup.host > one.setup.host
    assert plan_run(run_of("qwen3_4b,lora"), 80).phases["optimizer step, actor"]["Adam"] < GIB


def test_the_command_prints_the_plan_and_says_where_numbers_are_from() -> None:
    done = CliRunner().invoke(app, ["plan", "qwen3_4b", "--gpu", "48"], env={"COLUMNS": "160"})
    assert done.exit_code == 1
    assert re.search(r"Computed by medserl plan\. .*quoted .*Assumed", done.output)
    assert "These overrides make it fit:\n  actor_rollout_ref.actor.fsdp_config.offload_policy=true\n" in done.output
    done = CliRunner().invoke(app, ["plan", "qwen3_4b,gpu_80g", "--gpu", "80", "--gpus", "4", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.output[done.output.index("{") :])["setup"]["actor"]["workers"] == 4


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("data.train_batch_sze=3", "Could not override 'data.train_batch_sze'"),
        ("+data.train_batch_sze=3", "did you mean 'train_batch_size'?"),
        ("+selfplay.tran=both", "did you mean 'train'"),
        (
            "actor_rollout_ref.actor.fsdp_config.model_dtype=fp7",
            "model_dtype=fp7 is no dtype of verl's. Write one of fp32",
        ),
        ("actor_rollout_ref.actor.strategy=megatron", "medserl plan knows fsdp2 and fsdp. Set it to fsdp2."),
        ("actor_rollout_ref.model.path=acme/unknown", "Name the folder of its config.json: --model-config FOLDER."),
    ],
)
def test_the_command_refuses_in_one_line(override: str, answer: str) -> None:
    done = CliRunner().invoke(app, ["plan", "qwen3_4b", override])
    assert done.exit_code == 2
    assert answer in done.output
    assert done.output.strip().splitlines()[-1].startswith("medserl: ")


def test_the_shape_of_a_local_model_is_read_from_its_folder() -> None:
    shape = read_shape(str(resource("assets/tiny_player")))
    assert (shape.layers, shape.hidden, shape.vocab, shape.tied) == (4, 128, 1600, True)
    assert read_shape("trainer_output/qwen3-4b-medical-selfplay-sft") == read_shape("Qwen/Qwen3-4B")


def test_beside_adapters_the_base_stays_on_the_server_while_the_roles_are_trained() -> None:
    merged, apart = (
        plan_run(run_of(recipe), 80) for recipe in ("qwen3_4b,lora", "qwen3_4b,lora,adapter_per_role,base_judge")
    )
    assert "server's weights" not in merged.phases["update, actor"]
    weights = apart.phases["update, actor"]["server's weights"]
    assert weights == apart.phases["generation"]["server's weights"] > 7 * 2**30
    assert apart.setup.actor.trained == 2 * merged.setup.actor.trained
