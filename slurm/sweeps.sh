#!/bin/bash
# Any command on a sweep, with the Python that the scripts beside this one take.
#
#   bash slurm/sweeps.sh smoke SWEEP              one run in small, before a launch
#   bash slurm/sweeps.sh status SWEEP             what every run is doing, why a dead one died
#   bash slurm/sweeps.sh logs SWEEP --run TEXT    the end of its logs
#   bash slurm/sweeps.sh retry SWEEP              start what is dead again
#   bash slurm/sweeps.sh cancel SWEEP
#   bash slurm/sweeps.sh COMMAND --help           the others: plan launch score collect prefetch preflight gc
#
# SWEEP is a sweep's folder, or its file with the overrides of its launch.

project=$(cd "$(dirname "$0")/.." && pwd)
[[ -f $project/slurm/run.sh ]] || { echo "error: not by sbatch: bash slurm/sweeps.sh …" >&2; exit 2; }
[[ $# -gt 0 ]] || set -- --help
source "$project/slurm/run.sh" "$1" "" "${@:2}"
