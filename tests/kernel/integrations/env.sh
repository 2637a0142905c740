#!/usr/bin/env bash
# Make a virtual environment with the programs whose hooks the loss is tried in:
#     tests/kernel/integrations/env.sh .venv-hosts && .venv-hosts/bin/python -m pytest tests/kernel/integrations
# Each comes without what it asks for: they exclude each other's versions, and the parts tried here
# need little of it.
set -euo pipefail
cd "$(dirname "$0")/../../.."
venv=${1:?usage: tests/kernel/integrations/env.sh VENV}
test -e "$venv/.ready" && exit 0
test -d "$venv" || "${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/pip" install --quiet --disable-pip-version-check -c configs/constraints-cpu.txt)
"${pip[@]}" torch
"${pip[@]}" peft accelerate datasets transformers lightning==2.6.6 \
    -e ./kernel -e ./eval -r tests/requirements.txt
# What axolotl 0.19.0 asks for, and no TRL that patch_trainer takes: .venv has one.
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps trl==1.9.0
"${pip[@]}" --no-deps axolotl==0.19.0 nemo_automodel==0.7.0 torchtitan==0.3.0 kernels==0.17.2
"${pip[@]}" triton addict numba colorama pillow python-dotenv spmd_types==0.2.3 tyro torchdata # what those import
touch "$venv/.ready"
