"""`python -m sweeps train` where accelerate shards a model (FSDP) on CPU ranks too.

By itself accelerate does so on accelerators only. Here every rank says that it is one. Each prints
whether it has read the model's weights. DeepSpeed leaves its collective of CPU ranks uncompiled.
"""

import os
import sys
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import AutoModelForCausalLM

from sweeps.training import sft_config


def use_gloo(self: PartialState, *_: object) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_XPU


def use_the_cpu(self: PartialState) -> None:
    self.device = torch.device("cpu")


PartialState._prepare_backend = use_gloo
PartialState.set_device = use_the_cpu


start_deepspeed_without_gpu = sft_config.start_deepspeed_without_gpu


def start_deepspeed_uncompiled() -> None:
    """Compiling takes a minute or more, and ranks on GPUs do not use what is compiled."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    start_deepspeed_without_gpu()


sft_config.start_deepspeed_without_gpu = start_deepspeed_uncompiled


def report_loading() -> None:
    """Print on each rank whether it reads the model's files."""
    from sweeps.training import fit

    load_model = fit.load_model
    read = AutoModelForCausalLM.from_pretrained
    has_read = False

    def read_and_note(*arguments: Any, **more: Any) -> Any:
        nonlocal has_read
        has_read = True
        return read(*arguments, **more)

    def load_and_report(*arguments: Any, **more: Any) -> Any:
        model = load_model(*arguments, **more)
        print(
            f"rank {os.environ['RANK']}: weights {'read' if has_read else 'not read'}", flush=True
        )
        return model

    AutoModelForCausalLM.from_pretrained = read_and_note
    fit.load_model = load_and_report


if __name__ == "__main__":
    from sweeps.cli import main

    report_loading()
    sys.exit(main(["train", *sys.argv[1:]]))
