"""What `engines.hf` needs to know of a transformers model: its weights, its attention.

A model's configuration tells how its prompts may be computed. `allows_trees`: whether choices may
be read as one tree. `stretches_positions`: whether prompts must be read one by one, without even a
shared prefix.
"""

import math
from typing import TYPE_CHECKING

import torch
import transformers

from calibeval.ask.engines import load, text_config
from calibeval.ask.request import Precision
from calibeval.io import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def load_model(model: str, dtype: Precision, revision: str | None) -> "PreTrainedModel":
    """The whole model of a folder or a name on the hub, on a GPU where there is one.

    A checkpoint without weights for some parameters is refused: transformers draws them at random.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto" and device == "cpu":
        dtype = "float32"
    loaded, loading = load(
        transformers.AutoModelForCausalLM,
        model,
        "a causal language model",
        revision,
        torch_dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        output_loading_info=True,
        # Weights of another shape would raise without their name; so they count as absent.
        ignore_mismatched_sizes=True,
    )
    without_weights = set(loading["missing_keys"])
    without_weights |= {mismatch[0] for mismatch in loading["mismatched_keys"]}
    parameters = {name for name, _ in loaded.named_parameters()}
    absent = sorted(without_weights & parameters)
    if absent:
        raise InputError(
            f"{model}: no weights for {len(absent)} of its parameters, such as {absent[0]}, "
            "which would be random; save it with save_pretrained"
        )
    return loaded.to(device)


def allows_trees(config: "PretrainedConfig", length: int) -> bool:
    """Whether choices may be read as a tree of tokens in prompts of up to `length` tokens.

    A tree's mask stands in for the model's own. So each layer must be one that would let a token
    see all tokens before it, and the tokens' positions must mean the same in prompts of any length.
    A False costs time alone: the choices are read one by one.
    """
    if stretches_positions(config, length):
        return False
    config = text_config(config)
    layer_types = set(getattr(config, "layer_types", None) or ())
    # Models that say nothing of their layers may have windows or chunks in any of them.
    has_windows = not layer_types or "sliding_attention" in layer_types
    has_chunks = not layer_types or "chunked_attention" in layer_types
    if layer_types - {"full_attention", "sliding_attention", "chunked_attention"}:
        return False  # recurrent layers, and whatever else there may be
    # A token sees itself and window − 1 tokens before it, so a window of `length` holds them all.
    window = getattr(config, "sliding_window", None)
    if has_windows and window is not None and window < length:
        return False
    # A chunk begins at position 0, so the first one holds all of a prompt that is no longer.
    chunk = getattr(config, "attention_chunk_size", None)
    return not has_chunks or chunk is None or chunk >= length


def stretches_positions(config: "PretrainedConfig", length: int) -> bool:
    """Whether longrope, in a batch of this length, rotates all positions by other angles.

    The angles change for the whole batch once its longest row exceeds the length that the model was
    first trained for, so what a prompt reads would depend on its neighbors.
    """
    original = getattr(text_config(config), "original_max_position_embeddings", None)
    return length > (original or math.inf)


def cache_bytes_per_token(model: "PreTrainedModel") -> int:
    """Bytes that the keys and values of one token take in all layers."""
    config = text_config(model.config)
    heads = getattr(config, "num_attention_heads", 1)
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    keys_and_values = 2
    numbers = keys_and_values * config.num_hidden_layers * key_value_heads * head_width
    return numbers * model.dtype.itemsize
