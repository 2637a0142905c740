#!/bin/bash
#SBATCH --job-name=sweep_beta
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
# Six label-smoothing factors at one learning rate.
#
#   sbatch slurm/sweep_beta.sh [options] [key=value …]     on a cluster: this job queues the rest
#   bash   slurm/sweep_beta.sh [options] [key=value …]     queues from here; without Slurm: the same runs, here
#
#   --config FILE     the sweep instead of configs/sweeps/beta.yaml
#   --cluster FILE    a profile of configs/cluster
#   --throttle N      elements that run at a time
#   --dry-run         print what would be queued and stop
#   key=value         overrides, for example train.num_train_epochs=1 grid.seed=[1,2,3]
#
# Submitting again queues only what is neither finished nor queued.

# sbatch runs a copy of this file from its spool folder: only the submission folder is known.
project=$(cd "$(dirname "$0")/.." && pwd)
[[ -f $project/slurm/run.sh ]] || project=${SLURM_SUBMIT_DIR:-$PWD}
[[ -f $project/slurm/run.sh ]] || {
    echo "error: $project is not the project's folder; cd there, then: sbatch slurm/sweep_beta.sh" >&2
    exit 2
}
cd "$project" || exit 2
source slurm/run.sh launch configs/sweeps/beta.yaml "$@"
