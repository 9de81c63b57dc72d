"""The recipes for GPUs: recipes and overrides that are tested together, and the card that they are
for.
"""

CARDS = {
    "qwen3_4b": 80,
    "qwen3_0_6b": 24,
    "verl_script": 80,
    "openrlhf_script": 80,
    "qwen3_4b,lora": 80,
    "qwen3_4b,lora,adapter_per_role": 80,
    "qwen3_4b selfplay.train=attacker": 80,
    "qwen3_4b algorithm.adv_estimator=role_gae": 80,
    "qwen3_4b,judge_by_verl": 80,
    "qwen3_4b,gpu_8x80g": 80,
    "qwen3_4b,gpu_8x80g trainer.n_gpus_per_node=7 data.train_batch_size=252 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=252": 80,
    "qwen3_4b,gpu_8x80g,judge_by_verl trainer.n_gpus_per_node=4 "
    "reward.reward_model.n_gpus_per_node=4": 80,
    "qwen3_4b,gpu_8x80g trainer.nnodes=2": 80,
}
"""GB of the card by recipes and overrides."""

JUDGE_SERVER = (
    "selfplay.judge_server.url=http://localhost:30000/v1",
    "selfplay.judge_server.model=judge",
)

PARTS = {part for recipe in CARDS for part in recipe.split()[0].split(",")[1:]}
"""Recipes that are no runs of their own."""
