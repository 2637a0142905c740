"""How a model is run to be verified: on sixteen tokens, and watched at its decoder and its head."""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smoothce.hf_patch.anatomy import (
    CausalModel,
    config_of,
    decoder_of,
    forward_slot,
    tensors_outside,
)
from smoothce.hf_patch.fused_forward import FusedForward
from smoothce.hf_patch.head_forward import HeadForward
from smoothce.hf_patch.logit_map import LogitMap, WatchedAttribute, ramp_like
from smoothce.hf_patch.outputs import OutputClass
from smoothce.hf_patch.settings import UPSTREAMS_IGNORE_INDEX, LossSettings

ROWS, TOKENS = 2, 8
# Parameters on the CPU. One thread reads so many in half a second; more of them get more threads.
MOST_ON_ONE_THREAD = 2**28


@dataclass
class UpstreamRun:
    """What one run of upstream's forward showed."""

    hidden: list[Tensor] = dataclasses.field(default_factory=list)  # of the decoder's calls
    head_inputs: list[Tensor] = dataclasses.field(default_factory=list)
    head_dtype: torch.dtype | None = None  # of the head's output
    ramp: Tensor | None = None  # what was put in the place of the head's output
    outputs: Any = None
    logits: Any = None  # a tensor, where the forward returns one
    loss: Any = None
    # Trained parameters outside decoder and head that have a part in the loss of a run with a ramp.
    trained_outside: list[str] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def undisturbed(causal: CausalModel) -> Iterator[None]:
    """Run the model in evaluation mode, without gradients, and uncompiled.

    Afterwards the random states and every module's mode are what they were."""
    modes = {module: module.training for module in causal.modules()}
    devices = {parameter.device for parameter in causal.parameters()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([]))  # the CPU's state
        for device_type in sorted({device.type for device in devices} - {"cpu"}):
            devices_of_type = [device for device in devices if device.type == device_type]
            stack.enter_context(torch.random.fork_rng(devices_of_type, device_type=device_type))
        if hasattr(torch.compiler, "set_stance"):  # since torch 2.6
            with contextlib.suppress(RuntimeError):  # in a compiled model's own forward
                stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.no_grad())
        try:
            for module in modes:
                module.training = False
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


@contextlib.contextmanager
def enough_threads(causal: CausalModel) -> Iterator[None]:
    """For a large model on the CPU: as many threads as this rank has processors.

    A model that FSDP is to shard is still on the CPU when it is patched, and torchrun gives each
    rank one thread, on which one run of 8 billion parameters took eight seconds."""
    threads = torch.get_num_threads()
    on_cpu = sum(p.numel() for p in causal.parameters() if p.device.type == "cpu")
    if on_cpu <= MOST_ON_ONE_THREAD:
        yield
        return
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    processors = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux: those that this process may use
        processors = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(threads, processors // ranks_here))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def outside_decoder_in_training(causal: CausalModel) -> Iterator[None]:
    """Within `undisturbed`, put everything but the decoder into training mode.

    The decoder stays in evaluation mode, since its dropout is the same in a patched model. Buffers
    outside it are restored, which a module may count in. The modes go back to evaluation, which is
    what `undisturbed` has made of them."""
    inside = set(decoder_of(causal).modules())
    outside = [module for module in causal.modules() if module not in inside]
    buffers = [buffer for module in outside for buffer in module.buffers(recurse=False)]
    values = [buffer.clone() for buffer in buffers]
    try:
        for module in outside:
            module.training = True
        yield
    finally:
        for module in outside:
            module.training = False
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)


def probe_inputs(fused: FusedForward, *, with_auxiliary_loss: bool) -> dict[str, Any]:
    """A batch of two rows, with unequal numbers of labels, as arguments of upstream's forward."""
    head = fused.head
    embeddings = _input_embeddings(fused.causal)
    entries = min(head.out_features, getattr(embeddings, "num_embeddings", head.out_features))
    # Not `head.weight`: under ZeRO-3, reading it outside the head's forward would gather it for the
    # whole step.
    first_parameter = next(itertools.chain(embeddings.parameters(), head.parameters()))
    device = first_parameter.device
    generator = torch.Generator().manual_seed(0)
    first = min(3, entries - 1)  # The lowest ids often stand for padding and the like.
    ids = torch.randint(first, entries, (ROWS, TOKENS), generator=generator).to(device)
    labels = ids.clone()
    labels[0, :5] = UPSTREAMS_IGNORE_INDEX
    labels[1, -2:] = UPSTREAMS_IGNORE_INDEX
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    inputs: dict[str, Any] = {"input_ids": ids, "labels": labels}
    for name, value in (("attention_mask", mask), ("use_cache", False), ("return_dict", True)):
        if fused.takes(name):
            inputs[name] = value
    if with_auxiliary_loss and fused.takes("output_router_logits"):
        inputs["output_router_logits"] = True
    return inputs


