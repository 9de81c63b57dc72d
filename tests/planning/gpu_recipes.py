"""The recipes for GPUs: recipes and overrides that are tested together, and the card that they are
for.
"""

ROLLOUT = "actor_rollout_ref.rollout"
CARDS = {
    "qwen3_4b": 96,
    "qwen3_0_6b": 24,
    "verl_script": 96,
    "openrlhf_script": 96,
    "qwen3_4b,gpu_80g": 80,
    "qwen3_4b,gpu_80g,first_run": 80,
    f"qwen3_4b {ROLLOUT}.gpu_memory_utilization=0.6": 141,
    "qwen3_4b,lora": 80,
    "qwen3_4b,lora,adapter_per_role": 80,
    "qwen3_4b selfplay.train=attacker": 96,
    "qwen3_4b,gpu_80g algorithm.adv_estimator=role_gae": 80,
    f"qwen3_4b trainer.n_gpus_per_node=8 {ROLLOUT}.gpu_memory_utilization=0.6": 80,
    "qwen3_4b trainer.n_gpus_per_node=7 data.train_batch_size=63 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=63": 80,
    "qwen3_4b,judge_by_verl,first_run": 96,
    "qwen3_4b,judge_by_verl trainer.n_gpus_per_node=4 reward.reward_model.n_gpus_per_node=4": 80,
    "qwen3_4b trainer.n_gpus_per_node=8 trainer.nnodes=2": 80,
}
"""GB of the card by recipes and overrides."""

PARTS = {part for recipe in CARDS for part in recipe.split()[0].split(",")[1:]}
"""Recipes that are no runs of their own."""
