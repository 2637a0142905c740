"""Engine on Hugging Face transformers: the shared prefix is computed once a group.

cache ← model(prefix)                              once a group
log P ← model(suffixes, copy of cache) → lm_head at the last positions only
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers
from torch import Tensor

from calibeval.engines import Job, Usage, context_length, first_line, load_tokenizer
from calibeval.errors import InputError
from calibeval.letters import common_prefix

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


class TransformersEngine:
    """Scores batches of questions behind one copy of their prefix's key/value cache."""

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

    def describe(self) -> dict:
        """Engine settings that a record's figures depend on."""
        return {
            "engine": "transformers",
            "device": torch.cuda.get_device_name() if self.device == "cuda" else self.device,
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "attention": self.model.config._attn_implementation,
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
    def states(self, groups: list[list[Job]]) -> Iterator[tuple[Job, Tensor, Tensor]]:
        """Yield (job, what the output layer is given (T, D), logits (P, V)) for every job.

        The T states are those of context and spine. Row d of the P = len(job.spine) + 1 rows of
        logits follows the context and d tokens of the spine.
        """
        for group in groups:
            # A job's last token stays out of the cache: its logits are what the job asks for.
            shortest = min(len(job.tokens) for job in group)
            prefix = min(common_prefix([job.tokens for job in group]), shortest - 1)
            cache, before = None, None
            if prefix and len(group) > 1:
                cache, before = self._prefix_cache(group[0].tokens[:prefix])
                self.usage.computed_tokens += prefix
            if cache is None:
                prefix, before = 0, None
            self.usage.prompt_tokens += sum(len(job.tokens) + len(job.spine) for job in group)
            ordered = sorted(group, key=lambda job: len(job.tokens))
            for start in range(0, len(ordered), self.batch_size):
                batch = ordered[start : start + self.batch_size]
                for job, given, logits in self._batch(batch, prefix, cache):
                    yield job, given if before is None else torch.cat([before, given]), logits

    def _prefix_cache(self, tokens: tuple[int, ...]):
        ids = torch.tensor([tokens], device=self.device)
        last = torch.tensor([[len(tokens) - 1]], device=self.device)
        with self._only_positions(last) as given:
            cache = self.model(input_ids=ids, use_cache=True).past_key_values
        # Caches that cannot be copied along the batch (recurrent states) are not shared.
        return cache if hasattr(cache, "batch_repeat_interleave") else None, given[0][0]

    def _batch(self, batch: list[Job], prefix: int, cache) -> Iterator[tuple[Job, Tensor, Tensor]]:
        suffixes = [job.tokens[prefix:] + job.spine for job in batch]
        width = max(map(len, suffixes))
        self.usage.computed_tokens += width * len(batch)
        # Padding goes right: causal attention keeps real tokens from seeing it; no mask is needed.
        ids = torch.tensor([s + (0,) * (width - len(s)) for s in suffixes], device=self.device)
        positions = torch.arange(prefix, prefix + width, device=self.device).expand(len(batch), -1)
        if cache is not None:
            cache = copy.deepcopy(cache)
            cache.batch_repeat_interleave(len(batch))
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
            logits = self.model(
                input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True
            ).logits
        for row, job in enumerate(batch):
            yield job, given[0][row, : len(suffixes[row])], logits[row, : len(job.spine) + 1]

    @contextmanager
    def _only_positions(self, positions: Tensor) -> Iterator[list[Tensor]]:  # (batch, P)
        """Let the output layer see only these positions, and keep what it would have been given.

        A vocabulary of logits for each prompt token would be waste.
        """
        given = []

        def select(module, args):
            hidden = args[0]
            given.append(hidden)
            index = positions[..., None].expand(-1, -1, hidden.shape[-1])
            return (hidden.gather(1, index), *args[1:])

        handle = self.model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            yield given
        finally:
            handle.remove()
