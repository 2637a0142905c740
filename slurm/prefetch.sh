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
#   --throttle N      as at launch; nothing here depends on it
#   key=value         the overrides that the sweep was launched with

# sbatch runs a copy of this file from its spool folder: only the submission folder is known.
project=$(cd "$(dirname "$0")/.." && pwd)
[[ -f $project/slurm/run.sh ]] || project=${SLURM_SUBMIT_DIR:-$PWD}
[[ -f $project/slurm/run.sh ]] || {
    echo "error: $project is not the project's folder; cd there, then: sbatch slurm/prefetch.sh" >&2
    exit 2
}
cd "$project" || exit 2
source slurm/run.sh prefetch configs/sweeps/grid.yaml "$@"
