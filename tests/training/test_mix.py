"""selfplay.mix: an epoch in which every category has its share."""

from collections import Counter
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from support import run_with
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_sampler

from medserl_agentloop.core.config import ConfigError
from medserl_agentloop.core.dataset import apply_mix, mixed_rows
from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.games.medical.types import Category

HARMFUL, BENIGN, ATTACK = "vanilla_harmful", "vanilla_benign", "adversarial_benign"
FILE = [HARMFUL] * 10 + [BENIGN] * 30 + [ATTACK] * 20

shares = st.floats(0.01, 100)
files = st.lists(st.sampled_from([HARMFUL, BENIGN, ATTACK]), min_size=1, max_size=80)


def test_an_epoch_has_the_shares_asked_for() -> None:
    rows = mixed_rows(FILE, {HARMFUL: 1, BENIGN: 1, ATTACK: 2}, seed=1)
    assert Counter(FILE[row] for row in rows) == {HARMFUL: 15, BENIGN: 15, ATTACK: 30}


@given(files, st.dictionaries(st.sampled_from([HARMFUL, BENIGN, ATTACK]), shares, min_size=1), st.integers(0, 3))
def test_every_stretch_of_an_epoch_has_the_shares_to_within_rows(
    file: list[str], mix: dict[str, float], seed: int
) -> None:
    mix = {category: share for category, share in mix.items() if category in file}
    if not mix:
        return
    rows = mixed_rows(file, mix, seed)
    assert len(rows) == len(file)
    assert {file[row] for row in rows} <= set(mix)
    for length in range(1, len(rows) + 1):
        counts = Counter(file[row] for row in rows[:length])
        for category, share in mix.items():
            assert abs(counts[category] - length * share / sum(mix.values())) < len(mix)


def test_rows_are_repeated_only_when_all_of_a_category_were_used() -> None:
    rows = mixed_rows(FILE, {HARMFUL: 1, BENIGN: 1}, seed=1)
    uses = Counter(rows)
    assert sorted(uses[row] for row in range(10)) == [3] * 10
    assert sorted(uses[row] for row in range(10, 40)) == [1] * 30
    assert all(uses[row] == 0 for row in range(40, 60))


def test_the_seed_decides_which_rows() -> None:
    mix = {BENIGN: 1, ATTACK: 5}
    assert mixed_rows(FILE, mix, 1) == mixed_rows(FILE, mix, 1) != mixed_rows(FILE, mix, 2)


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"decoy_benign": 1, HARMFUL: 1}, "a share for decoy_benign, of which data.train_files has no row"),
        ({HARMFUL: 0}, "every share is 0"),
        ({}, "every share is 0"),
    ],
)
def test_a_mix_that_cannot_be_had_is_refused(mix: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixed_rows(FILE, mix, 1)


@pytest.mark.parametrize(
    ("mix", "message"),
    [({"vanilla": 1}, "selfplay.mix.vanilla"), ({"vanilla_benign": -1}, "selfplay.mix.vanilla_benign")],
)
def test_a_mix_that_is_none_is_refused_with_its_key(mix: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MedicalConfig.from_run(run_with(selfplay__mix=mix))


class Rows:
    """What verl's RLHFDataset is here: rows in ``dataframe``, handed out one by one."""

    def __init__(self) -> None:
        rows = [{"category": category, "index": number} for number, category in enumerate(FILE)]
        self.dataframe = Dataset.from_list([{"extra_info": row} for row in rows])

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, item: int) -> Any:
        return self.dataframe[item]["extra_info"]["index"]


def loader(seed: int = 5) -> Any:
    dataset = Rows()
    apply_mix(dataset, {Category(HARMFUL): 1, BENIGN: 1, ATTACK: 1}, MedicalGameInteraction.kind, seed=seed)
    sampler = create_rl_sampler(run_with(data__seed=seed, data__shuffle=True).data, dataset)
    return StatefulDataLoader(dataset, batch_size=6, sampler=sampler, collate_fn=list)


def test_verl_s_loader_plays_the_mix_and_resumes_in_the_middle_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    first = loader()
    batches = iter(first)
    for _ in range(4):
        next(batches)
    state, rest = first.state_dict(), list(batches)
    resumed = loader()
    resumed.load_state_dict(state)
    assert list(resumed) == rest
    epoch = [row for batch in list(loader()) for row in batch]
    assert Counter(FILE[row] for row in epoch) == {HARMFUL: 20, BENIGN: 20, ATTACK: 20}
    assert "an epoch of 60 rows holds 20 adversarial_benign, 20 vanilla_benign, 20 vanilla_harmful; 10 rows" in (
        capsys.readouterr().out
    )
