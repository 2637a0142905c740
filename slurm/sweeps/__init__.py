"""Sweeps of fine-tuning runs, on one machine or on Slurm.

A run's way: `runs.grid` reads a sweep file and expands its grid into runs, each with a folder;
`launch` starts what is missing, here (`launch.local`) or by job arrays (`launch.slurm`); there
`launch.worker` brings the run through its stages, of which `training` makes the weights and
`runs.scoring` the records; `results` tells what became of the runs and makes the tables.

`runs` is used by the three others; `training` and `launch` do not import each other; `cli`, which
parses commands, is imported by none of them.
"""

__version__ = "0.1.0"
