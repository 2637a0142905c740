"""The one error that reaches users as `error: …` without a traceback."""


class SweepError(Exception):
    """Something the user can put right: file, key or row, what was found, what was expected."""
