"""A real run whose judge is a model that verl itself serves: its reward-model manager, router and
SGLang.
"""

import json
from pathlib import Path

import pytest
import torch
from medec.builders import run as command
from note_files import SAMPLE
from real_runs import GAMES_PER_STEP, Run
from tokenizers import AddedToken
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from medserl_agentloop.core.step_file import GAMES_FILE
from medserl_agentloop.games.medical.case import Label
from medserl_agentloop.games.medical.records import JUDGE_FAILED, read_games
from medserl_agentloop.paths import resource

PLAYER = resource("assets/tiny_player")
VERDICT = json.dumps({"reason": "as its weights say", "error": "present", "realistic": True})
PROSE = "It reads well."
SERVED = "reward.reward_model.rollout"
ON_A_CPU = (
    "selfplay.judge_server.json_schema=False",
    "selfplay.judge_server.timeout_s=120",  # the first answer is slow on a busy machine
    *(f"{SERVED}.dtype=float32", f"{SERVED}.enforce_eager=true"),
    *(f"{SERVED}.max_model_len=8192", f"{SERVED}.max_num_seqs=64"),
    f"{SERVED}.engine_kwargs=${{actor_rollout_ref.rollout.engine_kwargs}}",
    "ray_kwargs.ray_init.num_gpus=2",
)


@pytest.fixture
def judge_model(tmp_path: Path) -> Path:
    """A model that answers a verdict where the note is about a woman, and prose elsewhere.

    Its chat template ends the prompt with ``<note>`` or without; its weights see nothing but the
    last token.
    """
    tokenizer = AutoTokenizer.from_pretrained(PLAYER)
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in (VERDICT, PROSE)]
    )
    tokenizer.chat_template += "{% if 'woman' in messages[-1]['content'] %}<note>{% endif %}"
    note, verdict, prose = tokenizer.convert_tokens_to_ids(["<note>", VERDICT, PROSE])
    shape = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "tie_word_embeddings": False,
    }
    config = Qwen3Config.from_pretrained(PLAYER, vocab_size=len(tokenizer), **shape)
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if not name.endswith("norm.weight"):
                weights.zero_()
        said, answers = model.model.embed_tokens.weight, model.lm_head.weight
        said[:, 0] = 1
        answers[prose, 0] = 1
        end = tokenizer.eos_token_id
        pairs = [(note, verdict), (verdict, end), (prose, end)]
        for last, (token, answer) in enumerate(pairs, start=1):
            said[token] = 0
            said[token, last] = answers[answer, last] = 1
    model.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    return tmp_path / "judge"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_served_reward_model_judges_games_and_its_prose_voids_them(
    tmp_path: Path, judge_model: Path
) -> None:
    rows = ("--input", SAMPLE, "--mix", "adversarial_harmful=1,adversarial_benign=1")
    assert command("medec_to_parquet", *rows, "--output", tmp_path / "data").exit_code == 0
    run = Run(
        tmp_path,
        *(f"data.{of}_files={tmp_path}/data/{of}.parquet" for of in ("train", "val")),
        *ON_A_CPU,
        f"reward.reward_model.model_path={judge_model}",
        "trainer.total_training_steps=1",
        "trainer.save_freq=-1",
        recipe="[own_notes,sglang_cpu,judge_by_verl]",
    )
    run.wait()
    games = list(read_games(tmp_path / "run" / GAMES_FILE))
    assert len(games) == GAMES_PER_STEP
    asked = [game for game in games if game.assessment is not None]
    judged = [game for game in asked if "woman" in game.spec.seed_note]
    assert 0 < len(judged) < len(asked)
    for game in asked:
        if game in judged:
            assert game.void is None and game.judgement is not None
            assert (game.judgement.judge, game.judgement.label) == ("llm", Label.HARMFUL)
            assert game.judgement.reason == "as its weights say"
        else:
            assert game.void is not None and game.void.startswith(JUDGE_FAILED)
    [step] = run.metrics
    assert step["selfplay/void_rate"] == (len(asked) - len(judged)) / len(games)
    assert step["actor/grad_norm"] > 0
