"""The former name of `sweeps.training.starting_ranks`, for backends of a user's own.

Nothing of this project imports it.
"""

import warnings
from typing import Any

from sweeps.training import starting_ranks


def __getattr__(name: str) -> Any:
    value = getattr(starting_ranks, name)
    warnings.warn(
        f"sweeps.training.torchrun.{name} is sweeps.training.starting_ranks.{name} now",
        FutureWarning,
        stacklevel=2,
    )
    return value
