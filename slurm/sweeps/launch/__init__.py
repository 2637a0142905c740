"""How runs get done: checks before, on Slurm or on this machine, and what a job executes."""
