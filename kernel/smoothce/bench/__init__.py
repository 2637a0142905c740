"""`python -m smoothce.bench`: time, memory and gradient error of the loss, ours beside others'."""
