"""What trains a run: the Hugging Face backend, open-instruct's, and what both share.

A backend is named by `backend:` of a sweep file; sweeps.runs.backend says what it must offer.
How a run of backend trainer is stopped and goes on is told step by step in `checkpoint`, what an
update computes in `global_batches`, and how to add an option in `options`.
Nothing here imports sweeps.launch or sweeps.results.
"""
