#!/bin/bash
# What the scripts beside this one share: find a Python, read paths from where they were typed, and
# hand over to `sweeps`.
#   cd PROJECT && source slurm/run.sh COMMAND DEFAULT_CONFIG "$@"
set -euo pipefail
command=$1 config=$2
shift 2
typed_in=$OLDPWD # paths of --config and --cluster start there, or else at the project

usage() { # the head of the script that was typed
    local script=$0
    [[ $script == /* ]] || script=$typed_in/$script
    sed -n '/^# /,$ { /^$/q; s/^#\( \|$\)//p }' "$script"
}
place() { if [[ $1 != /* && -e $typed_in/$1 ]]; then echo "$typed_in/$1"; else echo "$1"; fi; }

arguments=()
while (($#)); do
    case $1 in
    -h | --help) usage; exit 0 ;;
    --config | --cluster)
        (($# > 1)) || { echo "error: $1 needs a file" >&2; exit 2; }
        set -- "$1=$2" "${@:3}" ;;
    --config=*) config=$(place "${1#*=}"); shift ;;
    --cluster=*) arguments+=("--cluster=$(place "${1#*=}")"); shift ;;
    cluster=*) arguments+=("cluster=$(place "${1#*=}")"); shift ;;
    *) arguments+=("$1"); shift ;;
    esac
done
# PYTHON, else an active environment (conda's base is active everywhere and meant nowhere), else .venv.
active=${VIRTUAL_ENV:-}
[[ -n $active || ${CONDA_DEFAULT_ENV:-base} == base ]] || active=${CONDA_PREFIX:-}
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
    [[ -n $active && -x $active/bin/python ]] && PYTHON=$active/bin/python
fi
"$PYTHON" -c 'import pydantic, yaml, filelock' 2>/dev/null || {
    echo "error: $PYTHON lacks this project's packages; 'make setup' in $PWD, or PYTHON=/path/to/python" >&2
    exit 2
}
export PYTHONPATH=$PWD/kernel:$PWD/slurm:$PWD/eval${PYTHONPATH:+:$PYTHONPATH}
exec "$PYTHON" -m sweeps "$command" "$config" "${arguments[@]+"${arguments[@]}"}"
