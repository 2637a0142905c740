"""Checks flags that the patches add to finetune.py, before anything is loaded.

`log_statistics`, `stop_file` and `attn_implementation`, which they add too, are not checked here.

`KNOWN_TO_FINETUNE` in tests/patches/test_backend.py, and the lists below it, hold every flag.

`set_attention_dropout` carries out the flag of its name. Two functions at the end leave out what
compute nodes without internet cannot do.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from smoothce.options import Options, is_number

LOSS_IMPLEMENTATIONS = ("auto", "fused")
REDUCTIONS = ("mean", "sum", "token_mean")
UPSTREAM_REDUCTIONS = ("mean", "sum")  # those that finetune.py computes itself


def refuse(message: object) -> NoReturn:
    """End the process with this message and exit status 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def check_arguments(
    args: Namespace, upstream_reductions: tuple[str, ...] = UPSTREAM_REDUCTIONS
) -> None:
    """Refuse wrong values of the flags, and wrong types, which a YAML file may hold.

    `filter_eps`, which the command line gives as text, becomes a number where it is one.
    `upstream_reductions` are those that finetune.py computes itself, which differ between commits.
    """
    with suppress(TypeError, ValueError):
        args.filter_eps = float(args.filter_eps)
    try:
        Options(label_smoothing=args.label_smoothing, filter_eps=args.filter_eps)
    except ValueError as error:
        refuse(error)
    _check_choice("loss_impl", args.loss_impl, LOSS_IMPLEMENTATIONS)
    _check_choice("reduce_loss", args.reduce_loss, REDUCTIONS)
    replaced = replaces_loss(args, upstream_reductions)
    if args.filter_eps is not None and not replaced:
        refuse("filter_eps belongs to the fused loss: ask for it with loss_impl fused")
    # Only the patches add this flag; the runner's arguments lack it.
    dropout = getattr(args, "attention_dropout", None)
    if dropout is not None and not (is_number(dropout) and 0 <= dropout < 1):
        refuse(f"attention_dropout must be a number in [0, 1), not {dropout!r}")
    if replaced and args.load_balancing_loss:
        refuse(
            "load_balancing_loss adds to the upstream loss alone: it cannot be combined with "
            "label_smoothing > 0, loss_impl fused or a reduce_loss other than "
            f"{' and '.join(upstream_reductions)}"
        )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        refuse(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def replaces_loss(
    args: Namespace, upstream_reductions: tuple[str, ...] = UPSTREAM_REDUCTIONS
) -> bool:
    """Whether these flags ask for another loss than the script's own, which stays as it is."""
    return (
        args.label_smoothing > 0
        or args.loss_impl == "fused"
        or args.reduce_loss not in upstream_reductions
    )


def set_attention_dropout(config: Any, probability: float | None) -> Callable[[Any], None]:
    """Set the attention dropout of a Hugging Face configuration; None leaves it as it is.

    Upstream saves the very configuration that it has trained with. So this returns a function that
    puts the former value back into one that is to be saved: the dropout belongs to the training and
    not to the model.
    """
    if probability is None:
        return lambda config_to_save: None
    if not hasattr(config, "attention_dropout"):
        refuse(f"attention_dropout: {config.model_type} has no attention dropout to set")
    former = config.attention_dropout
    config.attention_dropout = probability

    def restore(config_to_save: Any) -> None:
        config_to_save.attention_dropout = former

    return restore


def respect_offline(args: Namespace) -> None:
    """Push nothing to the hub and start no evaluation job where HF_HUB_OFFLINE is set.

    Both are on by default upstream, and fail at the start of an offline run.
    """
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true")
    if offline and (args.push_to_hub or args.try_launch_beaker_eval_jobs):
        print("HF_HUB_OFFLINE is set: push_to_hub and try_launch_beaker_eval_jobs are off")
        args.push_to_hub = False
        args.try_launch_beaker_eval_jobs = False


def unless_offline(call: Callable[[], Any], instead: Any) -> Callable[[], Any]:
    """A function that returns `instead` where WANDB_MODE is offline or disabled, else `call()`."""

    def result() -> Any:
        if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
            return instead
        return call()

    return result
