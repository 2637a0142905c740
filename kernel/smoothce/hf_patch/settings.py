"""The keywords of `patch_model`, `patch_trainer` and `SmoothingCallback`, and what they become.

What is called `keywords` in this package is a `PatchSettings`, as the user gives it; `settings` is
the `LossSettings` that comes of it once it is checked."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

from torch import Tensor
from typing_extensions import TypedDict

from smoothce.checks import check_target, check_tensors
from smoothce.dispatch import check_impl
from smoothce.hf_patch.logit_map import FROM_MODEL, FromModel, GivenLogitMap
from smoothce.options import Options

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

# transformers counts no label of this value, whatever `ignore_index` a model was patched with.
UPSTREAMS_IGNORE_INDEX = -100

# What a caller of `linear_cross_entropy` may ask for and a model cannot return.
NO_SETTINGS_OF_A_MODEL = ("return_lse", "return_statistics")


class LossFunction(Protocol):
    """A loss to put in the place of `linear_cross_entropy`: the mean over labels that count.

    The logits are cap(logit_scale · hidden Wᵀ + bias): the bias comes scaled already."""

    def __call__(
        self,
        hidden: Tensor,  # (N, D)
        weight: Tensor,  # (V, D)
        labels: Tensor,  # (N,)
        **model_options: Any,  # bias, softcap and logit_scale, where the model has them
    ) -> Tensor: ...  # ()


class PatchSettings(TypedDict, total=False):
    """The keywords of `patch_model`, which documents them.

    They are the fields of `Options` that a model can serve, and `smoothing_target`, `impl`, `loss`
    and `eval_logits`. Each has its line here, from which editors complete, `help()` is made, and
    unknown keywords are refused. Where else a new option of the loss goes, the docstring of
    `Options` says. A new keyword that is no field of `Options` is also a field of `LossSettings`,
    with its place in `keywords` and `loss_settings`, which checks it.
    """

    label_smoothing: float
    smoothing_target: Tensor | None  # (V,)
    softcap: float | FromModel | None
    logit_scale: float | FromModel | None
    reduction: str
    ignore_index: int
    z_loss: float
    filter_eps: float | str | None
    workspace: int | str
    impl: str
    loss: LossFunction | None
    eval_logits: bool


# The fields of `Options` that are settings as they stand. A scale and a cap are not: what the
# caller says of these is a `GivenLogitMap`, and what the loss takes is the verified `LogitMap`.
SETTING_OPTIONS = tuple(
    option.name
    for option in fields(Options)
    if option.name not in NO_SETTINGS_OF_A_MODEL + GivenLogitMap._fields
)


@dataclass(frozen=True, eq=False)
class LossSettings:
    """How a patched model computes its loss, as the caller has said it; its head's forward holds
    them."""

    # Its softcap, logit_scale and return_… are not read once these settings are made: the map has
    # the first two, and a call of the head's forward says what is returned.
    options: Options = field(default_factory=Options)
    given_logit_map: GivenLogitMap = field(default_factory=GivenLogitMap)
    smoothing_target: Tensor | None = None  # (V,)
    impl: str = "auto"
    given_loss: LossFunction | None = None  # the keyword `loss`
    eval_logits: bool = True

    def keywords(self) -> PatchSettings:
        """The keywords that give these settings again."""
        keywords: dict[str, Any] = {
            **self.given_logit_map._asdict(),
            "smoothing_target": self.smoothing_target,
            "impl": self.impl,
            "loss": self.given_loss,
            "eval_logits": self.eval_logits,
        }
        for name in SETTING_OPTIONS:
            keywords[name] = getattr(self.options, name)
        return PatchSettings(**keywords)  # type: ignore[typeddict-item]

    def differences(self) -> str:
        """What training without this loss would lose, as keywords: "label_smoothing=0.1, z_loss=1".

        Empty where the loss is upstream's."""
        return differences_from_upstream(self.keywords())

    def differs_from_upstream(self) -> bool:
        """Whether training without this loss would be training on another one."""
        return self.differences() != ""

    def left_out_in_evaluation(self) -> str:
        """The settings that change the loss in training alone, as keywords: evaluation reports a
        loss without them."""
        return ", ".join(_changes_in_training_alone(self.keywords()))


