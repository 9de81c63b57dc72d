"""The recipes for GPUs: the parts that are tested together, and the card that they are for."""

CARDS = {
    "qwen3_4b": 96,
    "qwen3_0_6b": 24,
    "qwen3_4b_sft": 96,
    "verl_script": 96,
    "openrlhf_script": 96,
    "qwen3_4b,gpu_80g": 80,
    "qwen3_4b,gpu_141g": 141,
    "qwen3_4b,gpus_8x80g": 80,
    "qwen3_4b,nodes_2": 80,
    "qwen3_4b,lora": 80,
    "qwen3_4b,lora,adapter_per_role,base_judge": 80,
    "qwen3_4b,role_gae": 96,
    "qwen3_4b,role_gae,gpu_80g": 80,
    "qwen3_4b,attacker_only,judge_frozen": 96,
    "qwen3_4b,assessor_only,judge_endpoint": 96,
    "qwen3_4b,vllm,judge_by_verl": 96,
}
"""GB of the card by recipe."""

WARM_STARTS = ("warm_start_qwen3_4b", "warm_start_qwen3_4b_lora")
"""Of verl's SFT trainer, for one GPU with 96 GB."""

WITHOUT_JUDGE = {recipe for recipe in CARDS if "judge" not in recipe}
PARTS = {part for recipe in CARDS for part in recipe.split(",")[1:]}
"""Recipes that are no runs of their own."""
