"""python -m smoothce.bench [--device cuda | cpu] [options; --help lists them]

Measures the loss beside other methods: on a GPU where there is one (`gpu.py`), else on the CPU
(`cpu.py`)."""

import argparse
import sys

import torch

from smoothce.bench import cpu, gpu


def main() -> None:
    present = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m smoothce.bench", add_help=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if present else "cpu")
    chosen, rest = parser.parse_known_args()
    if chosen.device == "cuda" and not present:
        sys.exit("error: --device cuda, but torch finds no CUDA GPU; use --device cpu")
    (gpu if chosen.device == "cuda" else cpu).main(rest)


if __name__ == "__main__":
    main()