def _input_embeddings(causal: CausalModel) -> nn.Module:
    """What tokens go into first; of a model that does not say it, the model as a whole."""
    get_input_embeddings = getattr(causal, "get_input_embeddings", None)
    embeddings = None
    if get_input_embeddings is not None:
        # transformers raises this for models of which it cannot tell.
        with contextlib.suppress(NotImplementedError):
            embeddings = get_input_embeddings()
    return causal if embeddings is None else embeddings


@contextlib.contextmanager
def plain_attention(causal: CausalModel) -> Iterator[None]:
    """Plain attention: another may want what these runs lack, such as a GPU or the bounds of packed
    rows, and is not what is verified."""
    chosen = []
    for config in _configurations(config_of(causal)):
        chosen.append((config, getattr(config, "_attn_implementation", None)))
    try:
        for config, _ in chosen:
            config._attn_implementation = "eager"
        yield
    finally:
        # The outer one goes first, since setting it sets those inside it as well.
        for config, implementation in chosen:
            config._attn_implementation = implementation


def _configurations(config: Any) -> list[Any]:
    """A configuration and those inside it (of text, of vision), the outer before the inner."""
    if config is None:
        return []
    configurations = [config]
    for inner in vars(config).values():
        if hasattr(inner, "_attn_implementation"):
            configurations.extend(_configurations(inner))
    return configurations


def run_upstream(
    fused: FusedForward,
    inputs: dict[str, Any],
    *,
    with_ramp: bool,
    when_head_has_run: Callable[[], None] | None = None,
) -> UpstreamRun:
    """Run upstream's forward, `with_ramp` with a ramp in the place of its head's output.

    With a ramp it also tells which trained parameters outside decoder and head get a gradient:
    `UpstreamRun.trained_outside`.
    `when_head_has_run` is called between the head and what the forward does to its output."""
    causal = fused.causal
    head = fused.head
    run = UpstreamRun()

    def keep_hidden(decoder: nn.Module, args: Any, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        run.hidden.append(output[0] if hidden is None else hidden)

    def keep_head_input(head: nn.Module, args: tuple[Any, ...]) -> None:
        run.head_inputs.append(args[0])

    def keep_dtype_and_put_ramp(head: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        run.head_dtype = output.dtype
        if when_head_has_run is not None:
            when_head_has_run()
        if not with_ramp:
            return None
        run.ramp = ramp_like(output)
        return run.ramp.clone()  # A forward may change it in place.

    handles = [
        decoder_of(causal).register_forward_hook(keep_hidden),
        head.register_forward_pre_hook(keep_head_input),
        head.register_forward_hook(keep_dtype_and_put_ramp, prepend=True),
    ]
    trained = {}
    if with_ramp:
        for outside in tensors_outside(causal, head):
            if outside.tensor().requires_grad:
                trained[outside.name] = outside.tensor()
    try:
        with torch.set_grad_enabled(bool(trained)):
            run.outputs = type(causal).forward(causal, **inputs)
    finally:
        for handle in handles:
            handle.remove()
    run.logits = getattr(run.outputs, "logits", None)
    run.loss = getattr(run.outputs, "loss", None)
    if trained and run.loss is not None and run.loss.requires_grad:
        gradients = torch.autograd.grad(run.loss, list(trained.values()), allow_unused=True)
        for name, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                run.trained_outside.append(name)
    return run


def acts_on_logits(
    fused: FusedForward, inputs: dict[str, Any], attribute: WatchedAttribute, logits: Tensor
) -> bool:
    """Whether a ramped run has other logits than these where the attribute holds another number.

    The attribute gets the other number once the head has run, so that decoder and head run with its
    own, and has its own again after the run."""
    attributes = vars(attribute.holder)

    def change_number() -> None:
        attributes[attribute.name] = attribute.value + 1

    try:
        run = run_upstream(fused, inputs, with_ramp=True, when_head_has_run=change_number)
    except Exception:
        return True  # A forward that fails for another number, after the head, has read it there.
    finally:
        attributes[attribute.name] = attribute.value
    return not torch.equal(run.logits, logits)


def run_patched(
    fused: FusedForward, logit_map: LogitMap, inputs: dict[str, Any], output_class: OutputClass
) -> Any:
    """The patched model's outputs, its settings but for the map put aside.

    On the chunked path, since the Triton kernels would have to be compiled for this."""
    head_forward = HeadForward(fused.head, LossSettings(impl="chunked"), logit_map)
    with _head_running(fused.head, head_forward):
        return fused(inputs, output_class, as_in_training=False)


@contextlib.contextmanager
def _head_running(head: nn.Linear, forward: HeadForward) -> Iterator[None]:
    names = (forward_slot(head), HeadForward.ATTRIBUTE)
    before = {name: vars(head)[name] for name in names if name in vars(head)}
    try:
        for name in names:
            setattr(head, name, forward)
        yield
    finally:
        for name in names:
            delattr(head, name)
            if name in before:
                setattr(head, name, before[name])
