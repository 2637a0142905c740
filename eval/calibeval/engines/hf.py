"""Engine on Hugging Face transformers: what prompts share is computed once.

keys and values ← model(prefix)                          once a group
log P ← model(context and the choices' tokens as a tree)   once a question, in batches
logits ← hidden states at the places asked for, in float32
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from calibeval.engines import Job, Usage, context_length, load, load_tokenizer, text_config
from calibeval.io import InputError
from calibeval.prompts import common_prefix

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
        self.device = _device(device)
        on_cpu = self.device.type == "cpu"
        dtype = "float32" if dtype == "auto" and on_cpu else dtype
        dtype = dtype if dtype == "auto" else getattr(torch, dtype)
        self.batch_size = batch_size
        self.tokenizer = load_tokenizer(model, revision)
        kind, failed = (
            transformers.AutoModelForCausalLM,
            "cannot be loaded as a causal language model",
        )
        self.model = load(kind, model, failed, revision, torch_dtype=dtype)
        self.model.to(self.device).eval()
        self.max_length = max_length or context_length(self.model.config)
        self.usage = Usage()
        self.shares = None if on_cpu else False  # None: not tried yet
        self.packs: bool | None = None
        self.longest = 0  # tokens of the longest prompt in hand

    def describe(self) -> dict:
        """Engine settings that a record's figures depend on."""
        on_gpu = self.device.type == "cuda"
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        precise = type(self.model.get_output_embeddings()) is torch.nn.Linear
        return {
            "engine": "transformers",
            "device": torch.cuda.get_device_name(self.device) if on_gpu else str(self.device),
            "dtype": dtype,
            "head_dtype": "float32" if precise else dtype,
            "attention": self.model.config._attn_implementation,
            "prefix": "shared" if self.shares else "copied",
            "batch_size": self.batch_size,
            "max_length": self.max_length,
        }

    def versions(self) -> dict[str, str]:
        """Versions of the packages that computed the figures."""
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def score(self, groups: list[list[Job]]) -> Iterator[tuple[int, list[float]]]:
        """Yield (job index, log-probability of each branch) for every job."""
        for job, _, logits in self.states(groups):
            row = {node: i for i, node in enumerate(job.nodes)}
            at = [row[b[:j]] for b in job.branches for j in range(len(b))]
            tokens = [token for branch in job.branches for token in branch]
            # In double, logits that differ never round to equal log-probabilities.
            logits = logits.double()
            found = (logits[at, tokens] - logits.logsumexp(dim=-1)[at]).cpu()
            yield job.index, [part.sum().item() for part in found.split([*map(len, job.branches)])]

    @torch.inference_mode()
    def states(
        self, groups: list[list[Job]], context: bool = False
    ) -> Iterator[tuple[Job, Tensor, Tensor]]:
        """Yield (job, what the output layer is given (T, D), logits (P, V)) for every job.

        The P rows of logits follow the context and each of the job's nodes. The T states are of the
        same places, or with `context` of every token of context and nodes.
        """
        self.longest = max((job.length for group in groups for job in group), default=0)
        for group in groups:
            # A job's last token stays out of the prefix: its logits are what the job asks for.
            shortest = min(len(job.tokens) for job in group)
            length = min(common_prefix([job.tokens for job in group]), shortest - 1)
            prefix = self._read(group[0].tokens[:length]) if length and len(group) > 1 else Prefix()
            self.usage.prompt_tokens += sum(len(job.tokens) + len(job.nodes) - 1 for job in group)
            ordered = sorted(group, key=lambda job: len(job.tokens) + len(job.nodes))
            for start in range(0, len(ordered), self.batch_size):
                batch = ordered[start : start + self.batch_size]
                trees = [job for job in batch if not job.is_chain]
                if not trees or self._can_pack(trees[0], prefix):
                    yield from self._batch(batch, prefix, context)
                else:
                    for job in batch:
                        yield self._apart(job, prefix)

    def _read(self, tokens: tuple[int, ...]) -> Prefix:
        ids = torch.tensor([tokens], device=self.device)
        last = torch.tensor([[len(tokens) - 1]], device=self.device)
        self.usage.computed_tokens += len(tokens)
        with Recording() as recording, self._only_positions(last) as given:
            cache = self.model(input_ids=ids, use_cache=True).past_key_values
        if not hasattr(cache, "batch_repeat_interleave"):
            return Prefix()  # recurrent states, which cannot be copied along the batch
        config = self.model.config
        plain = recording.plain and recording.calls == getattr(config, "num_hidden_layers", None)
        share = self.shares is not False and plain and sees_all(config, self.longest)
        return Prefix(len(tokens), given[0][0], cache, recording.layers if share else None)

    def _can_pack(self, job: Job, prefix: Prefix) -> bool:
        """Whether the model reads a tree of tokens as it reads each branch alone.

        The first question is asked both ways: many models know nothing of masks of their own.
        """
        if not sees_all(self.model.config, self.longest):
            return False
        if self.packs is None:
            self.packs = False
            _, _, expected = self._apart(job, prefix)
            try:
                ((_, _, found),) = self._batch([job], prefix, False)
            except Exception:  # whatever a model that takes no such mask raises
                return False
            self.packs = self._near(found, expected)
        return self.packs

    def _apart(self, job: Job, prefix: Prefix) -> tuple[Job, Tensor, Tensor]:
        """A question whose branches are computed one by one, each behind its own context."""
        found = {}
        alone = [Job(job.index, job.tokens, (branch,)) for branch in job.branches]
        for start in range(0, len(alone), self.batch_size):
            batch = alone[start : start + self.batch_size]
            for chain, states, logits in self._batch(batch, prefix, False):
                found |= zip(chain.nodes, zip(states, logits, strict=True), strict=True)
        return job, *map(torch.stack, zip(*(found[node] for node in job.nodes), strict=True))

    def _batch(
        self, batch: list[Job], prefix: Prefix, context: bool
    ) -> Iterator[tuple[Job, Tensor, Tensor]]:
        # A node's last token stands for it; those before are in its ancestors' places.
        suffixes = [
            (*job.tokens[prefix.length :], *(n[-1] for n in job.nodes[1:])) for job in batch
        ]
        width = max(map(len, suffixes))
        self.usage.computed_tokens += width * len(batch)
        # Padding goes right: causal attention keeps real tokens from seeing it; no mask is needed.
        ids = torch.tensor([s + (0,) * (width - len(s)) for s in suffixes], device=self.device)
        # Of each row, the places of its context's end and of its nodes, padded with the last.
        ends = torch.tensor([[len(s) - 1] for s in suffixes])
        counts = torch.tensor([[len(job.nodes)] for job in batch])
        read = ends + 1 - counts + torch.arange(int(counts.max()))  # (batch, most nodes)
        read = read.minimum(ends).to(self.device)
        with self._only_positions(read) as given:
            logits = self._logits(batch, ids, prefix)
        hidden = given[0 if self.shares else -1]
        for row, job in enumerate(batch):
            rows = len(job.nodes)
            states = hidden[row, read[row, :rows]]
            if context:
                before = hidden[row, :0] if prefix.states is None else prefix.states
                states = torch.cat([before, hidden[row, : len(suffixes[row])]])
            yield job, states, logits[row, :rows]

    def _logits(self, batch: list[Job], ids: Tensor, prefix: Prefix) -> Tensor:
        """The model's logits of suffixes (batch, width) behind their prefix."""
        positions = torch.arange(prefix.length, prefix.length + ids.shape[1], device=self.device)
        positions = positions.repeat(len(ids), 1)
        if not all(job.is_chain for job in batch):
            return self._behind_copies(ids, *self._tree(batch, positions, prefix), prefix)
        if prefix.layers is not None and self.shares is not False:
            with Continuing(prefix.layers) as attention:
                shared = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits
            whole = attention.plain and attention.calls == len(prefix.layers)
            if whole and self.shares is None:
                # The first question is asked both ways: models exist that this knows nothing of.
                copied = self._behind_copies(ids[:1], positions[:1], None, prefix)
                whole = self._near(shared[:1], copied)
            self.shares = whole
            if whole:
                return shared
        return self._behind_copies(ids, positions, None, prefix)

    def _tree(self, batch: list[Job], positions: Tensor, prefix: Prefix) -> tuple[Tensor, Tensor]:
        """(positions, additive mask) by which a node sees its context and ancestors alone."""
        rows, width = positions.shape
        sees = torch.ones(rows, width, width, dtype=torch.bool).tril()
        positions = positions.cpu()
        for row, job in enumerate(batch):
            start = len(job.tokens) - prefix.length - 1  # place of node (): the context's last
            place = {node: start + i for i, node in enumerate(job.nodes)}
            sees[row, start + 1 :, start + 1 :] = False
            for node in job.nodes[1:]:
                ancestors = [place[node[:i]] for i in range(1, len(node) + 1)]
                sees[row, place[node], ancestors] = True
                positions[row, place[node]] = len(job.tokens) + len(node) - 1
        sees = torch.cat([torch.ones(rows, width, prefix.length, dtype=torch.bool), sees], dim=2)
        kind = next(self.model.parameters()).dtype
        mask = torch.zeros(sees.shape, dtype=kind).masked_fill(~sees, torch.finfo(kind).min)
        return positions.to(self.device), mask[:, None].to(self.device)

    def _behind_copies(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, prefix: Prefix
    ) -> Tensor:
        cache = copy.deepcopy(prefix.cache)
        if cache is not None:
            cache.batch_repeat_interleave(len(ids))
        given = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
        return self.model(**given, past_key_values=cache, use_cache=True).logits

    def _near(self, found: Tensor, expected: Tensor) -> bool:
        """Whether two ways to compute the same logits differ by rounding only."""
        found, expected = (x.float() - x.float().mean(-1, keepdim=True) for x in (found, expected))
        rounding = torch.finfo(next(self.model.parameters()).dtype).eps ** 0.5
        return bool((found - expected).norm() <= rounding * expected.norm())

    @contextmanager
    def _only_positions(self, positions: Tensor) -> Iterator[list[Tensor]]:  # (batch, P)
        """Let the output layer see only these positions, and keep what it was to be given.

        A vocabulary of logits for each prompt token would be waste. bfloat16 logits near 20 are
        0.125 apart, so that the layer's product is computed again in float32.
        """
        given = []

        def select(module, args):
            hidden = args[0]
            given.append(hidden)
            index = positions[: len(hidden), :, None].expand(-1, -1, hidden.shape[-1])
            return (hidden.gather(1, index), *args[1:])

        def precise(module, args, output):
            if type(module) is torch.nn.Linear and output.dtype != torch.float32:
                bias = None if module.bias is None else module.bias.float()
                return linear(args[0].float(), module.weight.float(), bias)

        head = self.model.get_output_embeddings()
        hooks = [head.register_forward_pre_hook(select), head.register_forward_hook(precise)]
        try:
            yield given
        finally:
            for hook in hooks:
                hook.remove()


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device is {name!r}, expected auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= gpus:
            raise InputError(
                f"--device {name}: torch {torch.__version__} sees {gpus} CUDA GPUs here; give "
                "--device cpu, or install the torch build for this machine's driver"
            )
    return device


