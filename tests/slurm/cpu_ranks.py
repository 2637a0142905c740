"""`python -m sweeps train` where accelerate shards on CPU ranks too: by itself on GPUs alone."""

import sys

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_XPU)
PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))

if __name__ == "__main__":
    from sweeps.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
