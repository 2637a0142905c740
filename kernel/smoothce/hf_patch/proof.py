"""Whether a model's loss is one that the fused loss can compute: tried, not looked up.

The model runs four times on sixteen tokens, in evaluation mode:

- *ramped*, with its head's output replaced by a ramp from −200 to 200;
- *training*, ramped likewise, with all but its decoder in training mode;
- *plain*, unchanged;
- *patched*, with the loss computed by its head and without smoothing.

Then the following must hold, in this order:

1. the plain run's decoder gives, bit for bit, what its head takes;
2. the ramped run returns a loss, and logits of the ramp's shape;
3. no trained parameter outside the decoder and the head has a part in its loss (this run alone
   has gradients, where there are such parameters);
4. its logits are cap(scale · ramp), for a scale and a cap that the configuration may mean;
5. its loss is the mean cross-entropy of the next tokens, beside a mixture's auxiliary loss as the
   patched run has it;
6. the patched run's loss is the plain run's;
7. the training run's logits and loss are the ramped run's, and its head takes what its decoder
   gives: nothing between decoder and loss acts in training alone, such as dropout.

A mixture's auxiliary loss is tried where `output_router_logits` is on. Where it is turned on later,
the model has to be patched again.

A model that cannot run is tried once more with plain attention. Gradients are not compared: they
follow from the loss, which is the same function of the same hidden states.

Logits that agree prove too little. Without the ramp small logits hide a cap, and a model may
compute another loss from the right logits (an unshifted one, a loss of further heads beside it).
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoothce.hf_patch.anatomy import (
    CausalModel,
    config_of,
    decoder_of,
    forward_slot,
    partitioned_by,
)
from smoothce.hf_patch.head_forward import HeadForward
from smoothce.hf_patch.logit_map import (
    LogitMap,
    WatchedAttribute,
    candidates,
    fitted,
    ramp_like,
    scales_and_caps,
    watched_attributes,
)
from smoothce.hf_patch.outputs import weighted_auxiliary_loss
from smoothce.hf_patch.settings import LossSettings
from smoothce.options import Options

ROWS, TOKENS = 2, 8
IGNORED = -100  # upstream's, whatever the patched loss ignores
TOLERANCE = 1e-5  # of what is computed from the ramp, which is fp32


class PatchableModel(Protocol):
    """What is tried of a model. `forwards.ModelForward` is the one there is: it imports this file,
    so that this file cannot import it."""

    causal: CausalModel
    head_name: str

    def takes(self, name: str) -> bool:
        """Whether upstream's forward has such an argument."""

    def fused(self, inputs: dict[str, Any], *, smoothed: bool) -> Any:
        """The outputs of a forward whose head computes the loss."""


class CannotRun(Exception):
    """The model cannot be tried now; the message says why."""


@dataclass(frozen=True, eq=False)
class Proof:
    """That a model's loss is the fused one, with this map, as long as these stay as they are."""

    logit_map: LogitMap
    # One that the model did not have is kept with the value None, so that it shows if it comes.
    watched: tuple[WatchedAttribute, ...]
    frozen_behind_head: dict[str, nn.Parameter]  # outside the decoder and the head

    def check_still_true(self) -> None:
        """Raises ValueError where a scale, a cap or the loss function is another one, or a
        parameter is trained that was not."""
        for attribute in self.watched:
            value_now = attribute.value_now()
            if value_now is not attribute.value and value_now != attribute.value:
                raise ValueError(
                    f"{attribute.name} was {attribute.value} when patch_model tried the model and "
                    f"is {value_now} now: call patch_model again"
                )
        for name, parameter in self.frozen_behind_head.items():
            if parameter.requires_grad:
                raise ValueError(
                    f"{name} is trained now and was not when patch_model tried the model: call "
                    "patch_model again, which tells whether it would get its gradient"
                )


