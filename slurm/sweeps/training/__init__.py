"""What trains a run: the Hugging Face backend, open-instruct's, and what both share.

A backend is named by `backend:` of a sweep file; sweeps.runs.backend says what it must offer.
How a run of backend trainer is stopped and goes on is told step by step in `checkpoint`, what an
update computes in `global_batches`, and how to add an option in `options`.
`starting_ranks` tells how a run of several processes is started. What a job, an element, a worker
and an attempt are, is told in `sweeps.launch`.
Nothing here imports sweeps.launch or sweeps.results.
"""
