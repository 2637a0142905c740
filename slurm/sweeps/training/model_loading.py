"""The model of a run: loaded, then given packed attention, adapters and compiled layers."""

import copy
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import init_empty_weights
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from calibeval.ask.engines import load
from calibeval.io import InputError, sha256
from smoothce import use_packed_attention
from smoothce.checks import check_target
from sweeps.training.micro_batches import Updates
from sweeps.training.options import LoraOptions, TrainOptions, auxiliary_loss_problem
from sweeps.training.ranks import print_once, this_rank

COMPILE_FROM_UPDATES = 300  # fewer do not earn back half a minute of compiling
COMPILE_CACHE_SIZE = 64  # variants of a layer, such as those with and without a window


class SmoothingTarget(NamedTuple):
    """What β is spread over, and what tells it from other targets in a checkpoint."""

    shares: Tensor | None  # (vocabulary,) fp32; None spreads β evenly
    digest: str  # of the file's bytes; empty without a file


def load_model(
    train_options: TrainOptions, tokenizer_size: int, *, first_rank_reads: bool = False
) -> PreTrainedModel:
    """The causal language model, with a row for each of the tokenizer's entries.

    Weights that are trained are in fp32. Under LoRA those of the base model are frozen and keep
    their own precision.
    `model.config.dtype` is the base model's precision in both cases: the one it is saved in, so
    that it is scored as its base is.

    With `first_rank_reads` the parameters of the other ranks have no values, until accelerate
    shards the model and sends each rank its part. (transformers would read the files there too and
    then put zeros in their place, which takes long and as much memory as on the first rank.)

    Raises InputError for a model that cannot be loaded, or whose config asks for an auxiliary loss.
    """
    name = train_options.model_name_or_path
    config = load(AutoConfig, name, "a config")
    problem = auxiliary_loss_problem(name, config.to_dict())
    if problem is not None:
        raise InputError(problem)
    if train_options.attention_dropout is not None:
        if not hasattr(config, "attention_dropout"):
            raise InputError(f"train.attention_dropout: {config.model_type} models have none")
        config.attention_dropout = train_options.attention_dropout
    base_dtype = config.dtype or torch.float32
    dtype = base_dtype if train_options.lora else torch.float32
    has_weights = this_rank() == 0 or not first_rank_reads
    if has_weights:
        what = "a causal language model"
        model = load(AutoModelForCausalLM, name, what, config=config, dtype=dtype)
    else:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        model.tie_weights()  # `init_empty_weights` has undone it.
    model_size = model.config.vocab_size
    if tokenizer_size > model_size:
        print_once(
            f"note: the tokenizer's {tokenizer_size} entries outgrow the model's {model_size}; "
            "the rest are new"
        )
        # New rows are drawn about the mean of the others, which meta tensors do not have.
        model.resize_token_embeddings(
            tokenizer_size, pad_to_multiple_of=8, mean_resizing=has_weights
        )
    model.config.dtype = base_dtype
    if first_rank_reads:
        dtypes = agree_on_parameters(model, name)
        if not has_weights:
            allocate_parameters(model, dtypes)
    return model


