"""Differences between the libraries that open-instruct e363290 pins and today's."""

import inspect
from functools import partialmethod
from types import SimpleNamespace
from typing import Any


def todays_libraries() -> None:
    """Give today's libraries what the script expects of the pinned ones.

    accelerate's class takes `use_seedable_sampler`, and chat templates return ids. AdamW is made
    without empty groups of parameters, which DeepSpeed drops and torch's schedulers then miss.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from transformers import PreTrainedTokenizerBase

    accelerator_class: Any = Accelerator
    init_accelerator = accelerator_class.__init__
    adamw_class: Any = torch.optim.AdamW
    init_adamw = adamw_class.__init__

    def init_with_seedable_sampler(
        self: Any, *args: Any, use_seedable_sampler: bool = False, **kwargs: Any
    ) -> None:
        if use_seedable_sampler:
            kwargs["dataloader_config"] = DataLoaderConfiguration(use_seedable_sampler=True)
        init_accelerator(self, *args, **kwargs)

    def init_without_empty_groups(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        groups = [group for group in params if not isinstance(group, dict) or group["params"]]
        init_adamw(self, groups, *args, **kwargs)

    if "use_seedable_sampler" not in inspect.signature(Accelerator).parameters:
        accelerator_class.__init__ = init_with_seedable_sampler
    adamw_class.__init__ = init_without_empty_groups
    tokenizer_class: Any = PreTrainedTokenizerBase
    tokenizer_class.apply_chat_template = partialmethod(
        tokenizer_class.apply_chat_template, return_dict=False
    )


def model_class(attn_implementation: str | None) -> Any:
    """What loads models: AutoModelForCausalLM, or its two constructors with the attention named.

    Upstream takes flash_attention_2, or eager, whose memory grows with the square of the length.
    """
    from transformers import AutoModelForCausalLM

    if attn_implementation is None:
        return AutoModelForCausalLM

    def load(*args: Any, **kwargs: Any) -> Any:
        kwargs["attn_implementation"] = attn_implementation
        return AutoModelForCausalLM.from_pretrained(*args, **kwargs)

    return SimpleNamespace(from_pretrained=load, from_config=AutoModelForCausalLM.from_config)
