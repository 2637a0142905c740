"""Which of the installed transformers' language models the loss can be patched into.

    python tests/helpers/families.py > kernel/FAMILIES.md    # some minutes on a CPU
    python tests/helpers/families.py Gemma2ForCausalLM

Each class is built tiny, with random weights. Loss and gradients of the patched model are compared
with those of its own forward, run with an `F.cross_entropy` that smooths: a reference that knows
nothing of the patch. Models of text and images get an image in each row, and rows whose padding
keeps its labels, which some of them leave out by the attention mask.
"""

import argparse
import contextlib
import inspect
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoothce import patch_model

# The names of what scales and caps logits, in configurations.
SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
DIVISORS = ("logits_scaling",)

VOCABULARY = 67
HIDDEN, HEADS, HEAD_SIZE = 32, 4, 8
MOST_PARAMETERS = 15_000_000
LOSS_TOLERANCE = 2e-5  # relative
GRADIENT_TOLERANCE = 2e-4  # relative, of all gradients as one vector

# What configurations call the sizes that make a model large, and tiny values that fit each other.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "n_embed", "embed_dim"), HIDDEN),
    **dict.fromkeys(("hidden_dim", "emb_dim", "embedding_dim", "embedding_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "d_inner"), 2 * HIDDEN),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 2 * HIDDEN),
    **dict.fromkeys(("dim_ff", "dff", "hidden_size_per_layer_input"), 2 * HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "dim_head", "rotary_dim"), HEAD_SIZE),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "num_experts_per_layer"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_shared_experts", "n_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("mamba_d_state", "state_size", "mamba_d_conv", "conv_kernel"), 4),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "num_buckets": 4,
    "local_attn_chunk_length": 4,
    "num_kv_shared_layers": 0,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # What scales and caps logits, so that it shows.
    **dict.fromkeys(CAPS, 1.5),
    **dict.fromkeys(SCALES, 0.3),
    **dict.fromkeys(DIVISORS, 6.0),  # which are among the scales
}
ALTERNATING = ["sliding_attention", "full_attention"]
ZAMBA = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2}
# What some families need beside, or instead (None: left as the configuration has it).
ADJUSTMENTS: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3nForCausalLM": {"num_hidden_layers": 4, "layer_types": ALTERNATING * 2},
    "GraniteMoeHybridForCausalLM": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Mamba2ForCausalLM": {"num_heads": 8, "expand": 2},
    "ReformerModelWithLMHead": {"attn_layers": ["local"] * 2, "axial_pos_embds": False},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "Zamba2ForCausalLM": {**ZAMBA, "mamba_headdim": 8, "n_mamba_heads": 8},
    "ZambaForCausalLM": ZAMBA,
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "xLSTMForCausalLM": {"head_dim": None},
}


# Of models of text and images.
IMAGE_TOKEN = 60
IMAGE_TOKEN_NAMES = ("image_token_id", "image_token_index", "media_token_id", "image_pad_token_id")
OTHER_TOKEN_NAMES = ("video_token_id", "audio_token_id", "vision_start_token_id", "boi_token_id")
VISION_SIZES = {
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 3,
    "in_channels": 3,
    "in_chans": 3,
    "out_hidden_size": HIDDEN,
    "projection_dim": HIDDEN,
    "vision_output_dim": HIDDEN,
    "depth": 2,
    "num_position_embeddings": 4,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0, 1],
    "window_size": 8,
}


class CannotBuild(Exception):
    """No tiny model of the class could be made; the message says why."""


@dataclass(frozen=True)
class Verdict:
    """What became of one class."""

    name: str
    loss_error: float = 0.0  # relative
    gradient_error: float = 0.0  # relative
    refused: str = ""  # why
    not_built: str = ""  # why

    @property
    def accepted(self) -> bool:
        return not (self.refused or self.not_built)

    @property
    def wrong(self) -> bool:
        """Whether it was accepted and computes another loss."""
        fine = self.loss_error <= LOSS_TOLERANCE and self.gradient_error <= GRADIENT_TOLERANCE
        return self.accepted and not fine


