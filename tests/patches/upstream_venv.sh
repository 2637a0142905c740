#!/usr/bin/env bash
# tests/patches/upstream_venv.sh FOLDER: the Python that the `upstream` tests train with, with the
# libraries that open-instruct e363290 pins; then:
#   OPEN_INSTRUCT_DIR=… OPEN_INSTRUCT_PYTHON=FOLDER/bin/python pytest -m upstream tests/patches
# PYTHON names the interpreter to make it of (3.10 or 3.11; upstream says 3.10).
set -euo pipefail
folder=${1:?usage: upstream_venv.sh FOLDER}
"${PYTHON:-python3}" -c 'import sys; (3, 10) <= sys.version_info < (3, 12) or sys.exit("error: torch 2.4.0 with these pins needs Python 3.10 or 3.11; set PYTHON=")'
"${PYTHON:-python3}" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet)
"${pip[@]}" torch==2.4.0 'numpy<2' transformers==4.43.4 tokenizers==0.19.1 accelerate==0.31.0 \
  datasets==3.0.1 'pyarrow<18' peft==0.13.2 'setuptools<81' wheel \
  wandb nltk==3.8.1 langdetect immutabledict sympy==1.12 antlr4-python3-runtime==4.11.0 rich \
  matplotlib sentencepiece protobuf pydantic pyyaml packaging
DS_BUILD_OPS=0 "${pip[@]}" --no-build-isolation deepspeed==0.15.0
echo "ready: OPEN_INSTRUCT_PYTHON=$folder/bin/python"
