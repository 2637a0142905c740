"""Multiple-choice scoring and calibration metrics.

    dataset → prompt → engine → records (one a question) → metrics → tables and figures

Records are all that scoring hands on, as files or in memory: every metric recomputes from them
without a model or a GPU.

- `ask` makes prompts of tasks and has engines answer them: a new task, chat form or engine;
- `records` is the file of answers, and `imports` makes one of other programs' logs;
- `measures` has the metrics, their intervals and comparisons: a new metric;
- `report` has tables, figures and what `check` says.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calibeval import metrics as metrics
    from calibeval.ask.scoring import score
    from calibeval.callback import CalibrationCallback
    from calibeval.measures import compare, reliability, summarize, summarize_subjects
    from calibeval.measures.scaling import temperature
    from calibeval.report.diagnosis import check

__version__ = "0.1.0"
__all__ = [
    "CalibrationCallback",
    "check",
    "compare",
    "metrics",
    "reliability",
    "score",
    "summarize",
    "summarize_subjects",
    "temperature",
]

# Where the public names are. They are imported when they are first used: NumPy and the model
# libraries take seconds.
_MODULES = {
    "CalibrationCallback": "calibeval.callback",
    "check": "calibeval.report.diagnosis",
    "compare": "calibeval.measures",
    "reliability": "calibeval.measures",
    "score": "calibeval.ask.scoring",
    "summarize": "calibeval.measures",
    "summarize_subjects": "calibeval.measures",
    "temperature": "calibeval.measures.scaling",
}


def __getattr__(name: str) -> Any:
    if name == "metrics":  # a module, of functions on arrays
        return import_module("calibeval.metrics")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
