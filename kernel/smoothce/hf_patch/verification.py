"""Whether a model's loss is one that the fused loss can compute: verified, not looked up.

The model runs four times on sixteen tokens, as `probe` has it, in evaluation mode:

- *ramped*, with its head's output replaced by a ramp from −200 to 200;
- *ramped in training*, likewise, with all but its decoder in training mode;
- *plain*, unchanged;
- *patched*, with the loss computed by its head and without smoothing.

Then the following must hold, in this order:

1. the plain run's decoder gives, bit for bit, what its head takes;
2. the ramped run returns a loss, and logits of the ramp's shape;
3. no trained parameter outside decoder and head has a part in the loss of either ramped run (a
   ramped run is made with gradients on where there is such a parameter, and no other run is);
4. the ramped run's logits are cap(scale · ramp), for a scale and a cap that the configuration may
   mean;
5. its loss is the mean cross-entropy of the next tokens, beside a mixture's auxiliary loss as the
   patched run has it;
6. the patched run's loss is the plain run's;
7. ramped in training, logits and loss are the ramped run's, and the head takes what the decoder
   gives: nothing between decoder and loss acts in training alone, such as dropout.

A mixture's auxiliary loss takes part where `output_router_logits` is on, in the configuration or as
an argument. A model that cannot run is verified once more with plain attention. Gradients are not
compared: they follow from the loss, which is the same function of the same hidden states. Where
attributes of other names hold the map's numbers, a further ramped run for each tells whether it
acts on logits, and has to be watched.

Logits that agree prove too little. Without the ramp small logits hide a cap, and a model may
compute another loss from the right logits (an unshifted one, a loss of further heads beside it).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoothce.hf_patch.anatomy import (
    CausalModel,
    OutsideTensor,
    class_of,
    partitioned_by,
    tensors_outside,
    waits_for_weights,
)
from smoothce.hf_patch.fused_forward import FusedForward
from smoothce.hf_patch.logit_map import (
    GivenLogitMap,
    LogitMap,
    WatchedAttribute,
    attributes_that_hold,
    candidates,
    fitted,
    numbers_by_name,
    slope,
    watched_attributes,
)
from smoothce.hf_patch.outputs import (
    OutputClass,
    wants_auxiliary_loss,
    weighted_auxiliary_loss,
)
from smoothce.hf_patch.probe import (
    ROWS,
    TOKENS,
    UpstreamRun,
    acts_on_logits,
    enough_threads,
    outside_decoder_in_training,
    plain_attention,
    probe_inputs,
    run_patched,
    run_upstream,
    undisturbed,
)
from smoothce.hf_patch.settings import UPSTREAMS_IGNORE_INDEX

TOLERANCE = 1e-5  # of what is computed from the ramp, which is fp32
MOST_FOLLOWED = 2**22  # numbers of a tensor outside decoder and head of which a copy is kept
OWN_LOSS = "train it with its own loss"  # what a refusal advises, if there is nothing better


class CannotRun(Exception):
    """The model cannot be verified now; the message says why."""


class SeenTensor(NamedTuple):
    """By what one can tell, without reading it, that a tensor has the value that was seen."""

    tensor: Tensor
    address: int  # another one after `tensor.data = …`
    version: int  # which torch counts up when the tensor is written to

    @classmethod
    def of(cls, tensor: Tensor) -> "SeenTensor":
        # Torch does not count what is written to inference tensors.
        version = 0 if tensor.is_inference() else tensor._version
        return cls(tensor, tensor.data_ptr(), version)

    def is_still(self, tensor: Tensor) -> bool:
        if tensor is not self.tensor:
            return False
        now = SeenTensor.of(tensor)
        return now.address == self.address and now.version == self.version


@dataclass(eq=False)
class FrozenTensor:
    """A frozen parameter or a buffer outside decoder and head, as it was when the model was
    verified."""

    place: OutsideTensor
    value: Tensor | None  # a copy; None where it is not followed
    seen: SeenTensor | None = None  # the tensor that had this value when it was compared last

    def is_trained(self) -> bool:
        return self.place.tensor().requires_grad

    def has_another_value(self) -> bool:
        """Whether its value is another one. Only a tensor that was replaced or written to is read,
        which waits for the device."""
        if self.value is None:
            return False
        tensor = self.place.tensor()
        # A tensor that FSDP2 has sharded since counts as another value, but once only: the model is
        # then verified anew, and the value of a sharded tensor is not followed (`_frozen_outside`).
        is_sharded = hasattr(tensor, "placements")  # as a DTensor is
        if is_sharded or tensor.shape != self.value.shape or tensor.dtype != self.value.dtype:
            return True
        if self.seen is not None and self.seen.is_still(tensor):
            return False
        if not torch.equal(tensor, self.value.to(tensor.device)):
            return True
        self.seen = SeenTensor.of(tensor)
        return False


@dataclass(frozen=True, eq=False)
class VerifiedLoss:
    """That a model's loss is the fused one, with this map, and what this rests on.

    Attributes are *watched*: another value of one raises. Frozen tensors are *followed*, if they
    are not large: another value of one has the model verified once more."""

    logit_map: LogitMap
    output_class: OutputClass
    has_auxiliary_loss: bool  # whether a mixture's auxiliary loss took part
    # An attribute that the model did not have is kept with the value None: it may come.
    watched_attributes: tuple[WatchedAttribute, ...]
    frozen_outside: tuple[FrozenTensor, ...]

    def needs_verifying_again(self) -> bool:
        """Whether a frozen tensor outside decoder and head has another value.

        That is how a checkpoint looks that was loaded since. Compiled code cannot tell."""
        if torch.compiler.is_compiling():
            return False
        return any(tensor.has_another_value() for tensor in self.frozen_outside)

    def raise_where_changed(self) -> None:
        """Raises ValueError where a watched attribute has another value, or a frozen parameter is
        trained now: nobody loads these, so that somebody has set them by mistake."""
        for attribute in self.watched_attributes:
            value_now = attribute.value_now()
            if value_now is not attribute.value and value_now != attribute.value:
                raise ValueError(
                    f"{attribute.name} was {attribute.value} when patch_model verified the model "
                    f"and is {value_now} now: call patch_model again"
                )
        for tensor in self.frozen_outside:
            if tensor.is_trained():
                raise ValueError(
                    f"{tensor.place.name} is trained now and was not when patch_model verified the "
                    "model: call patch_model again, which tells whether it would get its gradient"
                )


def verify(
    fused: FusedForward,
    given: GivenLogitMap,
    *,
    with_auxiliary_loss: bool = False,
    in_forward: bool = False,
) -> VerifiedLoss:
    """Verify that the model's fused forward computes upstream's loss where it does not smooth.

    `given` is what the caller has said of the model's scale and cap. `with_auxiliary_loss`: ask a
    mixture of experts for its auxiliary loss, whatever its configuration says. `in_forward`: this
    is called in the model's own forward, where ZeRO-3 and FSDP2 gather what a module needs.

    Restores random states, modes and hooks, and leaves no gradients. Raises ValueError where the
    losses differ, and CannotRun where the model cannot run as it is."""
    causal = fused.causal
    if any(parameter.is_meta for parameter in causal.parameters()):
        raise CannotRun("its parameters are on the meta device")
    library = partitioned_by(causal)
    if library is not None and not in_forward:
        raise CannotRun(f"{library} holds a part of each parameter on each rank")
    if library is None and not in_forward and waits_for_weights():
        raise CannotRun("the first rank alone has its weights until FSDP2 shards it")
    with undisturbed(causal), enough_threads(causal):
        inputs = probe_inputs(fused, with_auxiliary_loss=with_auxiliary_loss)
        try:
            runs = _verified_runs(fused, given, inputs)
        except CannotRun as first_reason:
            with plain_attention(causal):
                runs = _runs_after_a_failure(fused, given, inputs, first_reason)
    return VerifiedLoss(
        runs.logit_map,
        runs.output_class,
        has_auxiliary_loss=with_auxiliary_loss or wants_auxiliary_loss(causal, inputs),
        watched_attributes=watched_attributes(causal, runs.acting_on_logits),
        frozen_outside=_frozen_outside(causal, fused.head, are_whole=library is None),
    )


class VerifiedRuns(NamedTuple):
    """What the runs of an accepted model showed."""

    logit_map: LogitMap
    output_class: OutputClass
    acting_on_logits: list[WatchedAttribute]  # which hold the map's numbers under other names


def _runs_after_a_failure(
    fused: FusedForward, given: GivenLogitMap, inputs: dict[str, Any], first_reason: CannotRun
) -> VerifiedRuns:
    """`_verified_runs` once more, of a model that could not run with its own attention. The caller
    has put plain attention on.

    Where it cannot run this way either, both reasons are said: the first is that of the attention
    which the user has chosen."""
    try:
        return _verified_runs(fused, given, inputs)
    except CannotRun as reason:
        if str(reason) == str(first_reason):
            raise
        raise CannotRun(f"{first_reason}; with plain attention, {reason}") from reason


def _verified_runs(
    fused: FusedForward, given: GivenLogitMap, inputs: dict[str, Any]
) -> VerifiedRuns:
    """The four runs, and what must hold of them."""
    try:
        ramped = run_upstream(fused, inputs, with_ramp=True)
        with outside_decoder_in_training(fused.causal):
            ramped_in_training = run_upstream(fused, inputs, with_ramp=True)
        plain = run_upstream(fused, inputs, with_ramp=False)
    except Exception as error:
        raise CannotRun(
            f"its forward on {ROWS} × {TOKENS} tokens raises {_described(error)}"
        ) from error
    _check_hidden(fused, plain)
    _check_returns(fused, ramped)
    _check_trained_outside(fused, ramped)
    _check_trained_outside(fused, ramped_in_training)
    logit_map = _find_logit_map(fused, given, ramped)
    output_class = OutputClass.of(plain.outputs)
    try:
        patched = run_patched(fused, logit_map, inputs, output_class)
    except Exception as error:
        raise _refusal(
            fused,
            f"its decoder and head do not run apart from its forward ({_described(error)})",
        ) from error
    _check_loss_of_logits(fused, ramped, patched, inputs["labels"])
    _check_patched_loss(fused, plain, patched)
    _check_training(fused, ramped, ramped_in_training)
    acting_on_logits = []
    for attribute in attributes_that_hold(fused.causal, logit_map):
        if acts_on_logits(fused, inputs, attribute, ramped.logits):
            acting_on_logits.append(attribute)
    return VerifiedRuns(logit_map, output_class, acting_on_logits)


def _described(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _frozen_outside(
    causal: CausalModel, head: nn.Linear, *, are_whole: bool
) -> tuple[FrozenTensor, ...]:
    """The frozen tensors outside decoder and head. Values are followed of those that are whole, and
    not large. So a bias of the logits is followed, and a second tower's weights are not."""
    frozen = []
    for place in tensors_outside(causal, head):
        tensor = place.tensor()
        if tensor.requires_grad:
            continue
        if are_whole and tensor.numel() <= MOST_FOLLOWED:
            value = tensor.detach().clone()
            frozen.append(FrozenTensor(place, value, SeenTensor.of(tensor)))
        else:
            frozen.append(FrozenTensor(place, value=None))
    return tuple(frozen)


