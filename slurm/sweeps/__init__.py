"""Sweeps of fine-tuning runs, on one machine or on Slurm.

The wings, from the bottom up: `runs` (a sweep's files, its grid, a run's folder and state),
`training` (what trains a run) and `launch` (how runs get done), which do not import each other, and
`results` (status and tables). `cli` parses commands.

One β on its way: runs.schema (YAML → models) · runs.grid (the grid's runs and their folders) ·
launch.slurm or launch.local (what is missing, started) · launch.worker (inside a job: train, score,
DONE) · training.hf_trainer (the weights) · runs.scoring (calibeval, on the model) ·
results.collect (the tables).
"""

__version__ = "0.1.0"
