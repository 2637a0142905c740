"""Which of the installed transformers' causal language models the loss can be patched into.

    python -m smoothce.hf_patch.families > kernel/FAMILIES.md    # some minutes on a CPU
    python -m smoothce.hf_patch.families Gemma2ForCausalLM

Each class is built tiny, with random weights, and patched. Where `patch_model` accepts it, its loss
and gradients are compared with those of smoothed cross-entropy on its own dense logits. A slow test
(tests/kernel/test_hf_verification.py) does the same for every class.
"""

import argparse
import contextlib
import inspect
import io
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoothce.hf_patch.anatomy import CausalModel
from smoothce.hf_patch.logit_map import CAPS, DIVISORS, SCALES
from smoothce.hf_patch.patching import patch_model

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

NOT_BUILT = "not built"  # how the reason of a class begins that could not be built or run


class CannotBuild(Exception):
    """No tiny model of the class could be made; the message says why."""


@dataclass(frozen=True)
class Verdict:
    """What became of one class."""

    name: str
    accepted: bool
    loss_error: float = 0.0  # relative
    gradient_error: float = 0.0  # relative
    reason: str = ""  # why it is refused, or was not built

    @property
    def wrong(self) -> bool:
        """Whether it was accepted and computes another loss."""
        fine = self.loss_error <= LOSS_TOLERANCE and self.gradient_error <= GRADIENT_TOLERANCE
        return self.accepted and not fine


def class_names() -> list[str]:
    """The causal language models that the installed transformers knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names: set[str] = set()
    for entry in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        names.update([entry] if isinstance(entry, str) else entry)
    return sorted(names)


def tiny_model(name: str, **settings: Any) -> CausalModel:
    """A model of the class with random weights, in training mode. Raises CannotBuild."""
    import transformers

    try:
        architecture = getattr(transformers, name)
        config = architecture.config_class(**_tiny_settings(architecture, settings))
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
        raise CannotBuild(_first_line(error)) from error
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def _tiny_settings(architecture: Any, settings: dict[str, Any]) -> dict[str, Any]:
    names = set(inspect.signature(architecture.config_class.__init__).parameters)
    with contextlib.suppress(Exception):  # some configurations have no defaults
        names.update(vars(architecture.config_class()))
    tiny = {name: size for name, size in SIZES.items() if name in names}
    if "kv_lora_rank" in names:  # multi-head latent attention has no groups
        tiny["num_key_value_heads"] = HEADS
    tiny.update(ADJUSTMENTS.get(architecture.__name__, {}))
    tiny.update(settings)
    return {name: value for name, value in tiny.items() if value is not None}


def batch() -> dict[str, Any]:
    """Two rows of twelve tokens; the second is shorter, and some have no label."""
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1, -3:] = -100
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}


def verdict(name: str, label_smoothing: float = 0.1, **settings: Any) -> Verdict:
    """Whether a class is accepted, and how far its loss and gradients then are from dense ones.

    What is expected is upstream's loss with its cross-entropy smoothed, in training mode."""
    try:
        model = tiny_model(name, **settings)
        upstream = seeded_outputs(model, batch())
        logits = upstream.logits[:, :-1].flatten(0, 1).double()
        labels = batch()["labels"][:, 1:].flatten()
        smoothed = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
        expected_loss = upstream.loss - F.cross_entropy(logits, labels) + smoothed
        expected = _gradients(model, expected_loss)
    except Exception as error:
        reason = str(error) if isinstance(error, CannotBuild) else _first_line(error)
        return Verdict(name, False, reason=f"{NOT_BUILT}: {reason}")
    try:
        with warnings.catch_warnings():
            # A class whose verification is put off counts as not accepted.
            warnings.filterwarnings("error", message="patch_model verifies")
            patch_model(model, label_smoothing=label_smoothing)
        loss = seeded_outputs(model, batch()).loss
    except (TypeError, ValueError, UserWarning) as error:
        return Verdict(name, False, reason=_first_line(error))
    gradients = _gradients(model, loss)
    return Verdict(name, True, _relative(loss, expected_loss), _difference(gradients, expected))


def seeded_outputs(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """The outputs with the same dropout each time."""
    torch.manual_seed(2)
    return model(**inputs)


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.double()
    return gradients


def _relative(loss: Tensor, expected: Tensor) -> float:
    return abs(loss.item() - expected.item()) / abs(expected.item())


def _difference(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    squares = torch.zeros((), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for name in {*gradients, *expected}:
        ours = gradients.get(name, torch.zeros(()))
        theirs = expected.get(name, torch.zeros(()))
        squares += (ours - theirs).square().sum()
        total += theirs.square().sum()
    return (squares / total).sqrt().item() if total else 0.0


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__


def table(verdicts: list[Verdict], classes: str) -> str:
    """The verdicts as Markdown; `classes` says which classes these are."""
    import transformers

    accepted = []
    refused = []
    not_built = []
    for row in verdicts:
        if row.accepted:
            accepted.append(row)
        elif row.reason.startswith(NOT_BUILT):
            not_built.append(row)
        else:
            refused.append(row)
    wrong = [row for row in accepted if row.wrong]
    lines = [
        "# Which causal language models `patch_model` accepts",
        "",
        f"{classes} of transformers {transformers.__version__}, tiny and with random weights, on a "
        f"CPU with torch {torch.__version__}: "
        f"{_count(accepted)} accepted, {len(wrong)} of them wrongly; {_count(refused)} refused; "
        f"and {len(not_built)} could not be built here, which says nothing about them. Made by "
        "`python -m smoothce.hf_patch.families > kernel/FAMILIES.md`.",
        "",
        "Differences are relative, from upstream's loss with its cross-entropy smoothed "
        "(β = 0.1, fp32); the gradient's is that of all parameters' gradients as one vector.",
        "",
        "| class | accepted | loss differs by | gradient differs by |",
        "|---|---|---|---|",
    ]
    for row in accepted:
        how = "**wrongly**" if row.wrong else "yes"
        errors = f"{row.loss_error:.1e} | {row.gradient_error:.1e}"
        lines.append(f"| {_short(row.name)} | {how} | {errors} |")
    lines += ["", "| class | refused because |", "|---|---|"]
    for row in refused:
        _, _, reason = row.reason.partition(": ")
        reason = reason.removeprefix(f"patch_model refuses {row.name}: ")
        lines.append(f"| {_short(row.name)} | {reason.partition(' (read from it')[0]} |")
    lines += ["", "| class | not built because |", "|---|---|"]
    for row in not_built:
        reason = row.reason.removeprefix(f"{NOT_BUILT}: ")
        lines.append(f"| {_short(row.name)} | {reason} |")
    return "\n".join(lines)


def _count(verdicts: list[Verdict]) -> str:
    return "1 is" if len(verdicts) == 1 else f"{len(verdicts)} are"


def _short(name: str) -> str:
    return name.removesuffix("ForCausalLM")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="classes; all where none is given")
    names = parser.parse_args(arguments).names
    classes = ", ".join(names)
    if not names:
        names = class_names()
        classes = "Every class"
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        print(table([verdict(name) for name in names], classes))


if __name__ == "__main__":
    main(sys.argv[1:])