def _check_returns(fused: FusedForward, run: UpstreamRun, when: str = "") -> None:
    """The forward returns a loss, and logits as many as its head made.

    `when` is the mode, as for `_check_hidden`."""
    name = fused.head_name
    if run.ramp is None or run.logits is None or run.loss is None:
        raise _refusal(
            fused,
            f"{when}its forward does not return a loss and logits of {name}'s output",
        )
    if run.logits.shape != run.ramp.shape or run.logits.dim() != 3:
        raise _refusal(
            fused,
            f"{when}its logits are {tuple(run.logits.shape)} where {name} gives "
            f"{tuple(run.ramp.shape)}",
        )


def _check_trained_outside(fused: FusedForward, run: UpstreamRun) -> None:
    """No parameter is trained whose gradient a patched model would not make."""
    if run.trained_outside:
        raise _refusal(
            fused,
            f"{', '.join(run.trained_outside)}, which would get no gradient, changes its logits or "
            "its loss",
            advice=f"{OWN_LOSS}, or without a gradient of this",
        )


def _find_logit_map(fused: FusedForward, given: GivenLogitMap, run: UpstreamRun) -> LogitMap:
    """The map that the model applies to the ramp, of those that its configuration may mean.

    Raises ValueError where it is none of them, with the one that it seems to be."""
    assert run.ramp is not None  # _check_returns has seen it
    maps = candidates(numbers_by_name(fused.causal), given)
    epsilon = torch.finfo(run.logits.dtype).eps
    precision = max(TOLERANCE, 4 * epsilon)
    differences = {}
    for logit_map in maps:
        expected = logit_map(run.ramp)
        differences[logit_map] = (run.logits.double() - expected).abs().max().item()
    # The nearest, since the rounding of 16-bit logits would hide a scale of 1.02; of those that
    # are equally near it is the plainest.
    nearest = min(differences, key=lambda logit_map: differences[logit_map])
    expected = nearest(run.ramp)
    # Two checks. No logit is off by more than rounding, four epsilon. And the logits as a whole are
    # not stretched by more than one: rounding moves each of them, and hardly all together.
    is_near = differences[nearest] <= precision * expected.abs().max().item()
    if is_near and abs(slope(expected, run.logits) - 1) <= max(TOLERANCE, epsilon):
        return nearest
    fit = fitted(run.ramp, run.logits, precision)
    expected = fit(run.ramp)
    if (run.logits.double() - expected).abs().max() <= 10 * precision * expected.abs().max():
        advice = f"pass {fit}, which describe it, where they are constants of the model"
    else:
        advice = f"no scale and cap describe it: {OWN_LOSS}"
    raise _refusal(
        fused,
        f"{nearest} do not turn {fused.head_name}'s output into its logits",
        differences[nearest],
        advice,
    )


