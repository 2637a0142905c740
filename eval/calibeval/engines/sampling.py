"""A causal language model's own text, and what the model says of any text: in transformers.

    z = cap(scale · C h + b) / τ, float32;    p = softmax of what top-p and min-p keep of z

The product with the output layer, in sampling and in reading alike, is float32's: entropies of
another precision than the samples' would not be theirs. Nothing is as large as texts × tokens × V.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from calibeval.engines import text_config
from calibeval.io import InputError
from calibeval.references import until
from smoothce import chunked, token_statistics
from smoothce.models import ARCHITECTURES
from smoothce.options import Options

LOGITS = 2**25  # at a time, under a truncation
ASK = 8  # steps between two looks at whether all texts have ended, which wait for the GPU


@dataclass(frozen=True)
class Setting:
    """How tokens are chosen: temperature first, then top-p and min-p of the tempered p."""

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}, top-p {self.top_p:g}, min-p {self.min_p:g}"

    @property
    def truncates(self) -> bool:
        """Whether some tokens' probability becomes 0."""
        return self.top_p < 1 or self.min_p > 0

    def temper(self, z: Tensor) -> Tensor:  # (N, V), overwritten
        """Logits (N, V) over the temperature, −∞ where the token is cut."""
        z = z.div_(self.temperature)
        if self.top_p < 1:
            ordered = z.sort(-1, descending=True).values
            last = (ordered.softmax(-1).cumsum(-1) < self.top_p).sum(-1, keepdim=True)
            z = z.masked_fill_(z < ordered.gather(-1, last), -torch.inf)
        if self.min_p > 0:
            least = z.amax(-1, keepdim=True) + math.log(self.min_p)
            z = z.masked_fill_(z < least, -torch.inf)
        return z


def padded(
    contexts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Ids (B, T) of texts behind their contexts, and which of ids[:, 1:] are the texts'."""
    rows = [[*context, *text] for context, text in zip(contexts, texts, strict=True)]
    width = max(map(len, rows))
    # Padding goes right: causal attention keeps real tokens from seeing it.
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    places = torch.arange(1, width)
    first, stop = (torch.tensor([*map(len, of)])[:, None] for of in (contexts, rows))
    return ids, (places >= first) & (places < stop)


@dataclass(frozen=True)
class Sampler:
    """A decoder with its output layer."""

    decoder: nn.Module
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    scales: dict[str, float | None]  # softcap or logit_scale

    @classmethod
    def of(cls, model: nn.Module) -> "Sampler":
        """The parts of a transformers model; an unknown architecture raises `InputError`."""
        name, head = type(model).__name__, model.get_output_embeddings()
        if name not in ARCHITECTURES or type(head) is not nn.Linear:
            known = ", ".join(ARCHITECTURES)
            raise InputError(f"{name}: its output layer is not known; known are {known}")
        scales = ARCHITECTURES[name](text_config(model.config))
        bias = head.bias  # which these models scale as well
        bias = bias if bias is None else bias * (scales.get("logit_scale") or 1)
        return cls(model.base_model, head.weight, bias, scales)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (N, V) of hidden states (N, D), float32."""
        return chunked.logits(hidden, self.weight, self.bias, Options(**self.scales))

    @torch.inference_mode()
    def sample(
        self,
        contexts: Sequence[Sequence[int]],  # B
        setting: Setting,
        uniforms: np.ndarray,  # (B, T) in [0, 1): the randomness of each token
        ends: Sequence[int],
    ) -> list[list[int]]:
        """Up to T tokens behind each context, the one of `ends` that ended it included.

        Token t of a row is the first whose cumulative probability exceeds uniforms[row, t]: a text
        depends neither on the batch nor, but through p, on the setting.
        """
        device, width = self.weight.device, max(map(len, contexts))
        pads = [width - len(context) for context in contexts]
        rows = [[0] * pad + [*context] for pad, context in zip(pads, contexts, strict=True)]
        ids = torch.tensor(rows, device=device)
        seen = torch.arange(width, device=device) >= torch.tensor(pads, device=device)[:, None]
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        random = torch.tensor(uniforms, device=device)
        stops = torch.tensor(list(ends), device=device)
        ended, cache, drawn = torch.zeros(len(rows), dtype=torch.bool, device=device), None, []
        for step in range(random.shape[1]):
            given = {"input_ids": ids, "position_ids": positions, "attention_mask": seen.long()}
            found = self.decoder(**given, past_key_values=cache, use_cache=True)
            cache = getattr(found, "past_key_values", None)
            z = setting.temper(self.logits(found.last_hidden_state[:, -1]))
            cumulative = z.softmax(-1).double().cumsum(-1)
            aim = random[:, step, None] * cumulative[:, -1:]
            ids = torch.searchsorted(cumulative, aim, right=True).clamp(max=z.shape[1] - 1)
            drawn.append(ids)
            ended |= torch.isin(ids[:, 0], stops)
            if step % ASK == 0 and ended.all():
                break
            positions = positions[:, -1:] + 1
            seen = nn.functional.pad(seen, (0, 1), value=True)
        return [until(tokens, ends) for tokens in torch.cat(drawn, 1).tolist()]

    @torch.inference_mode()
    def states(
        self, contexts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """Hidden states (N, D) that the texts' tokens are predicted from, and the tokens (N,)."""
        ids, asked = (x.to(self.weight.device) for x in padded(contexts, texts))
        hidden = self.decoder(input_ids=ids, use_cache=False).last_hidden_state
        return hidden[:, :-1][asked], ids[:, 1:][asked]

    @torch.inference_mode()
    def read(
        self, contexts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], setting: Setting
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each text (T tokens) behind its context: log p of its tokens (T,), −∞ where cut, and
        the entropies (T,) of the distributions that they were drawn from, in nats.
        """
        found = self.statistics(*self.states(contexts, texts), setting)
        lengths = [*map(len, texts)]
        parts = (part.double().cpu().split(lengths) for part in found)
        return [(p.numpy(), h.numpy()) for p, h in zip(*parts, strict=True)]

    def statistics(self, hidden: Tensor, labels: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
        """log p of the labels (N,) and entropies (N,) behind hidden states (N, D)."""
        if not setting.truncates:
            options = self.scales | {"temperature": setting.temperature}
            found = token_statistics(hidden, self.weight, labels, bias=self.bias, **options)
            return found.log_probability, found.entropy
        found = []
        size = max(LOGITS // len(self.weight), 1)
        for h, y in zip(hidden.split(size), labels.split(size), strict=True):
            log_p = setting.temper(self.logits(h)).log_softmax(-1)
            entropy = torch.special.entr(log_p.exp()).sum(-1)
            found.append((log_p.gather(1, y[:, None])[:, 0], entropy))
        return tuple(map(torch.cat, zip(*found, strict=True)))
