"""What a run says before it starts about whom it trains and what its numbers cannot show."""

import pytest

from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.games.medical.interaction import MedicalGameInteraction
from medserl_agentloop.paths import resource
from medserl_agentloop.testing import compose_run


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["+recipes=quickstart"], []),
        (["+recipes=quickstart", "selfplay.profile=edits"], ["novice", "brief", "edits"]),
        (["+recipes=own_notes"], ["selfplay.judge=labels", "toy clinic"]),
        (
            ["+recipes=own_notes", "actor_rollout_ref.model.path=/models/assets/mine"],
            ["selfplay.judge=labels"],
        ),
    ],
)
def test_a_run_says_what_its_numbers_cannot_show(overrides: list[str], named: list[str]) -> None:
    config = compose_run(*overrides)
    said = list(MedicalGameInteraction.View.caveats(config, MedicalConfig.from_run(config)))
    assert len(said) == bool(named)
    assert all(word in said[0] for word in named)


def test_a_run_of_one_role_says_who_is_trained_and_who_plays_the_other() -> None:
    roles, model = MedicalGameInteraction.roles, resource("assets/novice")
    assert MedicalConfig(game="medical", judge="labels").who_trains(roles) is None
    alone = MedicalConfig(game="medical", judge="labels", train="assessor").who_trains(roles) or ""
    assert alone.startswith("only the assessor") and "attacker" in alone and "policy" in alone
    frozen = MedicalConfig(
        game="medical",
        judge="labels",
        train="assessor",
        opponent={"url": "http://host:1", "model": model.name},
    )
    assert "frozen novice" in (frozen.who_trains(roles) or "")
