"""The finished model of a run, in Hugging Face's format."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from sweeps.runs.files import remove_folder, replace_folder
from sweeps.training.checkpoint import deleted_on_failure
from sweeps.training.hf_trainer import SweepTrainer

MODEL_PART = ".model.part"  # the folder of a run in which model/ is being written
ADAPTER = "default"  # peft's name of the one adapter that each layer has


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
                    weights = merge_adapters(weights, model)
                    model = model.get_base_model()
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


def merge_adapters(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The weights of an ordinary model, W + (alpha / r) B A, from those of one with adapters.

    `weights` are all of `model`'s, gathered from all ranks. peft puts `base_model.model.` before
    every name, and keeps the W of a layer with adapters as `….base_layer.weight`.
    `model_loading.refuse_what_cannot_be_merged` has seen to it that every adapter has a W to which
    it can be added.
    """
    from peft.tuners.lora import LoraLayer

    layers = {}
    for layer_name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            # FSDP1 wraps modules, which their names show and those of the weights do not.
            layers[layer_name.replace("_fsdp_wrapped_module.", "")] = layer
    merged = {}
    for name, weight in weights.items():
        if ".lora_" in name:
            continue
        layer_name = name.removesuffix(".base_layer.weight")
        if layer_name != name:
            change = weight_change(weights, layer_name, layers[layer_name])
            weight = weight.float() + change
        plain_name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        merged[plain_name] = weight
    return merged


def weight_change(weights: dict[str, Tensor], layer_name: str, layer: Any) -> Tensor:
    """What a layer's adapter adds to its weight W: (alpha / r) B A, in the shape of W, in fp32.

    B A is (outputs, inputs), as the weight of a linear layer is. The weight of an embedding is
    (tokens, features), where the tokens are the inputs, and GPT-2's Conv1D also has the inputs
    first (`fan_in_fan_out`). For both of these it is transposed.
    """
    from peft.tuners.lora import Embedding

    is_embedding = isinstance(layer, Embedding)
    if is_embedding:
        a = weights[f"{layer_name}.lora_embedding_A.{ADAPTER}"]
        b = weights[f"{layer_name}.lora_embedding_B.{ADAPTER}"]
    else:
        a = weights[f"{layer_name}.lora_A.{ADAPTER}.weight"]
        b = weights[f"{layer_name}.lora_B.{ADAPTER}.weight"]
    product = b.float() @ a.float()
    if is_embedding or layer.fan_in_fan_out:
        product = product.T
    return product * layer.scaling[ADAPTER]
