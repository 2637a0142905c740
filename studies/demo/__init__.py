"""A sweep to try out: a world made on the spot, a model that has read about it, a table."""
