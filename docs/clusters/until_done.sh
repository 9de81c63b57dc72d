#!/bin/bash
# Run a training command until it ends well: bash docs/clusters/until_done.sh RUN_FOLDER COMMAND...
# The same command resumes from the last checkpoint of RUN_FOLDER (trainer.default_local_dir). After three tries in a row
# without a new checkpoint it gives up, with the exit code of the last one.
set -u
run=$1
shift
without=0
while true; do
    before=$(cat "$run/latest_checkpointed_iteration.txt" 2>/dev/null)
    "$@" && exit 0
    code=$?
    after=$(cat "$run/latest_checkpointed_iteration.txt" 2>/dev/null)
    if [ "$before" = "$after" ]; then without=$((without + 1)); else without=0; fi
    echo "ended with $code at the checkpoint of step ${after:-0}; tries without a new one: $without" >&2
    [ "$without" -lt 3 ] || exit "$code"
    sleep 15  # Ray of a killed run ends by itself
done
