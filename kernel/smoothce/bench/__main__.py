"""python -m smoothce.bench --models gemma2-2b --tokens 8192 --contexts 0.15 2.0 --json out.json
python -m smoothce.bench --tensors lm.pt          (hidden, weight, labels of a real last layer)
python -m smoothce.bench --models llama3-8b 8192x2048 --only ours --masked 0 0.5
python -m smoothce.bench --device cpu --tokens 2048 --label-smoothing 0 0.1

Time, memory and gradient error of the loss beside other methods, on the same inputs: bf16 on a GPU,
fp32 on a CPU. Methods take turns in a random order, each sample beside the product E Cᵀ, whose time
is the unit. Where an option has several values, all are measured."""

import torch

from smoothce.bench import arguments, measure


def main() -> None:
    measure.main(arguments.parse(None, torch.cuda.is_available(), __doc__))


if __name__ == "__main__":
    main()
