"""What stands between a head's output and the logits: a scale and a cap, read from the model.

They are looked for under the names below in the model, its configuration and that one's text
configuration. A family with another name for one of them needs that name here, and with it gets a
value in the tiny models of `families`; a scale that is computed from two numbers needs a line in
`candidates`. Until then the caller gives the number, which the refusal prints. A scale that is a
tensor, a parameter or a buffer, is never read: the caller gives its number, and `verification`
follows the tensor's value.

What the caller says of a number of the map is FROM_MODEL, None (the model has none) or the number:
a `GivenLogitMap` has it. What is found in the model is None or the number: a `LogitMap` has it,
which there is once the model is verified.
"""

import enum
import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from smoothce.hf_patch.anatomy import CausalModel, config_of
from smoothce.options import is_number

# What configurations call the two. Granite divides by its logits_scaling, HyperCLOVA X multiplies.
SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
DIVISORS = ("logits_scaling",)

# A cap of up to 36,000 changes logits in fp32 by more than verification's TOLERANCE:
# (200 / cap)² / 3 > 1e-5. Logits in 16 bits show lower caps only: their rounding hides the others.
RAMP_END = 200.0


@dataclass(frozen=True)
class LogitMap:
    """logits = cap(logit_scale · head output), where cap(z) = softcap · tanh(z / softcap)."""

    logit_scale: float | None = None
    softcap: float | None = None

    def __call__(self, head_output: Tensor) -> Tensor:
        """In fp64."""
        logits = head_output.double()
        if self.logit_scale is not None:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def __str__(self) -> str:
        return f"logit_scale={self.logit_scale} and softcap={self.softcap}"


class FromModel(enum.Enum):
    """The type of FROM_MODEL, the default of the keywords `logit_scale` and `softcap`."""

    FROM_MODEL = "read from the model"

    def __repr__(self) -> str:
        return self.name


FROM_MODEL: Final = FromModel.FROM_MODEL


class GivenLogitMap(NamedTuple):
    """What the caller has said of the map: of each number that it is read from the model, that it
    is this one, or None for "the model has none"."""

    logit_scale: float | FromModel | None = FROM_MODEL
    softcap: float | FromModel | None = FROM_MODEL


class WatchedAttribute(NamedTuple):
    """An attribute on which the loss may depend, and what it was when it was read."""

    holder: Any  # the model, or one of its configurations
    name: str
    value: Any  # None where the holder has no such attribute

    def value_now(self) -> Any:
        return getattr(self.holder, self.name, None)


def read_scales_and_caps(causal: CausalModel) -> tuple[WatchedAttribute, ...]:
    """The attributes of the names SCALES and CAPS, there or not, of the model and of its
    configurations.

    A model may copy a number out of its configuration when it is made, and not look there again."""
    attributes = []
    for holder in _holders(causal):
        for name in SCALES + CAPS:
            value = getattr(holder, name, None)
            if not isinstance(value, torch.Tensor):  # whose value `verification` follows
                attributes.append(WatchedAttribute(holder, name, value))
    return tuple(attributes)


def attributes_that_hold(causal: CausalModel, logit_map: LogitMap) -> list[WatchedAttribute]:
    """Attributes of unknown names that hold a number of the map or its reciprocal.

    Some of them may hold it by chance, as a rate of dropout that equals a scale does:
    `verification` finds out which of them act on logits."""
    numbers: set[float] = set()
    for number in (logit_map.logit_scale, logit_map.softcap):
        if number is not None and number not in (0, 1):
            numbers.add(number)
            numbers.add(1 / number)
    attributes = []
    for holder in _holders(causal):
        for name, value in vars(holder).items():
            if is_number(value) and value in numbers and name not in SCALES + CAPS:
                attributes.append(WatchedAttribute(holder, name, value))
    return attributes


def watched_attributes(
    causal: CausalModel, acting_on_logits: list[WatchedAttribute]
) -> tuple[WatchedAttribute, ...]:
    """What must stay as it is for the map, and the loss, to be the model's.

    Beside scales and caps of known names these are the attributes that act on logits under other
    names; what asks for an auxiliary loss; and what transformers keeps a model's loss function
    under."""
    attributes = [*read_scales_and_caps(causal), *acting_on_logits]
    for holder in _holders(causal):
        # The auxiliary loss is verified only where this is on.
        name = "output_router_logits"
        attributes.append(WatchedAttribute(holder, name, getattr(holder, name, None)))
    # Not `loss_function`, a property that looks the function up each time it is read.
    for name in ("_loss_function", "loss_type"):
        attributes.append(WatchedAttribute(causal, name, getattr(causal, name, None)))
    return tuple(attributes)


