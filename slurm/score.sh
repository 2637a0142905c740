#!/bin/bash
#SBATCH --job-name=score
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
# Score whatever is trained and not yet scored, without training.
#
#   sbatch slurm/score.sh [options] [key=value …]     on a cluster: this job queues the scoring
#   bash   slurm/score.sh [options] [key=value …]     queues from here; without Slurm: the scoring itself, here
#
#   --config FILE     the sweep instead of configs/sweeps/grid.yaml
#   --cluster FILE    a profile of configs/cluster
#   key=value         the overrides that the sweep was launched with

# sbatch runs a copy of this file from its spool folder; where it lies is the job's Command=.
project=$(cd "$(dirname "$0")/.." && pwd)
[[ -f $project/slurm/run.sh ]] || project=$(scontrol show job "$SLURM_JOB_ID" |
    sed -n 's|^ *Command=\(.*\)/slurm/score\.sh.*|\1|p')
source "$project/slurm/run.sh" score configs/sweeps/grid.yaml "$@"
