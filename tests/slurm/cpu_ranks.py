"""`python -m sweeps train` where accelerate shards a model (FSDP) on CPU ranks too.

By itself accelerate does so on accelerators only. Here every rank says that it is one.
"""

import sys

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType


def use_gloo(self: PartialState, *_: object) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_XPU


def use_the_cpu(self: PartialState) -> None:
    self.device = torch.device("cpu")


PartialState._prepare_backend = use_gloo
PartialState.set_device = use_the_cpu

if __name__ == "__main__":
    from sweeps.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