def _check_hidden(fused: FusedForward, run: UpstreamRun, when: str = "") -> None:
    """The decoder's result is what the head takes, bit for bit.

    `when`, which a refusal says, is the mode if that matters."""
    name = fused.head_name
    if len(run.hidden) != 1 or len(run.head_inputs) != 1:
        raise _refusal(
            fused,
            f"{when}its forward calls the decoder {len(run.hidden)} times and {name} "
            f"{len(run.head_inputs)} times, not once each",
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
            fused,
            f"{when}its decoder's last_hidden_state is not {name}'s input",
            difference,
        )


def _check_loss_of_logits(
    fused: FusedForward, run: UpstreamRun, patched: Any, labels: Tensor
) -> None:
    """The model's loss is cross-entropy of the next tokens, and an auxiliary loss that is ours."""
    expected = F.cross_entropy(
        run.logits[:, :-1].double().flatten(0, 1).cpu(),
        labels[:, 1:].flatten().cpu(),
        ignore_index=UPSTREAMS_IGNORE_INDEX,
    )
    if getattr(patched, "aux_loss", None) is not None:
        expected = expected + weighted_auxiliary_loss(fused.causal, patched.aux_loss).cpu()
    _check_loss(
        fused,
        run.loss,
        expected,
        most=10 * TOLERANCE * expected.abs().item(),
        otherwise="its loss is not the mean cross-entropy of its logits and the next tokens",
    )


