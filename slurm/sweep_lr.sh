#!/bin/bash
#SBATCH --job-name=sweep_lr
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
# Four learning rates at β = 0 and β = 0.1.
#
#   sbatch slurm/sweep_lr.sh [options] [key=value …]     on a cluster: this job queues the rest
#   bash   slurm/sweep_lr.sh [options] [key=value …]     queues from here; without Slurm: the same runs, here
#
#   --config FILE     the sweep instead of configs/sweeps/lr.yaml
#   --cluster FILE    a profile of configs/cluster
#   --dry-run         print what would be queued if nothing were, and stop
#   key=value         overrides, for example train.num_train_epochs=1 grid.seed=[1,2,3] throttle=4
#
# Submitting again queues only what is neither finished nor queued.

# sbatch runs a copy of this file from its spool folder; where it lies is the job's Command=.
project=$(cd "$(dirname "$0")/.." && pwd)
[[ -f $project/slurm/sweeps.sh ]] || project=$(scontrol show job "$SLURM_JOB_ID" |
    sed -n 's|^ *Command=\(.*\)/slurm/sweep_lr\.sh.*|\1|p' | head -n 1)
command=launch config=configs/sweeps/lr.yaml
source "$project/slurm/sweeps.sh"
