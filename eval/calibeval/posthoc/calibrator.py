"""The calibrator: a small head that turns hidden states into a temperature, its files, its use."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from calibeval.engines import Job, first_line
from calibeval.engines.hf import TransformersEngine
from calibeval.io import InputError, atomic_write, read_text
from calibeval.tasks import Question

HEADS = ("constant", "linear", "mlp", "transformer")
LIMIT = 4.0  # of |log τ|
CONFIG, WEIGHTS = "calibrator.json", "calibrator.safetensors"


@dataclass(frozen=True)
class Settings:
    """What a calibrator is; `calibrator.json` holds it with how it was fitted."""

    head: str
    hidden_size: int
    over: str = "choices"


class LastOfLayer(nn.Module):
    """A pre-norm transformer layer at the last position, the only one that a head reads.

    x = h_T + attention(h_T over h_1 … h_T),  (B, T, D) → (B, D): x + MLP(x)

    With one query, q·(K h_t) = (Kᵀ q)·h_t and Σ a_t (V h_t) = V Σ a_t h_t: no keys or values of all
    T positions are made, which would be nearly all of the layer's work.
    """

    def __init__(self, size: int):
        super().__init__()
        fits = (h for h in (1, 2, 4, 8, 16, 32) if size % h == 0 and h * 16 <= max(size, 16))
        self.heads = max(fits)
        self.query, self.value, self.mix = (nn.Linear(size, size) for _ in range(3))
        self.key = nn.Linear(size, size, bias=False)  # one would add the same to every score
        self.mlp = nn.Sequential(
            nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size)
        )

    def forward(self, hidden: Tensor, lengths: Tensor | None) -> Tensor:
        """(B, D) of sequences (B, T, D) padded on the left."""
        size, last = hidden.shape[-1], hidden[:, -1]
        per_head = (self.heads, size // self.heads, size)
        query = self.query(last).unflatten(-1, per_head[:2])
        asked = torch.einsum("bhe,hed->bhd", query, self.key.weight.view(per_head))
        scores = asked @ hidden.mT / per_head[1] ** 0.5  # (B, heads, T)
        if lengths is not None:
            places = torch.arange(hidden.shape[1], device=hidden.device)
            padding = places < hidden.shape[1] - lengths.to(hidden.device)[:, None]
            scores = scores.masked_fill(padding[:, None], -torch.inf)
        seen = scores.softmax(-1) @ hidden
        seen = torch.einsum("bhd,hed->bhe", seen, self.value.weight.view(per_head))
        found = last + self.mix(seen.flatten(1) + self.value.bias)
        return found + self.mlp(found)


class Calibrator(nn.Module):
    """Temperatures of the answers that follow sequences of hidden states.

    τ = exp(4 tanh(head(LayerNorm(h)) / 4)),  h: (B, T, D) → τ: (B,) at the last positions

    Every head starts at τ = 1; the bound, e^±4, keeps different logits different in floating point.
    """

    def __init__(self, settings: Settings, fitted: dict | None = None):
        super().__init__()
        if settings.head not in HEADS:
            raise InputError(f"head is {settings.head!r}, expected one of {', '.join(HEADS)}")
        self.settings, self.fitted = settings, fitted or {}
        self.reads_context = settings.head == "transformer"  # not only its last position
        size = settings.hidden_size
        self.norm = nn.LayerNorm(size)
        self.inner: nn.Module = nn.Identity()
        if settings.head == "mlp":
            self.inner = nn.Sequential(nn.Linear(size, size), nn.GELU())
        elif self.reads_context:
            self.inner = LastOfLayer(size)
        self.out = nn.Linear(size, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        if settings.head == "constant":
            self.out.weight.requires_grad_(False)

    def forward(self, hidden: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Temperatures (B,) of (B, T, D) padded on the left; `lengths` (B,) are T by default."""
        hidden = self.norm(hidden.float())
        hidden = self.inner(hidden, lengths) if self.reads_context else self.inner(hidden[:, -1])
        return (LIMIT * torch.tanh(self.out(hidden).squeeze(-1) / LIMIT)).exp()

    def save_pretrained(self, folder: Path, fitted: dict) -> None:
        """Write weights, then `calibrator.json` with `fitted`: on what and with which result."""
        from safetensors.torch import save

        with atomic_write(folder / WEIGHTS, "wb") as file:
            file.write(save(self.state_dict()))
        with atomic_write(folder / CONFIG) as file:
            json.dump(asdict(self.settings) | {"fitted": fitted}, file, indent=1)

    @classmethod
    def from_pretrained(cls, folder: Path) -> "Calibrator":
        """Read what `save_pretrained` wrote; raises `InputError` if it is absent or not whole."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if not (folder / CONFIG).is_file():
            raise InputError(
                f"{folder}: no {CONFIG}; `calibeval fit-temperature` or fit-ats makes one"
            )
        try:
            found = json.loads(read_text(folder / CONFIG))
            settings = Settings(found["head"], found["hidden_size"], found["over"])
            calibrator = cls(settings, dict(found["fitted"]))
            calibrator.load_state_dict(load_file(folder / WEIGHTS))
        except (ValueError, TypeError, KeyError, RuntimeError, OSError, SafetensorError) as error:
            raise InputError(f"{folder}: not a whole calibrator: {first_line(error)}") from error
        return calibrator.eval()

    def check(self, folder: Path, model: str, model_digest: str, questions: list[Question]) -> None:
        """Raise `InputError` for another model than it was fitted to, or a question fitted on."""
        found, seen = self.fitted.get("model_digest"), self.fitted.get("questions")
        if found is None or seen is None:
            raise InputError(f"{folder}: does not say what it was fitted on; fit it anew")
        if found != model_digest:
            raise InputError(
                f"{folder}: was fitted to {self.fitted.get('model')} (digest {found[:12]}), not to "
                f"{model} (digest {str(model_digest)[:12]}); fit one to this model"
            )
        digests = set(seen)
        again = [q.id for q in questions if question_digest(q) in digests]
        if again:
            raise InputError(
                f"{folder}: was fitted on {len(again)} of these {len(questions)} questions, "
                f"{again[0]} for one; score others, or fit it on others"
            )


def question_digest(question: Question) -> str:
    """SHA-256, 16 digits of it, of a question's text and its choices in any order.

    Its prompt's digest would not do: other shots or another style change that.
    """
    parts = [question.text.strip(), *sorted(choice.strip() for choice in question.choices)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class CalibratedEngine(TransformersEngine):
    """The transformers engine with logits / τ in the place of logits."""

    def __init__(self, model: str, calibrator: Calibrator, **options):
        super().__init__(model, **options)
        self.calibrator = calibrator.to(self.device).eval()
        found = self.model.get_output_embeddings().weight.shape[1]
        if found != (expected := calibrator.settings.hidden_size):
            raise InputError(
                f"{model}: its hidden states have {found} features, the calibrator was fitted "
                f"on {expected}; use the model it was fitted to"
            )

    def describe(self) -> dict:
        """Engine settings and the kind of calibrator."""
        return super().describe() | {"calibrator": self.calibrator.settings.head}

    @torch.inference_mode()
    def states(
        self, groups: list[list[Job]], context: bool = False
    ) -> Iterator[tuple[Job, Tensor, Tensor]]:
        """Yield what the engine yields, the logits divided by their temperatures."""
        for job, hidden, logits in super().states(groups, self.calibrator.reads_context):
            one_token(job)
            yield job, hidden, logits.double() / self.calibrator(hidden[None])[:, None]


def one_token(job: Job) -> None:
    """Refuse letters of several tokens: temperatures of their own could reorder them."""
    if len(job.nodes) > 1:
        raise InputError(
            "the tokenizer spells a letter in several tokens; temperatures along them could change "
            "which letter is likeliest, so only letters of one token can be calibrated"
        )
