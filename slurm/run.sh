#!/bin/bash
# What the scripts beside this one share: find a Python and hand over to `sweeps`.
#   project=… && source slurm/run.sh COMMAND DEFAULT_CONFIG "$@"
set -euo pipefail
project=$(cd "$project" && pwd) command=$1 config=$2
shift 2

usage() { sed -n '/^# /,$ { /^$/q; s/^#\( \|$\)//p }' "$0"; } # the head of the script that was typed

[[ $command != --help && $command != -h ]] || { usage; exit 0; }
arguments=()
while (($#)); do
    case $1 in
    -h | --help) [[ -z $config ]] || { usage; exit 0; }; arguments+=("$1"); shift ;;
    --config)
        (($# > 1)) || { echo "error: $1 needs a file" >&2; exit 2; }
        config=$2; shift 2 ;;
    --config=*) config=${1#*=}; shift ;;
    *) arguments+=("$1"); shift ;;
    esac
done
# PYTHON, else an active environment (conda's base is active everywhere and meant nowhere), else .venv.
active=${VIRTUAL_ENV:-}
[[ -n $active || ${CONDA_DEFAULT_ENV:-base} == base ]] || active=${CONDA_PREFIX:-}
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x $project/.venv/bin/python ]] && PYTHON=$project/.venv/bin/python
    [[ -n $active && -x $active/bin/python ]] && PYTHON=$active/bin/python
fi
serves() { "$1" -c 'import pydantic, yaml, filelock' 2>/dev/null; }
serves "$PYTHON" || {
    mend="'make setup' in $project, or PYTHON=/path/to/python"
    serves "$project/.venv/bin/python" && mend="PYTHON=$project/.venv/bin/python in front of the command"
    echo "error: $PYTHON lacks this project's packages; $mend" >&2
    exit 2
}
export PYTHONPATH=$project/kernel:$project/slurm:$project/eval${PYTHONPATH:+:$PYTHONPATH}
exec "$PYTHON" -m sweeps "$command" ${config:+"$config"} "${arguments[@]+"${arguments[@]}"}"
