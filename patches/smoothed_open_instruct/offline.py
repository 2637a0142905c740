"""Runs that cannot reach a hub: compute nodes without internet."""

import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any


def respect_offline(args: Namespace) -> None:
    """Where HF_HUB_OFFLINE is set, nothing is pushed to the hub and no evaluation job is started.

    Both are on by default upstream, and fail at the start of an offline run.
    """
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true")
    if offline and (args.push_to_hub or args.try_launch_beaker_eval_jobs):
        print("HF_HUB_OFFLINE is set: push_to_hub and try_launch_beaker_eval_jobs are off")
        args.push_to_hub = args.try_launch_beaker_eval_jobs = False


def unless_offline(call: Callable[[], Any], instead: Any) -> Callable[[], Any]:
    """`call`, but where WANDB_MODE is offline or disabled its result is `instead`."""

    def result() -> Any:
        return instead if os.environ.get("WANDB_MODE") in ("offline", "disabled") else call()

    return result
