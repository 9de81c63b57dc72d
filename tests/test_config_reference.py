"""The configuration page and the recipes' ``selfplay`` node say what the fields say."""

from make_reference import NODES, PAGE, REPORT, entries, is_node, page, with_columns, with_node
from omegaconf import OmegaConf

from medserl_agentloop.games.medical.config import MedicalConfig
from medserl_agentloop.testing.tiny import compose_run

WRITE_AGAIN = "run python docs/make_reference.py"


def test_page_and_recipe_are_written_from_the_fields_of_today() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), WRITE_AGAIN
    for recipe in NODES:
        assert with_node(recipe) == recipe.read_text(encoding="utf-8"), WRITE_AGAIN


def test_the_page_of_the_report_has_the_columns_of_today() -> None:
    assert REPORT.read_text(encoding="utf-8") == with_columns(), WRITE_AGAIN


def test_the_recipe_s_node_is_the_defaults() -> None:
    node = compose_run("+recipes=base").selfplay
    node.records = "runs/selfplay"  # the recipe's own: beside verl's checkpoints
    assert MedicalConfig.model_validate(OmegaConf.to_container(node)) == MedicalConfig()


def test_every_key_has_a_description() -> None:
    assert not [key for key, field in entries(MedicalConfig) if not field.description]
    assert len([key for key, field in entries(MedicalConfig) if not is_node(field)]) > 70
