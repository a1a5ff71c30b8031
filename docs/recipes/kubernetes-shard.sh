#!/bin/sh
# What one pod of the indexed Job runs: the shard that has the pod's number. SHARDS is the Job's `completions`.
set -eu
exec attnbench run "${SUITE:?say which suite: SUITE=lra}" --out "${OUT:-/results}" \
  --shard "$JOB_COMPLETION_INDEX/${SHARDS:?say how many shards: the completions of the Job}" "$@"
