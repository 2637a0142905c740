"""The one exception that the command line prints as `error: …` and exits 2 on."""


class InputError(ValueError):
    """The user gave something unusable; the message names the file, the row and the remedy."""
