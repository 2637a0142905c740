"""Sweeps of fine-tuning runs, on one machine or on Slurm.

One β on its way: plan (the sweep, as asked for) · executors.slurm (what is missing, submitted) ·
executors.element (inside a job) · supervise (one run, lease to DONE) · backends (what trains) ·
score (calibeval, on the trained model) · results (tables and gaps). Below these: rundir (a run's
folder), config (YAML → frozen models), files. Imports go down only.
"""
