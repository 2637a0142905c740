"""The builtin trainer, one process of it: `python -m sweeps.trainer RUN_DIR`.

data (messages → tokens with a loss mask) · order (which examples make step s) · checkpoint · loop.
"""
