"""A small model's layers as CUDA graphs: launching their kernels takes longer than the kernels.

One graph each of forward and backward for every length of a packed row (`LENGTHS` of them, in
multiples of `MULTIPLE` tokens), replayed in one launch. Embedding and loss stay outside.

A replay leaves the layers' gradients in the graph's own memory, which `.grad` then is, and the next
replay overwrites: rows whose gradients are added up within an update are launched as ever.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

MULTIPLE = 512  # tokens: few lengths, and a twentieth of padding at most where a graph pays
LENGTHS = 12  # each holds the gradients of all layers; a row of yet another length is launched
WEIGHTS = 3e8  # of the layers together: with more of them the kernels take longer than launching

WARN = "set_warn_on_accumulate_grad_stream_mismatch"  # torch 2.11 and later


def worthwhile(model: nn.Module) -> bool:
    """Whether this model's layers are small enough, draw no random numbers in attention and are not
    computed again in the backward."""
    names = [name for name, _ in model.model.named_children()]
    if "layers" not in names or [x for x in names if x.startswith("embed")] != ["embed_tokens"]:
        return False
    weights = sum(p.numel() for p in model.model.layers.parameters())
    random = getattr(model.config, "attention_dropout", 0)
    return weights < WEIGHTS and not random and not model.is_gradient_checkpointing


class Graphs:
    """The training forward of a decoder whose attention is the packed one, on one GPU.

    `settle` returns once no other thread uses the GPU, which would end a capture. The first one
    must come before training: a step's loss holds nodes of another stream, and a capture fails.
    """

    def __init__(
        self,
        decoder: nn.Module,
        longest: int,
        say: Callable[[str], None],
        settle: Callable[[], object],
    ) -> None:
        self.decoder, self.longest, self.say, self.limit = decoder, longest, say, LENGTHS
        self.settle = settle
        self.made: dict[tuple, Callable] = {}
        self.pool = None  # of all graphs' memory: no two of them are ever under way together
        self.alone = True  # whether the next row is all of its update
        self.plain = decoder.forward
        decoder.forward = self.forward

    def remove(self) -> None:
        """Give the decoder its own forward back, and the memory."""
        del self.decoder.forward
        self.made.clear()
        torch.cuda.empty_cache()

    def forward(self, input_ids: Tensor, **batch: object) -> BaseModelOutputWithPast:
        """What the decoder returns, with its last hidden states alone."""
        if not (self.alone and self.decoder.training and torch.is_grad_enabled()):
            return self.plain(input_ids, **batch)
        # Empty conversations at the end, so that few numbers of them are met.
        bounds = batch["cu_seq_lens_q"]
        bounds = F.pad(bounds, (0, -len(bounds) % 64), value=input_ids.shape[1])
        inputs = self.decoder.embed_tokens(input_ids), batch["position_ids"], bounds
        key = input_ids.shape, bounds.shape
        if key not in self.made and len(self.made) < self.limit:
            self._capture(key, inputs)
        if key not in self.made:
            return self.plain(input_ids, **batch)
        return BaseModelOutputWithPast(last_hidden_state=self.made[key](*inputs))

    def _capture(self, key: tuple, inputs: tuple[Tensor, ...]) -> None:
        samples = tuple(x.detach().clone() for x in inputs)
        samples[0].requires_grad_()
        layers = _Layers(self.decoder, self.plain, self.longest).train()
        self.settle()
        torch.cuda.empty_cache()  # what is cached cannot be used in a graph's memory
        if torch.cuda.mem_get_info()[0] < torch.cuda.max_memory_allocated():
            self.limit = len(self.made)
            self.say(f"graphs: {self.limit} made, no more: too little free memory")
            return
        if warn := getattr(torch.autograd.graph, WARN, None):
            warn(False)  # graphs are captured on a stream of their own
        try:
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            kind = torch.get_autocast_dtype("cuda")
            here = torch.cuda.stream(torch.cuda.current_stream())  # put back where a capture fails
            with here, torch.autocast("cuda", kind, cache_enabled=False):
                self.made[key] = torch.cuda.make_graphed_callables(
                    layers, samples, num_warmup_iters=2, allow_unused_input=True, pool=self.pool
                )
        except Exception as error:  # whatever cannot be captured, or does not fit
            self.limit = len(self.made)
            reason = (str(error).strip().splitlines() or [""])[0][:300]
            self.say(f"graphs: {self.limit} made, no more: {type(error).__name__}: {reason}")


class _Layers(nn.Module):
    """From embeddings to hidden states, with the layers' own parameters."""

    def __init__(self, decoder: nn.Module, forward: Callable, longest: int) -> None:
        super().__init__()
        self.run, self.longest = forward, longest
        named = decoder.named_parameters()
        self.own = nn.ParameterList(p for name, p in named if not name.startswith("embed_tokens."))

    def forward(self, embeddings: Tensor, positions: Tensor, bounds: Tensor) -> Tensor:
        lengths = {f"cu_seq_lens_{x}": bounds for x in "qk"}
        lengths |= {f"max_length_{x}": self.longest for x in "qk"}
        given = {"inputs_embeds": embeddings, "position_ids": positions, "use_cache": False}
        return self.run(**given, **lengths).last_hidden_state
