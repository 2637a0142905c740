"""What trains a run: the Hugging Face backend, open-instruct's, and what both share.

A backend is named by `backend:` of a sweep file; sweeps.runs.backend says what it must offer.
Nothing here imports sweeps.launch or sweeps.results.
"""
