"""The keywords of `patch_model`, `patch_trainer` and `SmoothingCallback`, and what they become."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeVar

from torch import Tensor
from typing_extensions import TypedDict

from smoothce.checks import check_target, check_tensors
from smoothce.dispatch import check_impl
from smoothce.hf_patch.logit_map import LogitMap
from smoothce.options import Options

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

# What a caller of `linear_cross_entropy` may ask for and a model cannot return.
NO_SETTINGS_OF_A_MODEL = ("return_lse", "return_statistics")
# Read from the model unless the caller gives them.
LOGIT_MAP_KEYWORDS = ("softcap", "logit_scale")


class LossFunction(Protocol):
    """A loss to put in the place of `linear_cross_entropy`: the mean over labels that count."""

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
    and `eval_logits`. Each has its line here, from which editors complete and `help()` is made.
    """

    label_smoothing: float
    smoothing_target: Tensor | None  # (V,)
    softcap: float | None
    logit_scale: float | None
    reduction: str
    ignore_index: int
    z_loss: float
    filter_eps: float | str | None
    workspace: int | str
    impl: str
    loss: LossFunction | None
    eval_logits: bool


@dataclass(frozen=True, eq=False)
class LossSettings:
    """How a patched model computes its loss; its head's forward holds them."""

    options: Options = field(default_factory=Options)
    smoothing_target: Tensor | None = None  # (V,)
    impl: str = "auto"
    given_loss: LossFunction | None = None  # the keyword `loss`
    eval_logits: bool = True
    given_logit_map: frozenset[str] = frozenset()  # which of LOGIT_MAP_KEYWORDS the caller gave

    def keywords(self) -> PatchSettings:
        """The keywords that give these settings again."""
        keywords: dict[str, Any] = {
            "smoothing_target": self.smoothing_target,
            "impl": self.impl,
            "loss": self.given_loss,
            "eval_logits": self.eval_logits,
        }
        for name in OPTION_NAMES:
            if name not in LOGIT_MAP_KEYWORDS or name in self.given_logit_map:
                keywords[name] = getattr(self.options, name)
        return PatchSettings(**keywords)  # type: ignore[typeddict-item]

    def with_logit_map(self, logit_map: LogitMap) -> "LossSettings":
        options = replace(
            self.options, logit_scale=logit_map.logit_scale, softcap=logit_map.softcap
        )
        return replace(self, options=options)

    def differences(self) -> str:
        """What training without this loss would lose, as keywords: "label_smoothing=0.1, z_loss=1".

        Empty where the loss is upstream's."""
        lost = []
        if self.options.label_smoothing:
            lost.append(f"label_smoothing={self.options.label_smoothing:g}")
        if self.options.z_loss:
            lost.append(f"z_loss={self.options.z_loss:g}")
        if self.given_loss is not None:
            name = getattr(self.given_loss, "__name__", type(self.given_loss).__name__)
            lost.append(f"loss={name}")
        return ", ".join(lost)

    def differs_from_upstream(self) -> bool:
        """Whether training without this loss would be training on another one."""
        return self.differences() != ""


OPTION_NAMES = tuple(
    option.name for option in fields(Options) if option.name not in NO_SETTINGS_OF_A_MODEL
)
_OTHER_NAMES = ("smoothing_target", "impl", "loss", "eval_logits")


def loss_settings(keywords: PatchSettings, vocabulary: int) -> LossSettings:
    """The settings that the keywords describe, for a head of so many entries.

    Raises TypeError for an unknown keyword, and ValueError for a value out of range."""
    unknown = sorted(set(keywords) - {*OPTION_NAMES, *_OTHER_NAMES})
    if unknown:
        raise TypeError(f"patch_model has no setting {', '.join(unknown)}")
    options: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in keywords.items():
        if name in OPTION_NAMES:
            options[name] = value
        else:
            others[name] = value
    settings = LossSettings(
        options=Options(**options),
        given_loss=others.pop("loss", None),
        given_logit_map=frozenset(set(keywords).intersection(LOGIT_MAP_KEYWORDS)),
        **others,
    )
    if settings.options.reduction not in ("mean", "sum"):
        raise ValueError(
            f"reduction must be mean or sum for a model, not {settings.options.reduction!r}"
        )
    check_impl(settings.impl)
    if settings.smoothing_target is not None:
        check_tensors(smoothing_target=settings.smoothing_target)
        check_target(settings.smoothing_target.cpu(), vocabulary)  # raises here, not on the device
    return settings


def shows_settings(function: AnyFunction) -> AnyFunction:
    """Lets `help()` and notebooks show the keywords that `**settings` stands for.

    `smoothce.options.spell_out_options` does it for functions that take the loss's options."""
    defaults = {**LossSettings().keywords(), **vars(Options())}
    signature = inspect.signature(function)
    parameters = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    for name, annotation in PatchSettings.__annotations__.items():
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults[name],
                annotation=annotation,
            )
        )

    @functools.wraps(function)
    def documented(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    documented.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return documented  # type: ignore[return-value]
