"""A task that small models learn in minutes, for reinforcement learning: see README.md."""
