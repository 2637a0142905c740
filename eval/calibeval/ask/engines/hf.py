"""Engine on Hugging Face transformers: what prompts share is computed once.

    keys and values ← model(prefix)                            once a group
    log P ← model(context and the choices' tokens as a tree)   once a question, in batches
    logits ← hidden states at the places asked for, in float32

`token_tree` lays a batch out; `hf_model` loads models and says what their attention allows.
"""

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear

from calibeval.ask.engines import Job, Tokens, Writing, Written, hf_writing, text_config
from calibeval.ask.engines.hf_model import (
    allows_trees,
    cache_bytes_per_token,
    load_model,
    stretches_positions,
)
from calibeval.ask.engines.hf_writing import Prefix
from calibeval.ask.engines.token_tree import PADDING, common_prefix, lay_out, separate_choices
from calibeval.ask.request import Precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# Without cuDNN's attention: it is compiled for every new shape, and no two batches are of one.
ATTENTION_KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class BatchLimits:
    """What a batch takes at most, where a GPU has 16 GB."""

    tokens: int = 2**14  # computed in a forward
    cache_bytes: int = 2**32  # for keys and values
    logits: int = 2**29  # numbers, some 3 GB in bfloat16 and float32

    def on(self, device: torch.device) -> "BatchLimits":
        """Return the limits for a device: as many times these as its memory is 16 GB."""
        if device.type != "cuda":
            return self
        times = torch.cuda.get_device_properties(device).total_memory / 2**34
        return BatchLimits(
            int(times * self.tokens), int(times * self.cache_bytes), int(times * self.logits)
        )


class Answer(NamedTuple):
    """What the model says to a job."""

    job: Job
    logits: Tensor  # (nodes, V), after the context and after each other node


