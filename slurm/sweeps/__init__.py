"""Sweeps of fine-tuning runs, on one machine or on Slurm.

A run's way: `runs.grid` reads a sweep file and expands its grid into runs, each with a folder.
`launch` starts what is not done: here (`launch.local`), or by job arrays (`launch.slurm`), of which
submitit starts each element (`launch.element`). There `launch.worker` brings the run through its
stages, each a program of its own, `python -m sweeps train RUN_DIR` or `score`. The first calls the
run's backend (`runs.backend`); for several processes, it becomes torchrun, and each rank runs
`train` again. `training` makes the weights, `runs.scoring` the records; `results` tells what became
of the runs and makes the tables.

`runs` is used by the three others; `training` and `launch` do not import each other; `cli`, which
parses commands, is imported by none of them.
"""

__version__ = "0.1.0"
