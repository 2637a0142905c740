"""`backend: toy.sharding_backend`: backend trainer, with FSDP on CPU ranks too (see cpu_ranks)."""

from sweeps.runs.run import Run
from sweeps.training import hf_backend, starting_ranks
from sweeps.training.hf_backend import Train, missing, packages, trains_on_several_nodes

__all__ = ["Train", "missing", "packages", "train", "trains_on_several_nodes"]


def train(run: Run) -> None:
    starting_ranks.exec_torchrun(run)
    import cpu_ranks  # noqa: F401 it changes accelerate

    hf_backend.train(run)
