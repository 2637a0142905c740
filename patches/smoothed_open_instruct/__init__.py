"""What the patched open-instruct finetune.py calls; the patches hold the lines that call it.

`python -m smoothed_open_instruct` runs an unpatched checkout with the same loss. `patches_folder`
is for whoever looks for the patches, as `sweeps` does. Upstream is open-instruct here.
"""

from smoothed_open_instruct.arguments import (
    check_arguments,
    respect_offline,
    set_attention_dropout,
    unless_offline,
)
from smoothed_open_instruct.monitor import Monitor
from smoothed_open_instruct.patch_files import patches_folder
from smoothed_open_instruct.resume import (
    Checkpoints,
    already_trained,
    mark_trained,
    resumed_batches,
)
from smoothed_open_instruct.stack import adapt_todays_libraries, model_class
from smoothed_open_instruct.stop_file import StopFile
from smoothed_open_instruct.training_loss import training_loss

__version__ = "0.1.0"

__all__ = [
    "Checkpoints",
    "Monitor",
    "StopFile",
    "adapt_todays_libraries",
    "already_trained",
    "check_arguments",
    "mark_trained",
    "model_class",
    "patches_folder",
    "respect_offline",
    "resumed_batches",
    "set_attention_dropout",
    "training_loss",
    "unless_offline",
]
