"""`python -m smoothce.bench`: time, memory and gradient error of the loss, ours beside others'.

`__main__` is the command, `methods` has the losses that are measured, `language` makes the inputs,
`measure` measures, and `table` prints. Other libraries' losses, and further benchmarks, are in
kernel/benchmarks.
"""