def agree_on_parameters(model: PreTrainedModel, name: str) -> dict[str, torch.dtype]:
    """Check that this rank has the first rank's parameters; returns each one's precision there.

    The precision is not the same for all, because transformers keeps some in fp32. Every rank has
    to call it. Raises InputError where this rank's parameters are others than the first rank's:
    accelerate sends them in turn, and ranks would wait for each other without end.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    shapes = {key: tuple(value.shape) for key, value in parameters.items()}
    dtypes = {key: value.dtype for key, value in parameters.items()}
    shapes_and_dtypes: list[Any] = [(shapes, dtypes)]
    broadcast_object_list(shapes_and_dtypes)  # It now holds the first rank's.
    first_shapes, first_dtypes = shapes_and_dtypes[0]
    for key in {**first_shapes, **shapes}:
        if first_shapes.get(key) != shapes.get(key):
            raise InputError(
                f"{name}: {key} has the shape {first_shapes.get(key)} in the files and "
                f"{shapes.get(key)} by the config, so that one rank cannot read the model for "
                'all; set "cpu_ram_efficient_loading" to false in the file of world.fsdp'
            )
    return first_dtypes


def allocate_parameters(model: PreTrainedModel, dtypes: dict[str, torch.dtype]) -> None:
    """Replace the parameters, which are on the meta device, by ones on the CPU without values.

    Nothing is written to their memory, so that they take none. They are not left on the meta
    device, because accelerate tells an optimizer's parameters apart by their addresses.
    """
    for key, parameter in model.named_parameters():
        values = torch.empty(parameter.shape, dtype=dtypes[key])
        on_cpu = nn.Parameter(values, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, on_cpu)


def config_to_save(model: PreTrainedModel, train_options: TrainOptions) -> PreTrainedConfig:
    """The configuration that the trained model gets: the present one, with its base's dropout.

    `attention_dropout` belongs to the training and not to the model.
    """
    config = copy.deepcopy(model.config)
    if train_options.attention_dropout is not None:
        base = load(AutoConfig, train_options.model_name_or_path, "a config")
        config.attention_dropout = base.attention_dropout
    return config


def load_smoothing_target(
    train_options: TrainOptions, data: Updates, vocabulary_size: int
) -> SmoothingTarget:
    """What the options spread β over; raises InputError for a file that is no distribution."""
    name = train_options.smoothing_target
    if name is None:
        return SmoothingTarget(None, "")
    if name == "unigram":
        return SmoothingTarget(data.target_frequencies(vocabulary_size), "")
    try:
        shares = torch.tensor(np.load(name), dtype=torch.float32)
        check_target(shares, vocabulary_size)
    except (EOFError, OSError, TypeError, ValueError) as error:
        raise InputError(
            f"train.smoothing_target: {name}: {error}; expected an .npy file of {vocabulary_size} "
            "shares, one for each entry of the vocabulary, padding too"
        ) from error
    return SmoothingTarget(shares, sha256(Path(name))[:8])


def try_packing(model: PreTrainedModel, train_options: TrainOptions, half_precision: bool) -> bool:
    """Give the model the attention that packing needs, where packing is wanted and possible.

    Returns whether it has got it, so that batches are to be packed.
    """
    gpu = torch.cuda.is_available()
    wanted = train_options.packing
    if wanted is None:
        wanted = gpu and half_precision
    if not wanted:
        return False
    if not gpu:  # transformers itself masks other conversations
        return True
    if not half_precision:
        print_once("packing: off: flash attention needs 16 bits: set world.mixed_precision=bf16")
        return False
    if is_flash_attn_2_available():
        model.set_attn_implementation("flash_attention_2")
        return True
    try:
        use_packed_attention(model)
    except ValueError as obstacle:
        print_once(f"packing: off: {obstacle}")
        return False
    return True


def compile_layers(
    model: PreTrainedModel, train_options: TrainOptions, packed: bool, updates: int
) -> bool:
    """Let torch.compile compile each layer, where the options or the run's length ask for it.

    Returns whether it will. This changes settings of torch._dynamo, which hold for the process.
    Raises InputError where somebody asks for it and the model's layers are not found. Where nobody
    does, a layer that does not compile runs as it is, as on a machine without a compiler.
    """
    was_asked = train_options.compile is not None
    wanted = torch.cuda.is_available() and packed and updates >= COMPILE_FROM_UPDATES
    if not (train_options.compile if was_asked else wanted):
        return False
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        if was_asked:
            raise InputError(
                f"train.compile: {type(model).__name__} has no model.layers, which would be "
                "compiled; leave it out"
            )
        return False
    if not was_asked:
        torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.cache_size_limit = COMPILE_CACHE_SIZE
    for layer in layers:
        layer.compile(dynamic=True)
    return True


def add_adapters(model: PreTrainedModel, lora: LoraOptions) -> nn.Module:
    """The model with low-rank adapters, everything else frozen.

    Raises InputError for layers whose adapters would not be trained, or be lost in the merge.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft only divides it by r
        lora_dropout=lora.dropout,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
    )
    head = model.get_output_embeddings()
    with warnings.catch_warnings():
        # peft sets it for GPT-2's Conv1D by itself, layer by layer, and warns that it does.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")
        adapted = get_peft_model(model, config)
    if model.get_output_embeddings() is not head:
        raise InputError(
            "train.lora.targets: the classifier (lm_head) gets no adapter, whose gradient the loss "
            "would not compute; leave it out of the list"
        )
    if lora.save == "adapter":
        return adapted
    for path, layer in adapted.named_modules():
        if isinstance(layer, LoraLayer) and layer.get_base_layer().weight is head.weight:
            raise InputError(
                f"train.lora.targets: {path.rpartition('.')[2]}: its weights are the classifier's "
                "too (tie_word_embeddings), which merging would change with them; leave it out of "
                "the list, or set train.lora.save=adapter, which cannot be scored"
            )
    return adapted
