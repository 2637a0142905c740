#!/bin/bash
#SBATCH --job-name=collect
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
# Tables, diagrams and report of a sweep; exit 1 while there are gaps.
#
#   bash   slurm/collect.sh [options] [key=value …]     right here
#   sbatch slurm/collect.sh [options] [key=value …]     this job does it
#
#   --config FILE     the sweep instead of configs/sweeps/grid.yaml
#   --cluster FILE    a profile of configs/cluster
#   key=value         the overrides that the sweep was launched with

# sbatch runs a copy of this file from its spool folder; where it lies is the job's Command=.
project=$(cd "$(dirname "$0")/.." && pwd)
[[ -f $project/slurm/run.sh ]] || project=$(scontrol show job "$SLURM_JOB_ID" |
    sed -n 's|^ *Command=\(.*\)/slurm/collect\.sh.*|\1|p')
source "$project/slurm/run.sh" collect configs/sweeps/grid.yaml "$@"
