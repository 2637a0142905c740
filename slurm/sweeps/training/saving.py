"""The finished model of a run, in Hugging Face's format."""

from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from sweeps.runs.files import remove_folder, replace_folder
from sweeps.training.checkpoint import deleted_on_failure
from sweeps.training.sft_trainer import SweepTrainer

MODEL_PART = ".model.part"  # the folder of a run in which model/ is being written


def save_model(trainer: SweepTrainer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write model/ in the base model's precision, under another name first.

    With `lora.save: adapter` it holds the adapters alone, in the precision of their training.

    Under a DeepSpeed config with bf16 or fp16 the weights come from DeepSpeed's 16-bit copy, so
    that a run whose base model is in fp32 gets an fp32 file of rounded weights.

    All ranks have to call it: sharded weights are gathered from all, and the first rank writes.
    """
    run = trainer.run
    lora = trainer.train_options.lora
    config = trainer.saved_config
    part = run.path / MODEL_PART
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        remove_folder(part)
        with deleted_on_failure(part):
            if lora is not None and lora.save == "adapter":
                model.save_pretrained(str(part), state_dict=weights)
            else:
                if lora is not None:
                    model = merge_adapters(weights, model, config)
                    weights = model.state_dict()
                if config.tie_word_embeddings:
                    weights.pop("lm_head.weight", None)
                # In transformers it may also be a string; `load_model` has set a torch.dtype.
                assert isinstance(config.dtype, torch.dtype)
                weights = in_precision(weights, config.dtype)
                model.save_pretrained(str(part), state_dict=weights)
                config.save_pretrained(str(part))
            tokenizer.save_pretrained(str(part))
            replace_folder(part, run.model)
    trainer.accelerator.wait_for_everyone()


def in_precision(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights in a precision; what holds whole numbers, as some buffers do, stays as it is."""
    converted = {}
    for name, weight in weights.items():
        converted[name] = weight.to(dtype) if weight.is_floating_point() else weight
    return converted


def merge_adapters(
    weights: dict[str, Tensor], model: Any, config: PreTrainedConfig
) -> PreTrainedModel:
    """The ordinary model of one with adapters, in fp32, by peft.

    `weights` are all of `model`'s, gathered from all ranks; its own may be parts of them.
    `model_loading.add_adapters` has seen to it that every adapter has a weight of its own to which
    it can be added.
    """
    from peft import get_peft_model

    unset_hf_deepspeed_config()  # With ZeRO-3's, transformers would split this model over ranks.
    with init_empty_weights(include_buffers=False):
        base = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    whole = get_peft_model(base, model.peft_config[model.active_adapter])
    whole.load_state_dict(weights, assign=True)
    return whole.float().merge_and_unload()
