"""What trains a run: backend trainer, open-instruct's, backend command, and what they share.

A backend is named by `backend:` of a sweep file; sweeps.runs.backend says what it must offer.
How a run of backend trainer is stopped and goes on is told step by step in `checkpoint`, what an
update computes in `micro_batches`, and how to add an option in `options`.
`starting_ranks` tells how a run of several processes is started.

Words of `sweeps.launch` that are used here: an element is one job of an array of Slurm's, and works
on one run (`launch.element`). A worker, in an element or on this machine, starts the programs that
train and score a run (`launch.worker`); each start of the training is an attempt.

Nothing here imports sweeps.launch or sweeps.results.
"""
