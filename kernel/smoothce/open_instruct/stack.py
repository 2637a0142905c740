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


def model_class(attn_implementation: str | None) -> Any:
    """transformers' AutoModelForCausalLM, loading with this attention where one is named.

    Upstream takes flash_attention_2 or eager, whose memory grows with the square of the length.
    """
    from transformers import AutoModelForCausalLM

    if attn_implementation is None:
        return AutoModelForCausalLM

    def load(*args: Any, **kwargs: Any) -> Any:
        chosen = {"attn_implementation": attn_implementation}
        return AutoModelForCausalLM.from_pretrained(*args, **kwargs | chosen)

    return SimpleNamespace(from_pretrained=load, from_config=AutoModelForCausalLM.from_config)


def chat_template(tokenizer: Any) -> Any:
    """Something whose `apply_chat_template` returns the ids themselves.

    transformers 5 returns a dictionary unless told otherwise; earlier versions return the ids.
    """
    return SimpleNamespace(
        apply_chat_template=partial(tokenizer.apply_chat_template, return_dict=False)
    )