class Recording(TorchFunctionMode):
    """Keeps each layer's keys and values, (1, heads, P, d), while the model reads the prefix."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.plain = True  # whether every call was causal without a mask
        self.layers: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        found = self.attend(*args, **(kwargs or {}))
        self.calls += 1
        return found

    def attend(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        """Attention as it is."""
        self.plain &= attn_mask is None and (is_causal or query.shape[2] == 1)
        self.layers.append((key.contiguous(), value.contiguous()))
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **options
        )


class Continuing(Recording):
    """Lets queries (B, heads, S, d) see a recorded prefix and then their own question.

    Behind a prefix that all questions of a batch share, its keys are read and never copied:
        o = σ(l₁ − l₂) o₁ + σ(l₂ − l₁) o₂
    o₁, l₁: attention over the prefix and its log-sum-exp, for every query of the batch in one call;
    o₂, l₂: causal attention among each question's own tokens. A copy of the keys a question, and
    the mask that keys of two origins need, cost more than the attention itself.
    """

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


def sees_all(config, length: int) -> bool:
    """Whether every layer's attention sees all earlier tokens of prompts up to `length`."""
    config = text_config(config)
    kinds = set(getattr(config, "layer_types", None) or ())
    windows = (getattr(config, k, None) for k in ("sliding_window", "attention_chunk_size"))
    return kinds == {"full_attention"} or (
        kinds <= {"full_attention", "sliding_attention"}
        and all(window is None or window > length for window in windows)
    )
