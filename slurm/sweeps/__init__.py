"""Sweeps of fine-tuning runs, on one machine or on Slurm."""