def differences_from_upstream(keywords: PatchSettings) -> str:
    """`LossSettings.differences`, of keywords that have not become settings yet."""
    differences = _changes_in_training_alone(keywords)
    # It changes the loss that evaluation reports as well, so that nothing leaves it out there.
    ignore_index = keywords.get("ignore_index", UPSTREAMS_IGNORE_INDEX)
    if ignore_index != UPSTREAMS_IGNORE_INDEX:
        differences.append(f"ignore_index={ignore_index}")
    return ", ".join(differences)


def _changes_in_training_alone(keywords: PatchSettings) -> list[str]:
    """The keywords that change upstream's loss in training and not in evaluation, as name=value."""
    changes = []
    for name in ("label_smoothing", "z_loss"):
        value = keywords.get(name, 0)
        if value != 0:
            changes.append(f"{name}={value}")
    reduction = keywords.get("reduction", "mean")
    if reduction != "mean":
        changes.append(f"reduction={reduction!r}")
    loss = keywords.get("loss")
    if loss is not None:
        changes.append(f"loss={getattr(loss, '__name__', type(loss).__name__)}")
    return changes


def loss_settings(keywords: PatchSettings, vocabulary: int) -> LossSettings:
    """The settings that the keywords describe, for a head of so many entries.

    Raises TypeError for an unknown keyword and for a smoothing target that is no tensor, and
    ValueError for a value out of range."""
    unknown = sorted(set(keywords) - set(PatchSettings.__annotations__))
    if unknown:
        raise TypeError(f"patch_model has no setting {', '.join(unknown)}")
    values: dict[str, Any] = {**LossSettings().keywords(), **keywords}
    option_values = {name: values[name] for name in SETTING_OPTIONS}
    # The names of those that the caller has given, such as ["softcap"].
    numbers_of_the_map = [name for name in GivenLogitMap._fields if values[name] is not FROM_MODEL]
    for name in numbers_of_the_map:
        option_values[name] = values[name]
    options = Options(**option_values)
    # Options has checked the map's numbers and turned NumPy's into Python's: these are taken.
    given_logit_map = GivenLogitMap(**{name: getattr(options, name) for name in numbers_of_the_map})
    settings = LossSettings(
        options=options,
        given_logit_map=given_logit_map,
        smoothing_target=values["smoothing_target"],
        impl=values["impl"],
        given_loss=values["loss"],
        eval_logits=values["eval_logits"],
    )
    _check(settings, vocabulary)
    return settings


def _check(settings: LossSettings, vocabulary: int) -> None:
    """Check what `Options` has not checked: the values of `impl`, `eval_logits`, `loss` and
    `smoothing_target`, which are no fields of it, and that `reduction` is not "none", which it
    allows and a model does not.

    Raises ValueError for a wrong value, and TypeError for a smoothing target that is no tensor."""
    if settings.options.reduction not in ("mean", "sum"):
        raise ValueError(
            f"reduction must be mean or sum for a model, not {settings.options.reduction!r}"
        )
    check_impl(settings.impl)
    if not isinstance(settings.eval_logits, bool):
        raise ValueError(f"eval_logits must be True or False, not {settings.eval_logits!r}")
    if settings.given_loss is not None and not callable(settings.given_loss):
        raise ValueError(
            "loss must be a function loss(hidden, weight, labels) that returns the mean, not "
            f"{settings.given_loss!r}"
        )
    if settings.smoothing_target is not None:
        check_tensors(smoothing_target=settings.smoothing_target)
        check_target(settings.smoothing_target.cpu(), vocabulary)  # raises here, not on the device


def shows_settings(required: tuple[str, ...] = ()) -> Callable[[AnyFunction], AnyFunction]:
    """A decorator that lets `help()` and notebooks show the keywords that `**settings` stands for:
    with `patch_model`'s defaults, but for those that the function requires.

    `patch_trainer` leaves a setting that it is not given as an earlier patch has it; no signature
    can show that, so its docstring says it.
    `smoothce.options.spell_out_options` does it for functions that take the loss's options."""
    defaults: dict[str, Any] = {**LossSettings().keywords()}
    keywords = []
    for name, annotation in PatchSettings.__annotations__.items():
        default = inspect.Parameter.empty if name in required else defaults[name]
        keywords.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
        )

    def decorated(function: AnyFunction) -> AnyFunction:
        signature = inspect.signature(function)
        positional = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]

        @functools.wraps(function)
        def documented(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        vars(documented)["__signature__"] = signature.replace(parameters=[*positional, *keywords])
        return documented  # type: ignore[return-value]

    return decorated
