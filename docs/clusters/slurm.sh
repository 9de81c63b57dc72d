#!/bin/bash
# Eight GPUs of one node, until the run is finished: JUDGE_URL=... JUDGE_MODEL=... sbatch docs/clusters/slurm.sh. Not run here.
#SBATCH --job-name=medserl --nodes=1 --gpus-per-node=8 --cpus-per-task=64 --mem=400G --time=24:00:00
#SBATCH --requeue --open-mode=append --output=medserl-%j.log
#SBATCH --signal=B:USR1@300
set -u
source .venv-gpu/bin/activate
export WANDB_MODE=offline RAY_TMPDIR=/tmp/ray_$SLURM_JOB_ID
# Five minutes before the time is over: go to the queue again. The run resumes from its last checkpoint.
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
bash docs/clusters/until_done.sh runs/qwen3_4b python -m verl.trainer.main_ppo "+recipes=[qwen3_4b,gpu_8x80g]" \
    data.val_files=data/medec_val.parquet selfplay.stop_after_evaluations=5 trainer.total_epochs=100 \
    selfplay.judge_server.url="$JUDGE_URL" selfplay.judge_server.model="$JUDGE_MODEL" \
    ${JUDGE_API_KEY:+selfplay.judge_server.api_key_env=JUDGE_API_KEY} &
wait $!
