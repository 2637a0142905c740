"""Sweeps of fine-tuning runs, on one machine or on Slurm.

Read in this order: config (YAML → frozen models) · grid (sweep → runs) · rundir (one run's
folder) · backends (what trains) · supervise (one run, lock to DONE) · executors · launch.
"""