def class_names() -> list[str]:
    """The causal language models that the installed transformers knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return _names_in(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _names_in(mapping: Any) -> list[str]:
    names: set[str] = set()
    for entry in mapping.values():
        names.update([entry] if isinstance(entry, str) else entry)
    return sorted(names)


def tiny_model(name: str, **settings: Any) -> Any:
    """A model of the class with random weights, in training mode. Raises CannotBuild."""
    import transformers

    try:
        architecture = getattr(transformers, name)
        tiny = tiny_settings(architecture.config_class, is_inner=False)
        tiny.update(ADJUSTMENTS.get(name, {}))
        tiny.update(settings)
        given = {key: value for key, value in tiny.items() if value is not None}
        config = architecture.config_class(**given)
        config._attn_implementation = "eager"
        with torch.device("meta"):
            parameters = sum(p.numel() for p in architecture(config).parameters())
        if parameters > MOST_PARAMETERS:
            raise CannotBuild(f"tiny it still has {parameters / 1e6:.0f} million parameters")
        torch.manual_seed(0)
        model = architecture(config)
    except CannotBuild:
        raise
    except Exception as error:
        raise CannotBuild(first_line(error)) from error
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def tiny_settings(config_class: Any, *, is_inner: bool) -> dict[str, Any]:
    """Tiny values for what the configuration has, and for the configurations inside it."""
    names = set(inspect.signature(config_class.__init__).parameters)
    default = None
    with contextlib.suppress(Exception):  # some configurations have no defaults
        default = config_class()
        names.update(vars(default))
    sizes = dict(SIZES)
    sizes.update(dict.fromkeys(IMAGE_TOKEN_NAMES, IMAGE_TOKEN))
    sizes.update(dict.fromkeys(OTHER_TOKEN_NAMES, IMAGE_TOKEN + 1))
    if is_inner:
        sizes.update(VISION_SIZES)
    tiny = {name: size for name, size in sizes.items() if name in names}
    if "kv_lora_rank" in names:  # multi-head latent attention has no groups
        tiny["num_key_value_heads"] = HEADS
    for key, inner_class in (getattr(config_class, "sub_configs", None) or {}).items():
        if "AutoConfig" in inner_class.__name__:
            inner_class = type(getattr(default, key, None))
        if not hasattr(inner_class, "model_type"):
            continue
        tiny[key] = tiny_settings(inner_class, is_inner=True)
        tiny[key]["model_type"] = inner_class.model_type
    return tiny


def batch() -> dict[str, Any]:
    """Two rows of twelve tokens; the second is shorter, and some have no label."""
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1, -3:] = -100
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}


@contextlib.contextmanager
def smoothing_cross_entropy(beta: float) -> Iterator[None]:
    """Let `F.cross_entropy`, which models call, smooth by β."""
    dense = F.cross_entropy

    def smoothed(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kwargs["label_smoothing"] = beta
        return dense(input, target, *args, **kwargs)

    F.cross_entropy = smoothed
    try:
        yield
    finally:
        F.cross_entropy = dense


def image_text_names() -> list[str]:
    """The models of text and images that the installed transformers knows."""
    from transformers.models.auto import modeling_auto

    return _names_in(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def image_batch(image_tokens: int) -> dict[str, Any]:
    """Two rows of text, each with an image in so many places where that is not 0; padding keeps its
    labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, IMAGE_TOKEN, (2, 12 + image_tokens), generator=generator)
    ids[:, 1 : 1 + image_tokens] = IMAGE_TOKEN
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if image_tokens > 0:
        inputs["pixel_values"] = torch.randn(2, 3, 8, 8, generator=generator)
    return inputs


def verdict(name: str, beta: float = 0.1, **settings: Any) -> Verdict:
    """Whether a class can be patched, and how far its loss and gradients then are from upstream's
    own, in training mode. A class of text and images gets images, or where these do not fit it,
    text alone."""
    batches = [batch()]
    if name in image_text_names() and name not in class_names():
        # How many tokens an image of 2 × 2 patches takes is up to the model.
        batches = [image_batch(4), image_batch(1), image_batch(0)]
    try:
        model = tiny_model(name, **settings)
    except CannotBuild as error:
        return Verdict(name, not_built=str(error))
    for inputs in batches:
        try:
            with smoothing_cross_entropy(beta):
                expected = seeded_outputs(model, inputs).loss
                again = seeded_outputs(model, inputs).loss
        except Exception as error:
            reason = first_line(error)
            continue
        if relative_error(again, expected) > LOSS_TOLERANCE:
            return Verdict(name, not_built="two runs of it differ, by what it draws at random")
        return patched_verdict(name, model, inputs, expected, beta)
    return Verdict(name, not_built=reason)


