"""Engine on Hugging Face transformers: what prompts share is computed once.

keys and values ← model(prefix)                          once a group
log P ← model(context and the choices' tokens as a tree)   once a question, in batches
logits ← hidden states at the places asked for, in float32
"""

import copy
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear

from calibeval.engines import Job, load, text_config
from calibeval.io import InputError
from calibeval.prompts import common_prefix

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# What a batch takes at most: tokens that are computed, bytes of keys and values, and logits (some
# 3 GB in bfloat16 and float32).
TOKENS, CACHE, LOGITS = 2**14, 2**32, 2**29

# cuDNN's attention is compiled for every new shape, and no two batches are of one shape.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Answer = tuple[Job, Tensor]  # a job, and the logits at its nodes (P, V)


class Prefix(NamedTuple):
    """What the model keeps of the tokens that a group of prompts shares."""

    length: int = 0
    cache: object = None


class TransformersEngine:
    """Scores batches of questions behind their prefix, which is computed once.

    `model` is a folder, a name on the hub, or a loaded model, which stays on its device and in its
    precision.
    """

    def __init__(
        self,
        model,
        *,
        dtype: str = "auto",
        batch_size: int | None = None,
        revision: str | None = None,
    ):
        loaded = _load(model, dtype, revision) if isinstance(model, str) else model
        self.model = getattr(loaded, "module", loaded)
        self.trained = [module for module in self.model.modules() if module.training]
        # Mixed precision is training's alone: accelerate keeps the forward without it.
        self.forward = getattr(self.model, "_original_forward", self.model)
        self.model.eval()
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self.device = next(self.model.parameters()).device
        self.batch_size = batch_size
        self.packs: bool | None = None  # whether it reads trees; None: not tried yet

    def close(self) -> None:
        """Leave a loaded model as it was."""
        for module in self.trained:
            module.training = True

    def describe(self) -> dict:
        """Engine settings that a record's figures depend on."""
        on_gpu = self.device.type == "cuda"
        dtype = str(self.model.dtype).removeprefix("torch.")
        precise = type(self.model.get_output_embeddings()) is torch.nn.Linear
        return {
            "engine": "transformers",
            "device": torch.cuda.get_device_name(self.device) if on_gpu else str(self.device),
            "dtype": dtype,
            "head_dtype": "float32" if precise else dtype,
            "attention": self.model.config._attn_implementation,
            "batch_size": self.batch_size,
        }

    def score(
        self, groups: list[list[Job]], skip: Container[int] = ()
    ) -> Iterator[tuple[int, list[float]]]:
        """Yield (job index, log-probability of each branch) for every job.

        Batches of nothing but jobs to `skip` are left out; the others are what they would be
        without, so that an interrupted run comes to the same bytes.
        """
        whole = {job.index: job for group in groups for job in group}
        found: dict[int, dict] = {index: {} for index in whole}
        longest = max((job.length for job in whole.values()), default=0)
        readable = [self._readable(group, longest) for group in groups]
        for jobs, values in self._in_turn(self.batches(readable, skip)):
            parts = iter(values.cpu().split([len(b) for job in jobs for b in job.branches]))
            for job in jobs:
                branches, of = whole[job.index].branches, found[job.index]
                of |= {branch: next(parts).sum().item() for branch in job.branches}
                if len(of) == len(set(branches)):
                    yield job.index, [of[branch] for branch in branches]

    def _in_turn(self, batches: Iterator[list[Answer]]) -> Iterator[tuple[list[Job], Tensor]]:
        """Yield each batch's jobs, and the log-probabilities of all tokens of their branches, once
        the GPU works at the next."""
        before = None
        for batch in batches:
            asked = []  # (place of the node, token) of all branches' tokens
            for job, _ in batch:
                row = {node: i for i, node in enumerate(job.nodes)}
                asked.append([(row[b[:i]], t) for b in job.branches for i, t in enumerate(b)])
            index = self._put(torch.tensor([pair for of in asked for pair in of]).T)
            parts = index.split([len(of) for of in asked], dim=1)
            # In double, logits that differ never round to equal log-probabilities.
            found = [
                z[at, tokens].double() - z.double().logsumexp(dim=-1)[at]
                for (_, z), (at, tokens) in zip(batch, parts, strict=True)
            ]
            jobs, batch = [job for job, _ in batch], None  # its logits need not be kept
            if before:
                yield before
            before = jobs, torch.cat(found)
        if before:
            yield before

    def _readable(self, group: list[Job], longest: int) -> list[Job]:
        """The group's jobs; a job a choice where the model cannot read them as a tree of tokens."""
        trees = [job for job in group if not job.is_chain]
        if not trees or (sees_all(self.model.config, longest) and self._can_pack(trees[0])):
            return group
        return [apart for job in group for apart in _apart(job)]

    @torch.inference_mode()
    def _can_pack(self, job: Job) -> bool:
        """Whether the model reads a tree of tokens as it reads each branch alone.

        The first question is asked both ways: many models know nothing of masks of their own.
        """
        if self.packs is None:
            alone = {}
            for chain, logits in self._batch(_apart(job), Prefix()):
                alone |= zip(chain.nodes, logits, strict=True)
            try:
                ((_, found),) = self._batch([job], Prefix())
                expected = torch.stack([alone[node] for node in job.nodes])
                self.packs = _near(found, expected, torch.finfo(self.model.dtype).eps ** 0.5)
            except Exception:  # whatever a model that takes no such mask raises
                self.packs = False
        return self.packs

    @torch.inference_mode()
    def batches(self, groups: list[list[Job]], skip: Container[int] = ()) -> Iterator[list[Answer]]:
        """Yield batches of jobs with the logits (P, V) after the context and each other node."""
        jobs = [job for group in groups for job in group]
        if stretches(self.model.config, max((job.length for job in jobs), default=0)):
            groups = [[job] for job in jobs]
        for group in groups:
            if all(job.index in skip for job in group):
                continue
            # A job's last token stays out of the prefix: its logits are what the job asks for.
            shortest = min(len(job.tokens) for job in group)
            length = min(common_prefix([job.tokens for job in group]), shortest - 1)
            prefix = self._read(group[0].tokens[:length]) if length and len(group) > 1 else Prefix()
            ordered = sorted(group, key=lambda job: len(job.tokens) + len(job.nodes))
            for batch in self._split(ordered, prefix):
                if not all(job.index in skip for job in batch):
                    yield self._batch(batch, prefix)

    def _split(self, jobs: list[Job], prefix: Prefix) -> Iterator[list[Job]]:
        """`jobs`, the shorter first, in batches within what there is room for."""
        config, batch, most = text_config(self.model.config), [], 0
        heads = getattr(config, "num_attention_heads", 1)
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        each = 2 * config.num_hidden_layers * width * self.model.dtype.itemsize  # bytes a token
        each *= getattr(config, "num_key_value_heads", None) or heads
        for job in jobs:
            n, most = len(batch) + 1, max(most, len(job.nodes))
            new = len(job.tokens) - prefix.length + len(job.nodes) - 1
            full = self.batch_size is not None and n > self.batch_size
            full |= n * new > TOKENS or n * (prefix.length + new) * each > CACHE
            if batch and (full or n * most * config.vocab_size > LOGITS):
                yield batch
                batch, most = [], len(job.nodes)
            batch.append(job)
        yield batch

    def _read(self, tokens: tuple[int, ...]) -> Prefix:
        ids = torch.tensor([tokens], device=self.device)
        with self._only_positions(torch.tensor([[0]], device=self.device)):
            cache = self.forward(input_ids=ids, use_cache=True).get("past_key_values")
        if all(hasattr(x, "batch_repeat_interleave") for x in getattr(cache, "layers", [cache])):
            return Prefix(len(tokens), cache)
        return Prefix()  # recurrent states, which cannot be copied along the batch

    def _batch(self, batch: list[Job], prefix: Prefix) -> list[Answer]:
        # A node's last token stands for it; those before are in its ancestors' places.
        suffixes = [
            (*job.tokens[prefix.length :], *(n[-1] for n in job.nodes[1:])) for job in batch
        ]
        width = max(map(len, suffixes))
        # Padding goes right: causal attention keeps real tokens from seeing it; no mask is needed.
        ids = self._put(torch.tensor([s + (0,) * (width - len(s)) for s in suffixes]))
        positions = torch.arange(prefix.length, prefix.length + width).repeat(len(batch), 1)
        mask = None
        if not all(job.is_chain for job in batch):
            positions, mask = self._tree(batch, positions, prefix)
        # Of each row, the places of its context's end and of its nodes, padded with the last.
        ends = torch.tensor([[len(s) - 1] for s in suffixes])
        counts = torch.tensor([[len(job.nodes)] for job in batch])
        read = ends + 1 - counts + torch.arange(int(counts.max()))  # (batch, most nodes)
        cache = copy.deepcopy(prefix.cache)
        if cache is not None:
            cache.batch_repeat_interleave(len(batch))
        given = {"position_ids": self._put(positions), "attention_mask": mask}
        with self._only_positions(self._put(read.minimum(ends))):
            output = self.forward(ids, **given, past_key_values=cache, use_cache=True)
        return [(job, output.logits[row, : len(job.nodes)]) for row, job in enumerate(batch)]

    def _put(self, made: Tensor) -> Tensor:
        """On the model's device; a GPU is not waited for."""
        if self.device.type == "cuda":
            made = made.pin_memory()
        return made.to(self.device, non_blocking=True)

    def _tree(self, batch: list[Job], positions: Tensor, prefix: Prefix) -> tuple[Tensor, Tensor]:
        """(positions, additive mask) by which a node sees its context and ancestors alone."""
        rows, width = positions.shape
        sees = np.tri(width, dtype=bool)[None].repeat(rows, 0)
        for row, job in enumerate(batch):
            start = len(job.tokens) - prefix.length - 1  # place of node (): the context's last
            # Which nodes lie on the way to each, itself among them: (nodes, nodes).
            at, along = {}, np.eye(len(job.nodes), dtype=bool)
            for node in job.nodes:  # a node's parent comes before it
                along[len(at)] |= along[at.get(node[:-1], 0)]
                at[node] = len(at)
            end = start + len(along)
            sees[row, start:end, start:end] = along
            positions[row, start:end] = torch.from_numpy(along.sum(1)) + len(job.tokens) - 2
            positions[row, end:] = 0  # a wide tree's padding would lie beyond what a model has
        sees = self._put(torch.from_numpy(sees))
        sees = torch.cat([sees.new_ones(rows, width, prefix.length), sees], dim=2)
        kind = self.model.dtype
        mask = torch.zeros_like(sees, dtype=kind).masked_fill_(~sees, torch.finfo(kind).min)
        return positions, mask[:, None]

    @contextmanager
    def _only_positions(self, positions: Tensor) -> Iterator[None]:  # (batch, P)
        """Let the output layer see these positions only.

        bfloat16 logits near 20 are 0.125 apart: the layer's product is computed again in float32.
        """

        def select(module, args):
            index = positions[:, :, None].expand(-1, -1, args[0].shape[-1])
            return (args[0].gather(1, index), *args[1:])

        def precise(module, args, output):
            if type(module) is torch.nn.Linear and output.dtype != torch.float32:
                bias = None if module.bias is None else module.bias.float()
                return linear(args[0].float(), module.weight.float(), bias)

        head = self.model.get_output_embeddings()
        hooks = [head.register_forward_pre_hook(select), head.register_forward_hook(precise)]
        try:
            with sdpa_kernel(KERNELS):
                yield
        finally:
            for hook in hooks:
                hook.remove()


