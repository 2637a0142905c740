"""Multiple-choice scoring and calibration metrics.

    dataset → prompt → engine → records (one a question) → metrics → tables and plots

Stages share only files: every metric recomputes from the records without a model or a GPU.
"""

from importlib import import_module

__version__ = "0.1.0"
__all__ = ["CalibrationCallback", "compare", "metrics", "reliability", "score", "temperature"]


def __getattr__(name: str):
    """The public names, each with what it needs: NumPy and the model libraries take seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = {"CalibrationCallback": "callback", "score": "scoring", "temperature": "scaling"}
    return getattr(import_module(f"calibeval.{modules.get(name, 'api')}"), name)