@dataclass
class _Run:
    """What one run of upstream's forward showed."""

    hidden: list[Tensor] = dataclasses.field(default_factory=list)  # of the decoder's calls
    head_inputs: list[Tensor] = dataclasses.field(default_factory=list)
    head_dtype: torch.dtype | None = None  # of its output
    ramp: Tensor | None = None
    logits: Any = None  # a tensor, where the forward returns one
    loss: Any = None
    used_behind_head: list[str] = dataclasses.field(default_factory=list)  # parameters


def prove(
    model_forward: PatchableModel, settings: LossSettings, *, in_forward: bool = False
) -> Proof:
    """That the model, patched with these, computes upstream's loss where it does not smooth.

    `in_forward`: called in the model's own forward, where ZeRO-3 and FSDP2 gather what a module
    needs.
    Restores random states, modes and hooks, and leaves no gradients. Raises ValueError where the
    losses differ, and CannotRun where the model cannot run as it is."""
    causal = model_forward.causal
    head = getattr(causal, model_forward.head_name)
    if any(parameter.is_meta for parameter in causal.parameters()):
        raise CannotRun("its parameters are on the meta device")
    library = partitioned_by(causal)
    if library is not None and not in_forward:
        raise CannotRun(f"{library} holds a part of each parameter on each rank")
    with _undisturbed(causal):
        try:
            logit_map = _tried(model_forward, head, settings)
        except CannotRun:
            with _plain_attention(causal):
                logit_map = _tried(model_forward, head, settings)
        # With what the caller gave for a number of another name, which may change there.
        watched = watched_attributes(causal, logit_map)
    frozen = {}
    for name, parameter in _behind_head(causal, head).items():
        if not parameter.requires_grad:
            frozen[name] = parameter
    return Proof(logit_map, watched, frozen)


def _tried(model_forward: PatchableModel, head: nn.Linear, settings: LossSettings) -> LogitMap:
    """The three runs, and what must hold of them."""
    inputs = _inputs(model_forward, head)
    try:
        ramped = _run_upstream(model_forward, head, inputs, with_ramp=True)
        with _outside_decoder_in_training(model_forward.causal):
            training = _run_upstream(model_forward, head, inputs, with_ramp=True)
        plain = _run_upstream(model_forward, head, inputs, with_ramp=False)
    except Exception as error:
        raise CannotRun(
            f"its forward on {ROWS} × {TOKENS} tokens raises {_described(error)}"
        ) from error
    _check_hidden(model_forward, plain)
    _check_returns(model_forward, ramped)
    _check_behind_head(model_forward, ramped)
    logit_map = _find_logit_map(model_forward, settings, ramped)
    patched = _run_patched(model_forward, head, logit_map, inputs)
    _check_loss_of_logits(model_forward, ramped, patched, inputs["labels"])
    _check_patched_loss(model_forward, plain, patched)
    _check_training(model_forward, ramped, training)
    return logit_map


