#!/usr/bin/env bash
# Make a virtual environment with vLLM on CPU and lm-evaluation-harness, to compare both with this project:
#     tests/eval/lm_eval_env.sh .venv-lm-eval && .venv-lm-eval/bin/python tests/eval/lm_eval_comparison.py --data MMLU
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:?usage: tests/eval/lm_eval_env.sh VENV}
tests/eval/vllm_env.sh "$venv"
test -e "$venv/.ready-lm-eval" && exit 0
"$venv/bin/pip" install --quiet --disable-pip-version-check -c configs/constraints-cpu.txt 'lm-eval[hf]==0.4.13'
touch "$venv/.ready-lm-eval"
