"""Where runs go: this machine, or Slurm."""