def _described(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


@contextlib.contextmanager
def _undisturbed(causal: CausalModel) -> Iterator[None]:
    """Evaluation mode without gradients, compiled layers or traces in random states."""
    modes = {module: module.training for module in causal.modules()}
    devices = {parameter.device for parameter in causal.parameters()} - {torch.device("cpu")}
    types = {device.type for device in devices}
    with contextlib.ExitStack() as stack:
        if len(types) == 1:
            stack.enter_context(torch.random.fork_rng(list(devices), device_type=types.pop()))
        else:
            stack.enter_context(torch.random.fork_rng([]))
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
def _outside_decoder_in_training(causal: CausalModel) -> Iterator[None]:
    """All but the decoder in training mode, as `_undisturbed` does not leave it.

    The decoder stays in evaluation mode, since its dropout is the same in a patched model. Buffers
    outside it are restored, which a module may count in."""
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


def _inputs(model_forward: PatchableModel, head: nn.Linear) -> dict[str, Any]:
    """A batch of two rows, with unequal numbers of labels."""
    embeddings = _input_embeddings(model_forward.causal)
    entries = min(head.out_features, getattr(embeddings, "num_embeddings", head.out_features))
    # Not `head.weight`: under ZeRO-3, reading it outside the head's forward would gather it for the
    # whole step.
    first_parameter = next(itertools.chain(embeddings.parameters(), head.parameters()))
    device = first_parameter.device
    generator = torch.Generator().manual_seed(0)
    first = min(3, entries - 1)  # the lowest are often padding and the like
    ids = torch.randint(first, entries, (ROWS, TOKENS), generator=generator).to(device)
    labels = ids.clone()
    labels[0, :5] = IGNORED
    labels[1, -2:] = IGNORED
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    inputs: dict[str, Any] = {"input_ids": ids, "labels": labels}
    for name, value in (("attention_mask", mask), ("use_cache", False), ("return_dict", True)):
        if model_forward.takes(name):
            inputs[name] = value
    return inputs


def _input_embeddings(causal: CausalModel) -> nn.Module:
    """What tokens go into first; of a model that does not say it, the model as a whole."""
    find = getattr(causal, "get_input_embeddings", None)
    embeddings = None
    if find is not None:
        # transformers raises this for models of which it cannot tell.
        with contextlib.suppress(NotImplementedError):
            embeddings = find()
    return causal if embeddings is None else embeddings


@contextlib.contextmanager
def _plain_attention(causal: CausalModel) -> Iterator[None]:
    """Attention that wants what a probe lacks (a GPU, the bounds of packed rows) is not what is
    tried here."""
    chosen = []
    for config in _configurations(config_of(causal)):
        chosen.append((config, getattr(config, "_attn_implementation", None)))
    try:
        for config, _ in chosen:
            config._attn_implementation = "eager"
        yield
    finally:
        # The outer before the inner: to set one sets those inside it as well.
        for config, implementation in chosen:
            config._attn_implementation = implementation


def _configurations(config: Any) -> list[Any]:
    """A configuration and those inside it (of text, of vision), the outer before the inner."""
    if config is None:
        return []
    found = [config]
    for inner in vars(config).values():
        if hasattr(inner, "_attn_implementation"):
            found.extend(_configurations(inner))
    return found


def _run_upstream(
    model_forward: PatchableModel, head: nn.Linear, inputs: dict[str, Any], *, with_ramp: bool
) -> _Run:
    causal = model_forward.causal
    run = _Run()

    def keep_hidden(decoder: nn.Module, args: Any, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        run.hidden.append(output[0] if hidden is None else hidden)

    def keep_head_input(head: nn.Module, args: tuple[Any, ...]) -> None:
        run.head_inputs.append(args[0])

    def keep_dtype_and_put_ramp(head: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        run.head_dtype = output.dtype
        if not with_ramp:
            return None
        run.ramp = ramp_like(output)
        return run.ramp.clone()  # which a forward may change in place

    handles = [
        decoder_of(causal).register_forward_hook(keep_hidden),
        head.register_forward_pre_hook(keep_head_input),
        head.register_forward_hook(keep_dtype_and_put_ramp, prepend=True),
    ]
    behind = {}
    if with_ramp:
        for name, parameter in _behind_head(causal, head).items():
            if parameter.requires_grad:
                behind[name] = parameter
    try:
        with torch.set_grad_enabled(bool(behind)):
            outputs = type(causal).forward(causal, **inputs)
    finally:
        for handle in handles:
            handle.remove()
    run.logits = getattr(outputs, "logits", None)
    run.loss = getattr(outputs, "loss", None)
    if behind and run.loss is not None and run.loss.requires_grad:
        gradients = torch.autograd.grad(run.loss, list(behind.values()), allow_unused=True)
        for name, gradient in zip(behind, gradients, strict=True):
            if gradient is not None:
                run.used_behind_head.append(name)
    return run


def _behind_head(causal: CausalModel, head: nn.Linear) -> dict[str, nn.Parameter]:
    """Parameters that are neither the decoder's nor the head's."""
    inside = {*decoder_of(causal).parameters(), *head.parameters()}
    return {
        name: parameter for name, parameter in causal.named_parameters() if parameter not in inside
    }


def _run_patched(
    model_forward: PatchableModel,
    head: nn.Linear,
    logit_map: LogitMap,
    inputs: dict[str, Any],
) -> Any:
    """The patched model's outputs, its settings but for the map put aside.

    On the chunked path, since the Triton kernels would have to be compiled for this."""
    options = Options(logit_scale=logit_map.logit_scale, softcap=logit_map.softcap)
    with _head_running(head, HeadForward(head, LossSettings(options, impl="chunked"))):
        try:
            # These settings have no smoothing, so that `smoothed` leaves nothing in.
            return model_forward.fused(inputs, smoothed=False)
        except Exception as error:
            raise _refusal(
                model_forward,
                f"its decoder and head do not run apart from its forward ({_described(error)})",
                None,
                "train it with its own loss",
            ) from error


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


def _check_returns(model_forward: PatchableModel, run: _Run) -> None:
    """The forward returns a loss, and logits as many as its head made."""
    name = model_forward.head_name
    if run.ramp is None or run.logits is None or run.loss is None:
        raise _refusal(
            model_forward,
            f"its forward does not return a loss and logits of {name}'s output",
            None,
            "train it with its own loss",
        )
    if run.logits.shape != run.ramp.shape or run.logits.dim() != 3:
        raise _refusal(
            model_forward,
            f"its logits are {tuple(run.logits.shape)} where {name} gives {tuple(run.ramp.shape)}",
            None,
            "train it with its own loss",
        )


def _check_behind_head(model_forward: PatchableModel, run: _Run) -> None:
    """No parameter is trained whose gradient a patched model would not make."""
    if run.used_behind_head:
        raise _refusal(
            model_forward,
            f"{', '.join(run.used_behind_head)}, which would get no gradient, changes its logits "
            "or its loss",
            None,
            "train it with its own loss, or without a gradient of this",
        )


def _find_logit_map(model_forward: PatchableModel, settings: LossSettings, run: _Run) -> LogitMap:
    """The map that the model applies to the ramp, of those that its configuration may mean.

    Raises ValueError where it is none of them, with the one that it seems to be."""
    assert run.ramp is not None  # _check_returns has seen it
    given = LogitMap(settings.options.logit_scale, settings.options.softcap)
    numbers = scales_and_caps(model_forward.causal)
    maps = candidates(numbers, given, settings.given_logit_map)
    precision = max(TOLERANCE, 4 * torch.finfo(run.logits.dtype).eps)
    differences = {}
    largest = {}
    for logit_map in maps:
        expected = logit_map(run.ramp)
        difference = (run.logits.double() - expected).abs().max().item()
        differences[logit_map] = difference
        largest[logit_map] = expected.abs().max().item()
    # The nearest, since the rounding of 16-bit logits would hide a scale of 1.02; of those that
    # are equally near it is the plainest.
    nearest = min(differences, key=lambda logit_map: differences[logit_map])
    if differences[nearest] <= precision * largest[nearest]:
        return nearest
    fit = fitted(run.ramp, run.logits)
    expected = fit(run.ramp)
    if (run.logits.double() - expected).abs().max() <= 10 * precision * expected.abs().max():
        advice = f"pass {fit}, which describe it, where they are constants of the model"
    else:
        advice = "no scale and cap describe it: train it with its own loss"
    raise _refusal(
        model_forward,
        f"{nearest} do not turn {model_forward.head_name}'s output into its logits",
        differences[nearest],
        advice,
    )


def _check_hidden(model_forward: PatchableModel, run: _Run, when: str = "") -> None:
    """The decoder's result is what the head takes, bit for bit.

    `when`, which a refusal says, is the mode if that matters."""
    name = model_forward.head_name
    if len(run.hidden) != 1 or len(run.head_inputs) != 1:
        raise _refusal(
            model_forward,
            f"{when}its forward calls the decoder {len(run.hidden)} times and {name} "
            f"{len(run.head_inputs)} times, not once each",
            None,
            "train it with its own loss",
        )
    hidden = run.hidden[0]
    head_input = run.head_inputs[0]
    if not head_input.isfinite().all():
        raise CannotRun("its hidden states are not finite")
    if hidden.shape != head_input.shape or not torch.equal(hidden, head_input):
        difference = None
        if hidden.shape == head_input.shape:
            difference = (hidden.double() - head_input.double()).abs().max().item()
        raise _refusal(
            model_forward,
            f"{when}its decoder's last_hidden_state is not {name}'s input",
            difference,
            "train it with its own loss",
        )


def _check_loss_of_logits(
    model_forward: PatchableModel, run: _Run, patched: Any, labels: Tensor
) -> None:
    """The model's loss is cross-entropy of the next tokens, and an auxiliary loss that is ours."""
    expected = F.cross_entropy(
        run.logits[:, :-1].double().flatten(0, 1).cpu(),
        labels[:, 1:].flatten().cpu(),
        ignore_index=IGNORED,
    )
    if getattr(patched, "aux_loss", None) is not None:
        expected = expected + weighted_auxiliary_loss(model_forward.causal, patched.aux_loss).cpu()
    difference = abs(run.loss.item() - expected.item())
    if not difference <= 10 * TOLERANCE * expected.abs().item():
        raise _refusal(
            model_forward,
            "its loss is not the mean cross-entropy of its logits and the next tokens",
            difference,
            "train it with its own loss",
        )


def _check_patched_loss(model_forward: PatchableModel, plain: _Run, patched: Any) -> None:
    """The patched loss is upstream's, up to the rounding of upstream's logits.

    They were rounded by the head, even where a forward makes fp32 of them afterwards."""
    dtype = plain.head_dtype
    assert dtype is not None  # the head has run
    if dtype in (torch.float32, torch.float64):
        precision = 2e-5 if plain.logits.device.type == "cpu" else 2e-3  # a GPU may use TF32
    else:
        precision = 4 * torch.finfo(dtype).eps
    difference = abs(plain.loss.item() - patched.loss.item())
    if not difference <= precision * (1 + abs(plain.loss.item())):
        raise _refusal(
            model_forward,
            "its loss is not the patched one without smoothing",
            difference,
            "train it with its own loss",
        )


def _check_training(model_forward: PatchableModel, ramped: _Run, training: _Run) -> None:
    """Nothing between the decoder and the loss acts in training mode alone."""
    _check_hidden(model_forward, training, "in training mode ")
    same_logits = (
        training.logits is not None
        and training.logits.shape == ramped.logits.shape
        and torch.equal(training.logits, ramped.logits)
    )
    if not same_logits:
        raise _refusal(
            model_forward,
            f"its logits of {model_forward.head_name}'s output are others in training mode",
            None,
            "train it with its own loss",
        )
    loss = ramped.loss.item()
    difference = abs(training.loss.item() - loss)
    if not difference <= 10 * TOLERANCE * abs(loss):
        raise _refusal(
            model_forward,
            "its loss of the same logits is another one in training mode",
            difference,
            "train it with its own loss",
        )


def _refusal(
    model_forward: PatchableModel, reason: str, difference: float | None, advice: str
) -> ValueError:
    causal = model_forward.causal
    numbers = scales_and_caps(causal)
    if numbers:
        read = ", ".join(f"{name}={value:g}" for name, value in numbers.items())
    else:
        read = "neither a scale nor a cap"
    largest = "" if difference is None else f", the largest difference being {difference:.3g}"
    return ValueError(
        f"patch_model refuses {type(causal).__name__}: {reason}{largest} (read from it: {read}); "
        f"{advice}"
    )
