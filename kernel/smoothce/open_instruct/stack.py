"""Differences between the libraries that open-instruct e363290 pins and today's."""

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any


def accelerator_class(accelerator: type) -> Any:
    """The class, or one that takes `use_seedable_sampler` where accelerate 1.x dropped it."""
    if "use_seedable_sampler" in inspect.signature(accelerator).parameters:
        return accelerator

    def construct(*args: Any, use_seedable_sampler: bool = False, **kwargs: Any) -> Any:
        from accelerate.utils import DataLoaderConfiguration

        loading = DataLoaderConfiguration(use_seedable_sampler=use_seedable_sampler)
        return accelerator(*args, dataloader_config=loading, **kwargs)

    return construct


def chat_template(tokenizer: Any) -> Any:
    """Something whose `apply_chat_template` returns the ids themselves.

    transformers 5 returns a dictionary unless told otherwise; earlier versions return the ids.
    """
    return SimpleNamespace(
        apply_chat_template=partial(tokenizer.apply_chat_template, return_dict=False)
    )
