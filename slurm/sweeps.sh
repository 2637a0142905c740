#!/bin/bash
# Any command on a sweep, with the Python that fits; the scripts beside this one are built on it.
#
#   bash slurm/sweeps.sh status SWEEP         what every run is doing, why a dead one died
#   bash slurm/sweeps.sh COMMAND --help       launch status cancel collect prefetch keys; of one run: train score
#
# SWEEP is a sweep's folder, or its file with the overrides of its launch.
set -euo pipefail

# This file was typed; else sweep_*.sh has set project, command and config, and reads it by `source`.
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
    project=$(cd "$(dirname "$0")/.." && pwd) command=${1:-"--help"} config=
    shift $(($# > 0))
fi
# Print the head of the script that was typed: its comment lines from the first "# " to the next empty line.
usage() { sed -n '/^# /,$ { /^$/q; s/^#\( \|$\)//p }' "$0"; }

arguments=()
while (($#)); do
    case $1 in
    -h | --help)
        # A sweep_*.sh, which has set config, shows its own head. Of a command that was typed with this
        # file, Python shows the help.
        [[ -z $config ]] || { usage; exit 0; }
        arguments+=("$1"); shift ;;
    --config)
        (($# > 1)) || { echo "error: $1 needs a file" >&2; exit 2; }
        config=$2; shift 2 ;;
    --config=*) config=${1#*=}; shift ;;
    *) arguments+=("$1"); shift ;;
    esac
done
[[ $command != --help && $command != -h ]] || { usage; exit 0; }

# PYTHON, else an active environment (conda's base is active everywhere and meant nowhere), else .venv,
# else the python3 of the PATH.
active=${VIRTUAL_ENV:-}
if [[ -z $active && ${CONDA_DEFAULT_ENV:-base} != base ]]; then
    active=${CONDA_PREFIX:-}
fi
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x $project/.venv/bin/python ]] && PYTHON=$project/.venv/bin/python
    [[ -n $active && -x $active/bin/python ]] && PYTHON=$active/bin/python
fi
import='import sys; del sys.path[0]; import pydantic, yaml, submitit'
serves() { "$1" -c "$import" 2>/dev/null; }
serves "$PYTHON" || {
    mend="'make setup' in $project, or PYTHON=/path/to/python"
    serves "$project/.venv/bin/python" && mend="PYTHON=$project/.venv/bin/python in front of the command"
    code=0
    words=$("$PYTHON" -c "$import" 2>&1) || code=$?
    reason="lacks this project's packages (${words##*$'\n'})"
    [[ $words == *ModuleNotFoundError* ]] || reason="cannot import this project's packages: ${words##*$'\n'}"
    ((code != 126 && code != 127)) || reason="cannot be run: ${words##*: }" # the shell says why
    echo "error: $PYTHON $reason; $mend" >&2
    exit 2
}
export SWEEPS="bash $(printf %q "$project/slurm/sweeps.sh")" # as messages name it
# With -m, Python would look for modules in the folder where this was typed before any other.
export PYTHONPATH=$project/kernel:$project/patches:$project/slurm:$project/eval${PYTHONPATH:+:$PYTHONPATH}:$project
exec "$PYTHON" "$project/slurm/sweeps/__main__.py" "$command" ${config:+"$config"} "${arguments[@]+"${arguments[@]}"}"