class TransformersEngine:
    """Scores batches of questions behind their prefix, which is computed once.

    `model` is a folder, a name on the hub, or a loaded model, which stays on its device and in its
    precision. `batch_size` bounds the questions of a batch in addition to `BatchLimits`.
    """

    def __init__(
        self,
        model: "str | PreTrainedModel",
        *,
        dtype: Precision = "auto",
        batch_size: int | None = None,
        revision: str | None = None,
    ):
        if isinstance(model, str):
            model = load_model(model, dtype, revision)
        self.model = model
        self.training_modules = [module for module in self.model.modules() if module.training]
        # accelerate puts autocast around the forward for training, and keeps the one without it
        # here. Scores are computed in the weights' own precision, so without autocast.
        self.forward = getattr(self.model, "_original_forward", self.model)
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self.device = next(self.model.parameters()).device
        self.batch_size = batch_size
        self.limits = BatchLimits()
        self.vocabulary = text_config(self.model.config).vocab_size
        self.cache_bytes_per_token = cache_bytes_per_token(self.model)
        # What `_tree_is_read_right` has come to; None while that has not been tried.
        self.reads_trees: bool | None = None
        # This comes last: where something above raises, nobody calls `close`, and the model keeps
        # the mode that it came in.
        self.model.eval()

    def close(self) -> None:
        """Leave a loaded model as it was."""
        for module in self.training_modules:
            module.training = True

    def describe(self) -> dict[str, Any]:
        """Settings that the scores depend on."""
        device = str(self.device)
        if self.device.type == "cuda":
            device = torch.cuda.get_device_name(self.device)
        dtype = str(self.model.dtype).removeprefix("torch.")
        # `_output_layer_at` computes a plain linear layer, and no other, again in float32.
        head_is_precise = type(self.model.get_output_embeddings()) is torch.nn.Linear
        return {
            "engine": "transformers",
            "device": device,
            "dtype": dtype,
            "head_dtype": "float32" if head_is_precise else dtype,
            "attention": self.model.config._attn_implementation,
            "batch_size": self.batch_size,
        }

    def score(
        self, groups: list[list[Job]], skip: Container[int] = ()
    ) -> Iterator[tuple[int, list[float]]]:
        """Yield (job index, log-probability of each branch) for every job of the batches computed.

        Batches of nothing but jobs to `skip` are left out; the others are what they would be
        without, so that an interrupted run comes to the same bytes if it goes on with the same
        batch size on a device of the same kind.
        """
        branches_of_job = {job.index: job.branches for group in groups for job in group}
        longest = max((job.length for group in groups for job in group), default=0)
        groups_to_read = [self._whole_or_by_choice(group, longest) for group in groups]
        scores: dict[int, dict[Tokens, float]] = {index: {} for index in branches_of_job}
        for jobs, logprobs in self._logprobs_in_turn(self.batches(groups_to_read, skip)):
            lengths = [len(branch) for job in jobs for branch in job.branches]
            logprobs_of_branch = iter(logprobs.cpu().split(lengths))
            for job in jobs:
                scores_of_job = scores[job.index]
                for branch in job.branches:
                    scores_of_job[branch] = next(logprobs_of_branch).sum().item()
                # A job that was split into its choices (`_whole_or_by_choice`) may come in several
                # batches: it is whole when all of them have come.
                branches = branches_of_job[job.index]
                if len(scores_of_job) == len(set(branches)):
                    yield job.index, [scores_of_job[branch] for branch in branches]

    @torch.inference_mode()
    def write(
        self, contexts: Sequence[Tokens], how: Writing, tokenizer: "PreTrainedTokenizerBase"
    ) -> list[list[Written]]:
        """Return `how.count` answers to each context, in batches of their order."""
        prefix = self._read_prefix([Job(0, context, ((PADDING,),)) for context in contexts])
        longest = max(len(context) for context in contexts)
        limits = self.limits.on(self.device)
        rows = min(
            limits.tokens // (longest - prefix.length),
            limits.cache_bytes // ((longest + how.max_tokens) * self.cache_bytes_per_token),
            limits.logits // self.vocabulary,
        )
        if self.batch_size is not None:
            rows = min(rows, self.batch_size * how.count)
        head = self.model.get_output_embeddings()
        hook = head.register_forward_hook(compute_in_float32)
        try:
            return hf_writing.write(self.model, contexts, how, tokenizer, max(rows, 1), prefix)
        finally:
            hook.remove()

    @torch.inference_mode()
    def batches(self, groups: list[list[Job]], skip: Container[int] = ()) -> Iterator[list[Answer]]:
        """Yield batches of answers; those of nothing but jobs to `skip` are left out."""
        jobs = [job for group in groups for job in group]
        longest = max((job.length for job in jobs), default=0)
        if stretches_positions(self.model.config, longest):
            groups = [[job] for job in jobs]
        for group in groups:
            if all(job.index in skip for job in group):
                continue
            prefix = self._read_prefix(group)
            # Questions of one length beside each other need the least padding.
            ordered = sorted(group, key=lambda job: len(job.context) + len(job.nodes))
            for batch in self._split(ordered, prefix):
                if not all(job.index in skip for job in batch):
                    yield self._answer(batch, prefix)

    def _logprobs_in_turn(
        self, batches: Iterator[list[Answer]]
    ) -> Iterator[tuple[list[Job], Tensor]]:
        """Yield each batch's jobs and its tokens' log-probabilities, on the GPU.

        A batch is yielded when the next one is already queued there: reading its numbers makes the
        CPU wait for it, and the GPU shall not be idle afterwards.
        """
        previous = None
        for batch in batches:
            current = ([answer.job for answer in batch], self._token_logprobs(batch))
            del batch  # its logits need not be kept
            if previous is not None:
                yield previous
            previous = current
        if previous is not None:
            yield previous

    def _token_logprobs(self, batch: list[Answer]) -> Tensor:
        """The log-probability of each token of each branch of each job, one after the other."""
        asked: list[tuple[int, int]] = []  # (the node's place in the job's logits, token)
        counts = []  # of each job's tokens
        for job, _ in batch:
            place_of_node = {node: place for place, node in enumerate(job.nodes)}
            for branch in job.branches:
                for length, token in enumerate(branch):
                    asked.append((place_of_node[branch[:length]], token))
            counts.append(sum(len(branch) for branch in job.branches))
        asked_of_job = self._to_device(torch.tensor(asked).T).split(counts, dim=1)
        logprobs = []
        for answer, asked_nodes_and_tokens in zip(batch, asked_of_job, strict=True):
            nodes, tokens = asked_nodes_and_tokens
            # In double, logits that differ never round to equal log-probabilities.
            normalizers = answer.logits.double().logsumexp(dim=-1)
            logprobs.append(answer.logits[nodes, tokens].double() - normalizers[nodes])
        return torch.cat(logprobs)

    def _whole_or_by_choice(self, group: list[Job], longest: int) -> list[Job]:
        """The group's jobs, each split into its choices where the model cannot read trees.

        In a group without trees, as of letters of one token, no job is split. In another all are,
        those that are no trees too: that costs time alone.
        """
        trees = [job for job in group if not job.is_chain]
        if not trees:
            return group
        if allows_trees(self.model.config, longest) and self._tree_is_read_right(trees[0]):
            return group
        return [choice for job in group for choice in separate_choices(job)]

    @torch.inference_mode()
    def _tree_is_read_right(self, job: Job) -> bool:
        """Whether the model reads a tree of tokens as it reads each branch alone.

        The first question whose choices make a tree is asked both ways: many models ignore a
        mask that they are given beside the tokens, or refuse it.
        """
        if self.reads_trees is None:
            expected: dict[Tokens, Tensor] = {}
            for choice, logits in self._answer(separate_choices(job), Prefix()):
                expected.update(zip(choice.nodes, logits, strict=True))
            try:
                (answer,) = self._answer([job], Prefix())
                self.reads_trees = _agree_up_to_rounding(
                    answer.logits,
                    torch.stack([expected[node] for node in job.nodes]),
                    self.model.dtype,
                )
            except Exception:  # whatever a model that takes no such mask raises
                self.reads_trees = False
        return self.reads_trees

    def _split(self, jobs: list[Job], prefix: Prefix) -> Iterator[list[Job]]:
        """`jobs`, the shorter first, in batches within what there is room for."""
        batch: list[Job] = []
        most_nodes = 0
        for job in jobs:
            most_nodes = max(most_nodes, len(job.nodes))
            width = len(job.context) - prefix.length + len(job.nodes) - 1
            if batch and not self._has_room(len(batch) + 1, width, most_nodes, prefix):
                yield batch
                batch = []
                most_nodes = len(job.nodes)
            batch.append(job)
        yield batch

    def _has_room(self, questions: int, width: int, most_nodes: int, prefix: Prefix) -> bool:
        """Whether a batch of so many rows, tokens a row and nodes a row stays within the limits."""
        if self.batch_size is not None and questions > self.batch_size:
            return False
        cache_bytes = questions * (prefix.length + width) * self.cache_bytes_per_token
        logits = questions * most_nodes * self.vocabulary
        return (
            questions * width <= self.limits.tokens
            and cache_bytes <= self.limits.cache_bytes
            and logits <= self.limits.logits
        )

    def _read_prefix(self, group: list[Job]) -> Prefix:
        """The keys and values of what all of a group's contexts begin with."""
        if len(group) == 1:
            return Prefix()
        # A context's last token stays out of the prefix: every job asks for the logits after it.
        shortest = min(len(job.context) for job in group)
        length = min(common_prefix([job.context for job in group]), shortest - 1)
        if not length:
            return Prefix()
        tokens = torch.tensor([group[0].context[:length]], device=self.device)
        # Only the cache is wanted. The output layer must be given some place, and is given one, so
        # that it does not make logits of the whole prefix.
        with self._output_layer_at(torch.tensor([[0]], device=self.device)):
            cache = self.forward(input_ids=tokens, use_cache=True).get("past_key_values")
        layers = getattr(cache, "layers", [cache])
        if not all(hasattr(layer, "batch_repeat_interleave") for layer in layers):
            return Prefix()  # recurrent states, which cannot be copied along the batch
        return Prefix(length, cache)

    def _answer(self, jobs: list[Job], prefix: Prefix) -> list[Answer]:
        """One forward over a batch of jobs behind their prefix."""
        layout = lay_out(jobs, prefix.length)
        tokens = self._to_device(layout.tokens)
        mask = None
        if layout.visible is not None:
            mask = self._additive_mask(layout.visible, prefix)
        cache = prefix.of_rows(len(jobs))
        with self._output_layer_at(self._to_device(layout.places)):
            output = self.forward(
                tokens,
                position_ids=self._to_device(layout.positions),
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            )
        return [Answer(job, output.logits[row, : len(job.nodes)]) for row, job in enumerate(jobs)]

    def _additive_mask(self, visible: Tensor, prefix: Prefix) -> Tensor:
        """(B, 1, W, prefix and W): 0 where a token is seen, else the least number there is."""
        visible = self._to_device(visible)
        batch_size, width, _ = visible.shape
        visible = torch.cat([visible.new_ones(batch_size, width, prefix.length), visible], dim=2)
        dtype = self.model.dtype
        mask = torch.zeros_like(visible, dtype=dtype)
        mask.masked_fill_(~visible, torch.finfo(dtype).min)
        return mask[:, None]

    def _to_device(self, tensor: Tensor) -> Tensor:
        """On the model's device; a GPU is not waited for."""
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    @contextmanager
    def _output_layer_at(self, places: Tensor) -> Iterator[None]:
        """Let the output layer see these places of each row only, (B, P), and in float32.

        bfloat16 logits near 20 are 0.125 apart, so the layer's product is computed again in
        float32. PyTorch gives a forward hook the inputs that the pre-hook returned, so this too is
        of the places alone.
        """

        def select(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, *others = args
            index = places[:, :, None].expand(-1, -1, hidden.shape[-1])
            return (hidden.gather(1, index), *others)

        head = self.model.get_output_embeddings()
        hooks = [
            head.register_forward_pre_hook(select),
            head.register_forward_hook(compute_in_float32),
        ]
        try:
            with sdpa_kernel(ATTENTION_KERNELS):
                yield
        finally:
            for hook in hooks:
                hook.remove()


def compute_in_float32(
    module: torch.nn.Module, args: tuple[Any, ...], output: Tensor
) -> Tensor | None:
    """Compute a linear output layer again in float32, as a hook; None keeps the output."""
    if type(module) is not torch.nn.Linear or output.dtype == torch.float32:
        return None
    bias = None if module.bias is None else module.bias.float()
    return linear(args[0].float(), module.weight.float(), bias)


def _agree_up_to_rounding(logits: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two ways to compute the same logits differ by no more than rounding explains.

    `dtype` is what the model's layers compute in. A constant that all logits have in common changes
    no probability, so it is taken off.
    """
    tolerance = torch.finfo(dtype).eps ** 0.5
    logits = logits.float() - logits.float().mean(-1, keepdim=True)
    expected = expected.float() - expected.float().mean(-1, keepdim=True)
    return bool((logits - expected).norm() <= tolerance * expected.norm())
