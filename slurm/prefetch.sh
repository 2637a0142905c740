#!/bin/bash
#SBATCH --job-name=prefetch
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
# Fetch models, data and packages; run it where there is internet, before sbatch.
#
#   bash   slurm/prefetch.sh [options] [key=value …]     on a login node
#   sbatch slurm/prefetch.sh [options] [key=value …]     only where compute nodes have internet
#
#   --config FILE     the sweep instead of configs/sweeps/grid.yaml
#   --cluster FILE    a profile of configs/cluster
#   --dry-run         print what is here and what would be fetched, and stop
#   key=value         the overrides that the sweep was launched with

# sbatch runs a copy of this file from its spool folder; where it lies is the job's Command=.
project=$(cd "$(dirname "$0")/.." && pwd)
[[ -f $project/slurm/run.sh ]] || project=$(scontrol show job "$SLURM_JOB_ID" |
    sed -n 's|^ *Command=\(.*\)/slurm/prefetch\.sh.*|\1|p')
source "$project/slurm/run.sh" prefetch configs/sweeps/grid.yaml "$@"
