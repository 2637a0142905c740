"""Differences between the libraries that open-instruct e363290 pins and today's."""

import inspect
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any


def accelerator_class(accelerator: type) -> type:
    """The class, or one that takes `use_seedable_sampler` where accelerate 1.x dropped it."""
    if "use_seedable_sampler" in inspect.signature(accelerator).parameters:
        return accelerator

    class Accelerator(accelerator):
        def __init__(self, *args: Any, use_seedable_sampler: bool = False, **kwargs: Any) -> None:
            from accelerate.utils import DataLoaderConfiguration

            if use_seedable_sampler:
                loading = DataLoaderConfiguration(use_seedable_sampler=True)
                kwargs["dataloader_config"] = loading
            super().__init__(*args, **kwargs)

    return Accelerator


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


def todays_libraries() -> None:
    """What the patches change in the script for today's libraries, made the libraries' default.

    Chat templates return ids, and AdamW has no empty group of parameters.
    """
    import torch
    from transformers import PreTrainedTokenizerBase

    PreTrainedTokenizerBase.apply_chat_template = partialmethod(
        PreTrainedTokenizerBase.apply_chat_template, return_dict=False
    )
    construct = torch.optim.AdamW.__init__

    def without_empty(self: Any, groups: Any, *args: Any, **kwargs: Any) -> None:
        kept = [one for one in groups if not isinstance(one, dict) or one["params"]]
        construct(self, kept, *args, **kwargs)

    torch.optim.AdamW.__init__ = without_empty
