"""What stands between a head's output and the logits: a scale and a cap."""

from typing import Any

from torch import nn

from smoothce.hf_patch.settings import PatchSettings


def _plain(config: Any) -> PatchSettings:
    return {}


def _softcap(config: Any) -> PatchSettings:
    return {"softcap": config.final_logit_softcapping}


def _scale(config: Any) -> PatchSettings:
    return {"logit_scale": config.logit_scale}


def _divisor(config: Any) -> PatchSettings:
    return {"logit_scale": 1 / config.logits_scaling}


ARCHITECTURES = {
    "LlamaForCausalLM": _plain,
    "MistralForCausalLM": _plain,
    "MixtralForCausalLM": _plain,
    "GemmaForCausalLM": _plain,
    "Gemma2ForCausalLM": _softcap,
    "Gemma3ForCausalLM": _softcap,
    "Qwen2ForCausalLM": _plain,
    "Qwen2MoeForCausalLM": _plain,
    "Qwen3ForCausalLM": _plain,
    "Qwen3MoeForCausalLM": _plain,
    "OlmoForCausalLM": _plain,
    "Olmo2ForCausalLM": _plain,
    "Olmo3ForCausalLM": _plain,
    "OlmoeForCausalLM": _plain,
    "SmolLM3ForCausalLM": _plain,
    "Phi3ForCausalLM": _plain,
    "CohereForCausalLM": _scale,
    "GraniteForCausalLM": _divisor,
}


def logit_map_of(causal: nn.Module, given: set[str]) -> PatchSettings:
    """Softcap and logit scale as the model's configuration has them.

    Raises TypeError for an architecture that is not known, unless both are given."""
    name = type(causal).__name__
    if name in ARCHITECTURES and type(causal).__module__.startswith("transformers."):
        return ARCHITECTURES[name](causal.config)
    if len(given) < 2 or not isinstance(getattr(causal, "lm_head", None), nn.Module):
        raise TypeError(
            f"patch_model does not know {type(causal).__module__}.{name}; it knows transformers' "
            f"{', '.join(ARCHITECTURES)}, and a model with an lm_head whose softcap= and "
            "logit_scale= are both given"
        )
    return {}
