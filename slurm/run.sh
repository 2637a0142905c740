#!/bin/bash
# What the scripts beside this one share: find the project, a Python, and hand over to `sweeps`.
#   source slurm/run.sh COMMAND DEFAULT_CONFIG "$@"
set -euo pipefail
command=$1 config=$2
shift 2
arguments=()
while (($#)); do
    case $1 in
    --config)
        (($# > 1)) || { echo "error: --config needs a file" >&2; exit 2; }
        config=$2; shift 2 ;;
    --config=*) config=${1#*=}; shift ;;
    *) arguments+=("$1"); shift ;;
    esac
done
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
"$PYTHON" -c 'import pydantic, yaml, filelock' 2>/dev/null || {
    echo "error: $PYTHON lacks this project's packages; 'make setup' in $PWD, or PYTHON=/path/to/python" >&2
    exit 2
}
export PYTHONPATH=$PWD/kernel:$PWD/slurm:$PWD/eval${PYTHONPATH:+:$PYTHONPATH}
exec "$PYTHON" -m sweeps "$command" "$config" "${arguments[@]+"${arguments[@]}"}"
