"""python -m smoothce.bench --models gemma2-2b --tokens 8192 --contexts 0.15 2.0 --json out.json
python -m smoothce.bench --tensors lm.pt          (hidden, weight, labels of a real last layer)
python -m smoothce.bench --models llama3-8b 8192x2048 --only ours --masked 0 0.5
python -m smoothce.bench --device cpu --tokens 2048 --label-smoothing 0 0.1

Time, memory and gradient error of the loss beside other methods. On a GPU (`gpu.py`) every method
is measured on the same inputs, in turns with the product E Cᵀ by cuBLAS, whose time is the unit;
on a CPU (`cpu.py`) on random inputs. Where an option has several values, all are measured."""

import importlib

import torch

from smoothce.bench import arguments


def main() -> None:
    args = arguments.parse(None, torch.cuda.is_available(), __doc__)
    # the GPU's imports Triton, which a CPU's machine may lack
    module = {"cuda": "gpu", "cpu": "cpu"}[args.device]
    importlib.import_module(f"smoothce.bench.{module}").main(args)


if __name__ == "__main__":
    main()
