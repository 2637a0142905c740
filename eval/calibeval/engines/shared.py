"""Attention behind a prefix that all questions of a batch share: its keys are read, never copied.

    o = σ(l₁ − l₂) o₁ + σ(l₂ − l₁) o₂

o₁, l₁: attention over the prefix and its log-sum-exp, for every query of the batch in one call;
o₂, l₂: causal attention among each question's own tokens. A copy of the keys a question, and the
mask that keys of two origins need, cost more than the attention itself.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


class _Attention(TorchFunctionMode):
    """Sends the model's calls of scaled_dot_product_attention to `attend`."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.plain = True  # whether every call was causal without a mask

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        found = self.attend(*args, **(kwargs or {}))
        self.calls += 1
        return found


class Recording(_Attention):
    """Keeps each layer's keys and values, (1, heads, P, d), while the model reads the prefix."""

    def __init__(self):
        super().__init__()
        self.layers: list[tuple[Tensor, Tensor]] = []

    def attend(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        """Attention as it is."""
        self.plain &= attn_mask is None and (is_causal or query.shape[2] == 1)
        self.layers.append((key.contiguous(), value.contiguous()))
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **options
        )


class Continuing(_Attention):
    """Lets queries (B, heads, S, d) see a recorded prefix and then their own question."""

    def __init__(self, layers: list[tuple[Tensor, Tensor]]):
        super().__init__()
        self.layers = layers

    def attend(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_
    ):
        """Attention over prefix and question."""
        self.plain &= attn_mask is None and (is_causal or query.shape[2] == 1)
        before, l_before = _prefix(query, *self.layers[self.calls], scale)
        if (groups := query.shape[1] // key.shape[1]) > 1:
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        own, l_own = _attend(query, key, value, True, scale)
        share = torch.sigmoid(l_before - l_own).unsqueeze(-1)
        return torch.lerp(own.to(share.dtype), before.to(share.dtype), share).to(query.dtype)


def _prefix(query: Tensor, key: Tensor, value: Tensor, scale: float | None):
    """Every query against one prefix; the queries that share a key's head stand in one row."""
    batch, heads, length, size = query.shape
    folded = query.reshape(batch, key.shape[1], -1, size).transpose(0, 1)
    found, total = _attend(folded.reshape(1, key.shape[1], -1, size), key, value, False, scale)
    shape = key.shape[1], batch, heads // key.shape[1], length
    return (
        found.reshape(*shape, -1).transpose(0, 1).reshape(batch, heads, length, -1),
        total.reshape(shape).transpose(0, 1).reshape(batch, heads, length),
    )


def _attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None):
    """Attention (B, heads, S, d) and its log-sum-exp (B, heads, S), which no public call returns.

    The operator has had this form from torch 2.4 to 2.13 at least.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.contiguous(), key, value, 0.0, causal, scale=scale
    )


def can_share(config, length: int) -> bool:
    """Whether every layer's attention sees all earlier tokens of prompts up to `length`."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(config, "layer_types", None) or ())
    windows = (getattr(config, k, None) for k in ("sliding_window", "attention_chunk_size"))
    return kinds == {"full_attention"} or (
        kinds <= {"full_attention", "sliding_attention"}
        and all(window is None or window > length for window in windows)
    )
