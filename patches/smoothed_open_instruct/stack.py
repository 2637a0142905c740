"""Differences between the libraries that open-instruct e363290 pins and today's."""

import inspect
from functools import partialmethod
from types import SimpleNamespace
from typing import Any


def adapt_todays_libraries() -> None:
    """Give this process's libraries what finetune.py expects of the pinned ones."""
    _take_seedable_sampler()
    _leave_out_empty_groups()
    _return_ids_of_chats()


def _take_seedable_sampler() -> None:
    """Let accelerate's class take `use_seedable_sampler`, which today belongs into a config."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    if "use_seedable_sampler" in inspect.signature(Accelerator).parameters:
        return
    accelerator_class: Any = Accelerator
    init = accelerator_class.__init__

    def init_with_sampler(
        self: Any, *args: Any, use_seedable_sampler: bool = False, **kwargs: Any
    ) -> None:
        if use_seedable_sampler:
            kwargs["dataloader_config"] = DataLoaderConfiguration(use_seedable_sampler=True)
        init(self, *args, **kwargs)

    accelerator_class.__init__ = init_with_sampler


def _leave_out_empty_groups() -> None:
    """Let AdamW leave out groups without parameters, such as that of the biases if there are none.

    DeepSpeed drops such groups, and torch's schedulers then miss them.
    """
    import torch

    adamw_class: Any = torch.optim.AdamW
    init = adamw_class.__init__

    def init_without_empty_groups(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        groups = [group for group in params if not isinstance(group, dict) or group["params"]]
        init(self, groups, *args, **kwargs)

    adamw_class.__init__ = init_without_empty_groups


def _return_ids_of_chats() -> None:
    """Let `apply_chat_template` return the ids alone, as it did before transformers 5."""
    from transformers import PreTrainedTokenizerBase

    tokenizer_class: Any = PreTrainedTokenizerBase
    tokenizer_class.apply_chat_template = partialmethod(
        tokenizer_class.apply_chat_template, return_dict=False
    )


def model_class(attn_implementation: str | None) -> Any:
    """What makes models: AutoModelForCausalLM, or its two constructors with this attention.

    `from_pretrained` loads weights, and `from_config` draws new ones. Without a name upstream takes
    flash_attention_2, or eager, whose memory grows with the square of the length.
    """
    from transformers import AutoModelForCausalLM

    if attn_implementation is None:
        return AutoModelForCausalLM

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        kwargs["attn_implementation"] = attn_implementation
        return AutoModelForCausalLM.from_pretrained(*args, **kwargs)

    def from_config(*args: Any, **kwargs: Any) -> Any:
        kwargs["attn_implementation"] = attn_implementation
        return AutoModelForCausalLM.from_config(*args, **kwargs)

    return SimpleNamespace(from_pretrained=from_pretrained, from_config=from_config)
