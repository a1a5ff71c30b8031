#!/bin/bash
# A suite on several machines at once: one job of a Slurm array for each shard, then one job that merges them.
#
#   SUITE=lra sbatch --array=0-3 slurm-array.sh
#   sbatch --dependency=afterok:JOB slurm-array.sh merge lra 4
#
# Set the account and the partition here; the partition's machines must be of one kind.
#SBATCH --job-name=attnbench
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --output=attnbench-%A-%a.log
set -euo pipefail

OUT=${OUT:-results}

if [ "${1:-}" = merge ]; then
  exec attnbench merge "$OUT/$2"/*of"$3" --out "$OUT/$2-merged"
fi

# A job that was requeued on a machine of the same kind and memory goes on where it stopped; elsewhere it begins anew.
exec attnbench run "${SUITE:?say which suite: SUITE=lra}" --out "$OUT" \
  --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" "$@"
