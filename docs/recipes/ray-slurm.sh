#!/bin/bash
# A suite on several machines at once, shared out by Ray while it runs.
#
#   SUITE=lra sbatch --nodes=4 ray-slurm.sh
#
# Set the account and the partition here. The folder must be one that all machines see; the same command goes on.
#SBATCH --job-name=attnbench
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --output=attnbench-%j.log
set -euo pipefail

export RAY_worker_niceness=0 # before Ray starts: otherwise anything else on a machine goes first
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Every machine starts Ray; the first one runs the command once all are there, and ends Ray everywhere after it.
exec srun ray symmetric-run --address "$HEAD:6379" --min-nodes "$SLURM_JOB_NUM_NODES" \
  --resources '{"machine": 1}' -- \
  attnbench run "${SUITE:?say which suite: SUITE=lra}" --on ray:auto --out "${OUT:-results}" "$@"