def _apart(job: Job) -> list[Job]:
    """A job a choice."""
    return [Job(job.index, job.tokens, (branch,)) for branch in dict.fromkeys(job.branches)]


def _near(found: Tensor, expected: Tensor, rounding: float) -> bool:
    """Whether two ways to compute the same logits differ by rounding only."""
    found, expected = (x.float() - x.float().mean(-1, keepdim=True) for x in (found, expected))
    return bool((found - expected).norm() <= rounding * expected.norm())


def _load(model: str, dtype: str, revision: str | None):
    """The whole model of a folder or a name on the hub, on a GPU where there is one.

    A checkpoint without weights for some parameters is refused: transformers draws them at random.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "float32" if dtype == "auto" and device == "cpu" else dtype
    dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    kind, what = transformers.AutoModelForCausalLM, "a causal language model"
    # Weights of another shape, which would raise without their name, are absent ones.
    options = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    made, found = load(kind, model, what, revision, torch_dtype=dtype, **options)
    absent = {*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}
    if absent := sorted(absent & {name for name, _ in made.named_parameters()}):
        lack = f"no weights for {len(absent)} of its parameters, such as {absent[0]}"
        raise InputError(f"{model}: {lack}, which would be random; save it with save_pretrained")
    return made.to(device)


def sees_all(config, length: int) -> bool:
    """Whether every layer sees all earlier tokens of prompts up to `length`, as in shorter ones."""
    config = text_config(config)
    kinds = set(getattr(config, "layer_types", None) or ())
    windows = (getattr(config, k, None) for k in ("sliding_window", "attention_chunk_size"))
    wide = all(window is None or window > length for window in windows)
    wide &= kinds <= {"full_attention", "sliding_attention"}
    return (wide or kinds == {"full_attention"}) and not stretches(config, length)


def stretches(config, length: int) -> bool:
    """Whether longrope turns every position otherwise in a batch of this length than in others."""
    return length > (getattr(text_config(config), "original_max_position_embeddings", 0) or np.inf)