def patched_verdict(
    name: str,
    model: Any,
    inputs: dict[str, Any],
    expected: Tensor,
    beta: float,
) -> Verdict:
    """The verdict on a model whose upstream loss is known."""
    expected_gradients = gradients(model, expected)
    try:
        patch_model(model, label_smoothing=beta)
        loss = seeded_outputs(model, inputs).loss
    except (TypeError, ValueError) as error:
        return Verdict(name, refused=first_line(error))
    difference = gradient_error(gradients(model, loss), expected_gradients)
    return Verdict(name, relative_error(loss, expected), difference)


def seeded_outputs(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """The outputs with the same dropout, and the same random attention, each time."""
    torch.manual_seed(2)
    np.random.seed(2)
    return model(**inputs)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.double()
    return found


def relative_error(loss: Tensor, expected: Tensor) -> float:
    return abs(loss.item() - expected.item()) / abs(expected.item())


def gradient_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    squares = torch.zeros((), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for name in {*found, *expected}:
        ours = found.get(name, torch.zeros(()))
        theirs = expected.get(name, torch.zeros(()))
        squares += (ours - theirs).square().sum()
        total += theirs.square().sum()
    return (squares / total).sqrt().item() if total else 0.0


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__


def page(verdicts: list[Verdict], with_reasons: bool) -> str:
    """The verdicts as Markdown, with a table of why classes were not built or their names alone."""
    import transformers

    right = [row for row in verdicts if row.accepted and not row.wrong]
    wrong = [row for row in verdicts if row.wrong]
    refused = [row for row in verdicts if row.refused]
    not_built = [row for row in verdicts if row.not_built]
    most_loss = max((row.loss_error for row in right), default=0.0)
    most_gradient = max((row.gradient_error for row in right), default=0.0)
    lines = [
        "# Which language models `patch_model` accepts",
        "",
        f"Classes of transformers {transformers.__version__}, tiny and with random weights, on a "
        f"CPU with torch {torch.__version__}: {len(right)} are right, {len(wrong)} wrong and "
        f"{len(refused)} refused; {len(not_built)} could not be built here, which says nothing "
        "about them. Made by `python tests/helpers/families.py > kernel/FAMILIES.md`.",
        "",
        "Each is compared with its own forward, run with an `F.cross_entropy` that smooths "
        f"(β = 0.1, fp32). The loss differs by at most {most_loss:.0e} and the gradient, as one "
        f"vector of all parameters', by at most {most_gradient:.0e} of its length.",
        "",
        "Right: " + ", ".join(short(row.name) for row in right) + ".",
    ]
    if wrong:
        lines += ["", "| wrong | loss differs by | gradient differs by |", "|---|---|---|"]
        for row in wrong:
            lines.append(f"| {short(row.name)} | {row.loss_error:.1e} | {row.gradient_error:.1e} |")
    lines += ["", "| refused | because |", "|---|---|"]
    lines += [f"| {short(row.name)} | {row.refused.partition(': ')[2]} |" for row in refused]
    if with_reasons:
        lines += ["", "| not built | because |", "|---|---|"]
        lines += [f"| {short(row.name)} | {row.not_built} |" for row in not_built]
    else:
        names = ", ".join(short(row.name) for row in not_built)
        lines += ["", f"Not built: {names}. The command says why of a class that it is given."]
    return "\n".join(lines)


def short(name: str) -> str:
    return name.removesuffix("ForCausalLM")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="classes; all where none is given")
    given = parser.parse_args().names
    names = given or sorted({*class_names(), *image_text_names()})
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        print(page([verdict(name) for name in names], with_reasons=bool(given)))


if __name__ == "__main__":
    main()
