"""Multiple-choice scoring and calibration metrics.

    dataset → prompt → engine → records (one a question) → metrics → tables and plots

Stages share only files: every metric recomputes from the records without a model or a GPU.
"""

__version__ = "0.1.0"