def _holders(causal: CausalModel) -> list[Any]:
    """The model and its configurations."""
    holders = [causal]
    config = config_of(causal)
    if config is not None:
        holders.append(config)
        if hasattr(config, "get_text_config"):
            text_config = config.get_text_config()
            if text_config is not config:
                holders.append(text_config)
    return holders


def numbers_by_name(causal: CausalModel) -> dict[str, float]:
    """The scales and caps that are there, by their places.

    These are `config.logit_scale`, `text_config.logit_scale` of the text configuration where that
    is another one, or `logit_scale` of the model itself."""
    numbers = {}
    for attribute in read_scales_and_caps(causal):
        if is_number(attribute.value):
            if attribute.holder is causal:
                place_and_name = attribute.name
            elif attribute.holder is config_of(causal):
                place_and_name = f"config.{attribute.name}"
            else:
                place_and_name = f"text_config.{attribute.name}"
            numbers[place_and_name] = float(attribute.value)
    return numbers


def candidates(numbers: dict[str, float], given: GivenLogitMap) -> list[LogitMap]:
    """The maps that a model's numbers may mean, the plainest first, with what the caller gave."""
    scales: list[float | None] = [None]
    caps: list[float | None] = [None]
    for place_and_name, value in numbers.items():
        name = place_and_name.rpartition(".")[2]
        if name in CAPS and value > 0:
            caps.append(value)
        elif name in SCALES:
            scales.append(value)
        if name in DIVISORS and value != 0:
            scales.append(1 / value)
    if given.logit_scale is not FROM_MODEL:
        scales = [given.logit_scale]
    if given.softcap is not FROM_MODEL:
        caps = [given.softcap]
    return [LogitMap(scale, cap) for scale in scales for cap in caps]


def ramp_like(head_output: Tensor) -> Tensor:
    """One ramp of numbers from −200 to 200 in the shape of a head's output.

    Each row goes from one end to the other, by numbers of its own. They are fp32, whatever the
    head's dtype, so that what a forward does to them shows to 1e-5."""
    entries = head_output.shape[-1]
    rows = head_output.numel() // entries
    ramp = torch.linspace(
        -RAMP_END, RAMP_END, entries * rows, dtype=torch.float32, device=head_output.device
    )
    # The ramp is dealt out to the rows in turn: row r has its numbers r, r + rows, r + 2 rows, …
    numbers_of_rows = ramp.view(entries, rows).T
    return numbers_of_rows.reshape(head_output.shape)


def fitted(ramp: Tensor, logits: Tensor, precision: float) -> LogitMap:
    """The map that these logits of a ramp show, for a refusal to suggest.

    `precision` is that of the logits, relative. Where no map made them it is some map that the
    caller has to compare with them."""
    ramp = ramp.double().flatten()
    logits = logits.double().flatten()
    near_zero = ramp.abs().argmin()  # none is exactly 0: their number is even
    small, small_logit = ramp[near_zero].item(), logits[near_zero].item()
    largest = logits.abs().max().item()
    scale = small_logit / small
    uncapped = abs(scale) * RAMP_END
    if uncapped - largest <= max(1e-4, precision) * largest or not math.isfinite(scale):
        return LogitMap(logit_scale=_six_digits(slope(ramp, logits)))
    # Scale and cap are unknown. If the scale is known, the largest logit tells the cap; if the cap
    # is known, the logit nearest to zero, which it bends a little, tells the scale. Found in turn,
    # each from the other, they settle.
    cap = largest
    for _ in range(20):
        cap = _softcap_between(abs(scale) * RAMP_END, largest)
        if abs(small_logit) < cap:
            scale = cap * math.atanh(small_logit / cap) / small
    return LogitMap(logit_scale=_six_digits(scale), softcap=_six_digits(cap))


def slope(inputs: Tensor, outputs: Tensor) -> float:
    """The factor that brings the inputs nearest to the outputs, in fp64.

    The rounding of 16-bit outputs goes either way, so that it hardly changes the factor."""
    inputs = inputs.double().flatten()
    outputs = outputs.double().flatten()
    return (inputs.dot(outputs) / inputs.dot(inputs)).item()


def _softcap_between(uncapped: float, capped: float) -> float:
    """The softcap for which softcap · tanh(uncapped / softcap) is `capped`, by bisection."""
    low, high = capped, 1e6
    for _ in range(100):
        cap = (low + high) / 2
        if cap * math.tanh(uncapped / cap) < capped:  # a higher cap lets through more
            low = cap
        else:
            high = cap
    return low


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")
