"""The finished model of a run, in Hugging Face's format."""

import shutil

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sweeps.runs.files import replace_folder
from sweeps.training.checkpoint import deleted_on_failure
from sweeps.training.hf_trainer import SweepTrainer
from sweeps.training.options import LoraOptions

MODEL_PART = ".model.part"  # the folder of a run in which model/ is being written


def save_model(trainer: SweepTrainer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write model/ in the base model's precision, under another name first.

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
        shutil.rmtree(part, ignore_errors=True)
        with deleted_on_failure(part):
            if lora is not None and lora.save == "adapter":
                model.save_pretrained(str(part), state_dict=weights)
            else:
                if lora is not None:
                    model = model.get_base_model()
                    weights = merge_adapters(weights, lora)
                if config.tie_word_embeddings:
                    weights.pop("lm_head.weight", None)
                # transformers also knows names of dtypes, which `load_model` has not left here.
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


def merge_adapters(weights: dict[str, Tensor], lora: LoraOptions) -> dict[str, Tensor]:
    """The weights of an ordinary model, W + (alpha / r) B A, from those of one with adapters.

    peft keeps a layer's W as `….base_layer.weight`, A and B as `….lora_A.default.weight` and
    `….lora_B.default.weight`, and puts `base_model.model.` before every name.
    """
    merged = {}
    for name, weight in weights.items():
        if ".lora_" in name:
            continue
        name_a = name.replace("base_layer", "lora_A.default")
        name_b = name.replace("base_layer", "lora_B.default")
        if name_a != name and name_a in weights:
            product = weights[name_b].float() @ weights[name_a].float()
            weight = weight.float() + lora.alpha / lora.r * product
        plain_name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        merged[plain_name] = weight
    return merged