def _check_patched_loss(fused: FusedForward, plain: UpstreamRun, patched: Any) -> None:
    """The patched loss is upstream's, up to the rounding of upstream's logits.

    They were rounded by the head, even where a forward makes fp32 of them afterwards."""
    dtype = plain.head_dtype
    assert dtype is not None  # the head has run
    if dtype in (torch.float32, torch.float64):
        precision = 2e-5 if plain.logits.device.type == "cpu" else 2e-3  # a GPU may use TF32
    else:
        precision = 4 * torch.finfo(dtype).eps
    _check_loss(
        fused,
        patched.loss,
        plain.loss,
        most=precision * (1 + plain.loss.abs().item()),
        otherwise="its loss is not the patched one without smoothing",
    )


def _check_training(
    fused: FusedForward, ramped: UpstreamRun, ramped_in_training: UpstreamRun
) -> None:
    """Nothing between the decoder and the loss acts in training mode alone."""
    when = "in training mode "
    _check_hidden(fused, ramped_in_training, when)
    _check_returns(fused, ramped_in_training, when)
    if not torch.equal(ramped_in_training.logits, ramped.logits):
        raise _refusal(
            fused, f"its logits of {fused.head_name}'s output are others in training mode"
        )
    _check_loss(
        fused,
        ramped_in_training.loss,
        ramped.loss,
        most=10 * TOLERANCE * ramped.loss.abs().item(),
        otherwise="its loss of the same logits is another one in training mode",
    )


def _check_loss(
    fused: FusedForward, loss: Tensor, expected: Tensor, *, most: float, otherwise: str
) -> None:
    """Raises ValueError, which says `otherwise`, where two losses differ by more than `most`."""
    difference = abs(loss.item() - expected.item())
    if not difference <= most:  # also where one is NaN
        raise _refusal(fused, otherwise, difference)


def _refusal(
    fused: FusedForward, reason: str, difference: float | None = None, advice: str = OWN_LOSS
) -> ValueError:
    """What `patch_model` raises: the reason, the largest difference that was found, if any, which
    scale and cap were read, and what to do."""
    causal = fused.causal
    numbers = numbers_by_name(causal)
    if numbers:
        read = ", ".join(f"{name}={value:g}" for name, value in numbers.items())
    else:
        read = "neither a scale nor a cap"
    largest = "" if difference is None else f", the largest difference being {difference:.3g}"
    return ValueError(
        f"patch_model refuses {class_of(causal).__name__}: {reason}{largest} "
        f"(read from it: {read}); {advice}"
    )
