#!/usr/bin/env bash
# Make a virtual environment with the packages that the metrics are compared with:
#     tests/eval/peers_env.sh .venv-peers && .venv-peers/bin/python -m pytest tests/eval/test_metric_peers.py
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:?usage: tests/eval/peers_env.sh VENV}
test -e "$venv/.ready" && exit 0
test -d "$venv" || "${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/pip" install --quiet --disable-pip-version-check -c configs/constraints-cpu.txt)
"${pip[@]}" torch
"${pip[@]}" uncertainty-calibration==0.1.4 relplot==1.0.3 trl==1.16.0 \
    -e ./kernel -e ./eval -e ./slurm -r tests/requirements.txt
"${pip[@]}" torchmetrics==1.9.0
"${pip[@]}" lm_eval==0.4.13 # what it sends is what we send; TRL's chat templates serve for it
touch "$venv/.ready"
