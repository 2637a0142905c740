"""The calibrator: a small head that turns hidden states into a temperature, and its files."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from calibeval.io import InputError, atomic_write, read_text, sha256

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
        counts = (h for h in (1, 2, 4, 8, 16, 32) if size % h == 0)
        self.heads = max(h for h in counts if h * 16 <= max(size, 16))
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
        seen = torch.einsum(
            "bhd,hed->bhe", scores.softmax(-1) @ hidden, self.value.weight.view(per_head)
        )
        found = last + self.mix(seen.flatten(1) + self.value.bias)
        return found + self.mlp(found)


class Calibrator(nn.Module):
    """Temperatures of the answers that follow sequences of hidden states.

    τ = exp(4 tanh(head(LayerNorm(h)) / 4)),  h: (B, T, D) → τ: (B,) at the last positions

    Every head starts at τ = 1; the bound, e^±4, keeps different logits different in floating point.
    """

    def __init__(self, settings: Settings):
        super().__init__()
        if settings.head not in HEADS:
            raise InputError(f"head is {settings.head!r}, expected one of {', '.join(HEADS)}")
        self.settings = settings
        size = settings.hidden_size
        self.norm = nn.LayerNorm(size)
        self.inner: nn.Module = nn.Identity()
        if settings.head == "mlp":
            self.inner = nn.Sequential(nn.Linear(size, size), nn.GELU())
        elif settings.head == "transformer":
            self.inner = LastOfLayer(size)
        self.out = nn.Linear(size, 1, bias=True)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        if settings.head == "constant":
            self.out.weight.requires_grad_(False)

    @property
    def reads_context(self) -> bool:
        """Whether the head needs the whole sequence rather than its last position."""
        return self.settings.head == "transformer"

    def forward(
        self,
        hidden: Tensor,  # (B, T, D), padded on the left
        lengths: Tensor | None = None,  # (B,), T each unless given
    ) -> Tensor:
        """Temperatures, (B,)."""
        hidden = self.norm(hidden.float())
        hidden = self.inner(hidden, lengths) if self.reads_context else self.inner(hidden[:, -1])
        return (LIMIT * torch.tanh(self.out(hidden).squeeze(-1) / LIMIT)).exp()

    def save_pretrained(self, folder: Path, fitted: dict) -> None:
        """Write weights, then `calibrator.json` with `fitted`: on what and with which result."""
        from safetensors.torch import save

        folder = Path(folder)
        with atomic_write(folder / WEIGHTS, "wb") as file:
            file.write(save(self.state_dict()))
        with atomic_write(folder / CONFIG) as file:
            json.dump(asdict(self.settings) | {"fitted": fitted}, file, indent=1)

    @classmethod
    def from_pretrained(cls, folder: Path) -> "Calibrator":
        """Read what `save_pretrained` wrote; raises `InputError` if it is absent or not whole."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(folder)
        if not (folder / CONFIG).is_file():
            raise InputError(
                f"{folder}: no {CONFIG}; `calibeval fit-temperature` or fit-ats makes one"
            )
        try:
            found = json.loads(read_text(folder / CONFIG))
            calibrator = cls(Settings(found["head"], found["hidden_size"], found["over"]))
            calibrator.load_state_dict(load_file(folder / WEIGHTS))
        except (ValueError, KeyError, RuntimeError, OSError, SafetensorError) as error:
            reason = str(error).strip().split("\n")[0]
            raise InputError(f"{folder}: not a whole calibrator: {reason}") from error
        return calibrator.eval()


def digest(folder: Path) -> str:
    """SHA-256 of a saved calibrator's weights."""
    return sha256(Path(folder) / WEIGHTS)
