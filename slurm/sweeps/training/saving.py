"""The finished model of a run, in Hugging Face's format."""

import shutil

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sweeps.runs.files import replace_folder
from sweeps.training.hf_trainer import SweepTrainer
from sweeps.training.options import LoraOptions


def save_model(trainer: SweepTrainer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write model/ in the base model's precision, under another name first.

    All ranks have to call it: sharded weights are gathered from all, and the first rank writes.
    """
    run = trainer.run
    lora = trainer.train_options.lora
    config = trainer.saved_config
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        part = run.path / ".model.part"
        shutil.rmtree(part, ignore_errors=True)
        if lora is not None and lora.save == "adapter":
            model.save_pretrained(str(part), state_dict=weights)
        else:
            if lora is not None:
                model = model.get_base_model()
                weights = merge_adapters(weights, lora)
            if config.tie_word_embeddings:
                weights.pop("lm_head.weight", None)
            weights = {name: weight.to(config.dtype) for name, weight in weights.items()}
            model.save_pretrained(str(part), state_dict=weights)
            config.save_pretrained(str(part))
        tokenizer.save_pretrained(str(part))
        replace_folder(part, run.model)
    trainer.accelerator.wait_for_everyone()


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
