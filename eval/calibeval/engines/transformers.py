"""Engine on Hugging Face transformers: the shared prefix is computed once a group.

keys and values ← model(prefix)                    once a group
log P ← model(suffixes behind them) → lm_head at the last positions only
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor

from calibeval.engines import Job, Usage, context_length, first_line, load_tokenizer
from calibeval.engines.shared import Continuing, Recording, can_share
from calibeval.io import InputError
from calibeval.letters import common_prefix

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@dataclass(frozen=True)
class Prefix:
    """What the model keeps of the tokens that a group of prompts shares."""

    length: int = 0
    states: Tensor | None = None  # (length, D): what the output layer is given
    cache: object = None
    layers: list[tuple[Tensor, Tensor]] | None = None  # keys and values, where they can be shared


class TransformersEngine:
    """Scores batches of questions behind their prefix, which is computed once."""

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        batch_size: int = 16,
        max_length: int | None = None,
        revision: str | None = None,
    ):
        self.device = "cuda" if device == "auto" and torch.cuda.is_available() else device
        self.device = "cpu" if self.device == "auto" else self.device
        self.dtype = "float32" if dtype == "auto" and self.device == "cpu" else dtype
        self.batch_size = batch_size
        kind = self.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        self.tokenizer = load_tokenizer(model, revision)
        try:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                model, torch_dtype=kind, revision=revision
            )
        except (OSError, ValueError, KeyError) as error:
            raise InputError(
                f"{model}: cannot be loaded as a causal language model: {first_line(error)}"
            ) from error
        self.model.to(self.device).eval()
        self.max_length = max_length or context_length(self.model.config)
        self.usage = Usage()
        self.shares = None if self.device == "cpu" else False  # None: not tried yet

    def describe(self) -> dict:
        """Engine settings that a record's figures depend on."""
        return {
            "engine": "transformers",
            "device": torch.cuda.get_device_name() if self.device == "cuda" else self.device,
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "attention": self.model.config._attn_implementation,
            "prefix": "shared" if self.shares else "copied",
            "batch_size": self.batch_size,
            "max_length": self.max_length,
        }

    def versions(self) -> dict[str, str]:
        """Versions of the packages that computed the figures."""
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def score(self, groups: list[list[Job]]) -> Iterator[tuple[int, list[float]]]:
        """Yield (job index, log-probability of each letter) for every job."""
        for job, _, logits in self.states(groups):
            # In double, logits that differ never round to equal log-probabilities.
            rows = torch.log_softmax(logits.double(), dim=-1)
            lead = [0.0]
            for depth, token in enumerate(job.spine):
                lead.append(lead[-1] + rows[depth, token].item())
            yield (
                job.index,
                [lead[depth] + rows[depth, token].item() for depth, token in job.letters],
            )

    @torch.inference_mode()
    def states(
        self, groups: list[list[Job]], context: bool = False
    ) -> Iterator[tuple[Job, Tensor, Tensor]]:
        """Yield (job, what the output layer is given (T, D), logits (P, V)) for every job.

        Row d of the P = len(job.spine) + 1 rows follows the context and d tokens of the spine. The
        T states are of the same places, or with `context` of every token of context and spine.
        """
        for group in groups:
            # A job's last token stays out of the prefix: its logits are what the job asks for.
            shortest = min(len(job.tokens) for job in group)
            length = min(common_prefix([job.tokens for job in group]), shortest - 1)
            prefix = self._read(group[0].tokens[:length]) if length and len(group) > 1 else Prefix()
            self.usage.prompt_tokens += sum(len(job.tokens) + len(job.spine) for job in group)
            ordered = sorted(group, key=lambda job: len(job.tokens))
            for start in range(0, len(ordered), self.batch_size):
                yield from self._batch(ordered[start : start + self.batch_size], prefix, context)

    def _read(self, tokens: tuple[int, ...]) -> "Prefix":
        ids = torch.tensor([tokens], device=self.device)
        last = torch.tensor([[len(tokens) - 1]], device=self.device)
        self.usage.computed_tokens += len(tokens)
        with Recording() as recording, self._only_positions(last) as given:
            cache = self.model(input_ids=ids, use_cache=True).past_key_values
        if not hasattr(cache, "batch_repeat_interleave"):
            return Prefix()  # recurrent states, which cannot be copied along the batch
        layers = recording.layers if self._can_share(recording) else None
        return Prefix(len(tokens), given[0][0], cache, layers)

    def _can_share(self, recording: Recording) -> bool:
        layers = getattr(self.model.config, "num_hidden_layers", None)
        whole = recording.plain and recording.calls == layers
        return self.shares is not False and whole and can_share(self.model.config, self.max_length)

    def _batch(
        self, batch: list[Job], prefix: "Prefix", context: bool
    ) -> Iterator[tuple[Job, Tensor, Tensor]]:
        suffixes = [job.tokens[prefix.length :] + job.spine for job in batch]
        width = max(map(len, suffixes))
        self.usage.computed_tokens += width * len(batch)
        # Padding goes right: causal attention keeps real tokens from seeing it; no mask is needed.
        ids = torch.tensor([s + (0,) * (width - len(s)) for s in suffixes], device=self.device)
        deepest = max(len(job.spine) for job in batch)
        # Row i reads the logits after its context and after each spine token, padded at the end.
        read = torch.tensor(
            [
                [min(len(s) - 1 - len(job.spine) + d, len(s) - 1) for d in range(deepest + 1)]
                for job, s in zip(batch, suffixes, strict=True)
            ],
            device=self.device,
        )  # (batch, deepest + 1)
        with self._only_positions(read) as given:
            logits = self._logits(ids, prefix)
        hidden = given[0 if self.shares else -1]
        for row, job in enumerate(batch):
            rows = len(job.spine) + 1
            states = hidden[row, read[row, :rows]]
            if context:
                states = hidden[row, : len(suffixes[row])]
                states = states if prefix.states is None else torch.cat([prefix.states, states])
            yield job, states, logits[row, :rows]

    def _logits(self, ids: Tensor, prefix: "Prefix") -> Tensor:
        """The model's logits of suffixes (batch, width) behind their prefix."""
        positions = torch.arange(prefix.length, prefix.length + ids.shape[1], device=self.device)
        positions = positions.expand(len(ids), -1)
        if prefix.layers is not None and self.shares is not False:
            with Continuing(prefix.layers) as attention:
                shared = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits
            whole = attention.plain and attention.calls == len(prefix.layers)
            if whole and self.shares is None:
                # The first question is asked both ways: models exist that this knows nothing of.
                copied = self._behind_copies(ids[:1], positions[:1], prefix)
                near = torch.finfo(copied.dtype).eps ** 0.5
                whole = torch.allclose(shared[:1], copied, near, near)
            self.shares = whole
            if whole:
                return shared
        return self._behind_copies(ids, positions, prefix)

    def _behind_copies(self, ids: Tensor, positions: Tensor, prefix: "Prefix") -> Tensor:
        cache = copy.deepcopy(prefix.cache)
        if cache is not None:
            cache.batch_repeat_interleave(len(ids))
        return self.model(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True
        ).logits

    @contextmanager
    def _only_positions(self, positions: Tensor) -> Iterator[list[Tensor]]:  # (batch, P)
        """Let the output layer see only these positions, and keep what it was to be given.

        A vocabulary of logits for each prompt token would be waste.
        """
        given = []

        def select(module, args):
            hidden = args[0]
            given.append(hidden)
            index = positions[: len(hidden), :, None].expand(-1, -1, hidden.shape[-1])
            return (hidden.gather(1, index), *args[1:])

        handle = self.model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            yield given
        finally:
            handle.remove()
