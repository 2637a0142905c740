"""The settings of a patched model, and its head, which defers logits and computes the loss."""

import types
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict

from smoothce.hf_patch.deferred_logits import CannotDefer, Deferral, DeferredLogits, LossRequest
from smoothce.linear_cross_entropy import linear_cross_entropy
from smoothce.module import LinearCrossEntropy

# transformers counts no label of this value, whatever `ignore_index` a model was patched with.
UPSTREAMS_IGNORE_INDEX = -100
FROM_MODEL = "model"  # a scale or cap that is whatever the model does


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
    """The keywords of `patch_model`, which documents them; their defaults are `LossSettings`'."""

    label_smoothing: float
    smoothing_target: Tensor | None  # (V,)
    softcap: float | str | None
    logit_scale: float | str | None
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
    """How a patched model computes its loss."""

    label_smoothing: float = 0.0
    smoothing_target: Tensor | None = None  # (V,)
    softcap: float | str | None = FROM_MODEL
    logit_scale: float | str | None = FROM_MODEL
    reduction: str = "mean"
    ignore_index: int = UPSTREAMS_IGNORE_INDEX
    z_loss: float = 0.0
    filter_eps: float | str | None = None
    workspace: int | str = "auto"
    impl: str = "auto"
    loss: LossFunction | None = None
    eval_logits: bool = True

    def with_keywords(self, keywords: PatchSettings) -> "LossSettings":
        """These settings, but for the keywords that are given. Raises TypeError for unknown ones,
        and ValueError for a value out of range."""
        unknown = sorted(set(keywords) - {option.name for option in fields(self)})
        if unknown:
            raise TypeError(f"patch_model has no setting {', '.join(unknown)}")
        settings = replace(self, **keywords)
        settings._check()
        return settings

    def _check(self) -> None:
        given_numbers = {}
        for name in ("softcap", "logit_scale"):
            if getattr(self, name) != FROM_MODEL:
                given_numbers[name] = getattr(self, name)
        LinearCrossEntropy(
            impl=self.impl,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            z_loss=self.z_loss,
            filter_eps=self.filter_eps,
            workspace=self.workspace,
            **given_numbers,
        )
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be mean or sum for a model, not {self.reduction!r}")
        if not isinstance(self.eval_logits, bool):
            raise ValueError(f"eval_logits must be True or False, not {self.eval_logits!r}")
        if self.loss is not None and not callable(self.loss):
            raise ValueError(
                "loss must be a function loss(hidden, weight, labels) that returns the mean, not "
                f"{self.loss!r}"
            )

    def changes_in_training(self) -> str:
        """What training without these settings would lose, as keywords: "label_smoothing=0.1".

        Evaluation reports a loss without them. Empty where the loss is upstream's."""
        changes = []
        for name in ("label_smoothing", "z_loss"):
            if getattr(self, name) != 0 and self.loss is None:
                changes.append(f"{name}={getattr(self, name)}")
        if self.reduction != "mean":
            changes.append(f"reduction={self.reduction!r}")
        if self.loss is not None:
            changes.append(f"loss={getattr(self.loss, '__name__', type(self.loss).__name__)}")
        return ", ".join(changes)

    def describe(self) -> str:
        """The settings in a few words, for logs and `repr`."""
        gradient = "exact gradient" if self.filter_eps is None else f"filter_eps={self.filter_eps}"
        return f"{self.changes_in_training() or 'label_smoothing=0'}, {gradient}"


class SmoothedHead(nn.Module):
    """What a head's class derives from while its model is patched.

    While a model's forward is deferred, a call with hidden states returns DeferredLogits, before
    anything else runs: no hook, no gathering of the classifier. The call with a LossRequest runs
    them as any call of a module does, which is how ZeRO-3 and FSDP2 gather the classifier."""

    settings: Any  # LossSettings; None once the model is unpatched
    deferral: Deferral | None

    def __call__(self, hidden: Tensor, *, request: LossRequest | None = None) -> Any:
        deferral = self.deferral
        if deferral is not None and request is None:
            return DeferredLogits(
                self,
                hidden,
                deferral,
                token_weights=deferral.token_weights,
                labels=deferral.aligned_labels,
            )
        if request is None:
            return super().__call__(hidden)
        result = super().__call__(hidden, request=request)
        if not isinstance(result, dict) or list(result) != ["loss"]:
            raise ValueError(
                "a forward hook on the head changes what it returns, which in a patched model is "
                "the loss: remove the hook, or unpatch_model the model"
            )
        if request.logits.deferral.with_statistics:
            return _reduced_by_model(result["loss"], request)
        return result["loss"]

    def forward(self, hidden: Tensor, *, request: LossRequest | None = None) -> Any:
        """The logits, (…, V), as ever; with a request the loss, in a dict: what a hook of somebody
        else's would do to logits, it cannot do to that.

        Every gradient has to come through what is returned here: it wakes the hooks by which
        ZeRO-3 and FSDP2 gather the classifier for the backward pass."""
        if request is None:
            return super().forward(hidden)
        return {"loss": loss_of(self, hidden, request)}

    def extra_repr(self) -> str:
        if self.settings is None:
            return super().extra_repr()
        return f"{super().extra_repr()}, loss: {self.settings.describe()}"


class SmoothedLinear(SmoothedHead, nn.Linear):
    """A patched `nn.Linear`."""


def patch_head(head: Any, settings: LossSettings) -> None:
    """Let the head defer its logits. Its parameters, hooks and name stay as they are."""
    if not isinstance(head, SmoothedHead):
        if type(head) is nn.Linear:
            head.__class__ = SmoothedLinear
        else:  # such as the class that FSDP2 makes of it
            own_class = type(head)
            head.__class__ = type(own_class.__name__, (SmoothedHead, own_class), {})
        if "_old_forward" in vars(head):  # where accelerate's device_map keeps the forward
            head._old_forward = types.MethodType(SmoothedLinear.forward, head)
    head.deferral = None
    head.settings = settings


def unpatch_head(head: Any) -> None:
    """Undo `patch_head`."""
    head.settings = None
    if "_old_forward" in vars(head):
        head._old_forward = types.MethodType(nn.Linear.forward, head)
    bases = type(head).__bases__
    # Where FSDP2 has made a class of ours since, ours stays, and does what its base does.
    if bases[0] is SmoothedHead:
        del head.settings, head.deferral
        head.__class__ = bases[1]


def patched_heads(model: nn.Module) -> Iterator[SmoothedHead]:
    """The patched heads in a model, PEFT's copies of its head too."""
    for module in model.modules():
        if isinstance(module, SmoothedHead) and module.settings is not None:
            yield module


def loss_of(head: Any, hidden: Tensor, request: LossRequest) -> Tensor:
    """The loss (), or (N,) where the model asks for one a token; with statistics the sum ().

    Raises ValueError where the model's logits are not as the settings say."""
    deferral = request.logits.deferral
    labels = request.labels.to(hidden.device)
    if deferral.with_statistics:
        return _sum_with_statistics(head, hidden, labels, request)
    reduction = request.reduction
    if deferral.with_smoothing and head.settings.reduction == "sum":
        if reduction != "mean":
            raise CannotDefer("reduction='sum' is asked of a model that reduces its loss itself")
        reduction = "sum"
    divides = deferral.divisor is not None and reduction == "mean"
    if divides:
        reduction = "sum"
    if deferral.with_smoothing and head.settings.loss is not None:
        loss = _given_loss(head, hidden, labels, request, reduction)
    else:
        loss = _fused_loss(head, hidden, labels, request, reduction)
    return loss / deferral.divisor if divides else loss


def _sum_with_statistics(head: Any, hidden: Tensor, labels: Tensor, request: LossRequest) -> Tensor:
    """The sum of losses. The tokens' statistics are left in the deferral.

    A loss of the user's own gives no statistics. Then a pass without gradients gives them."""
    deferral = request.logits.deferral
    if request.reduction == "none":
        raise CannotDefer("TRL asks for one loss of a model that makes one a token")
    deferral.labels = labels.masked_fill(labels == request.ignore_index, UPSTREAMS_IGNORE_INDEX)
    if deferral.with_smoothing and head.settings.loss is not None:
        with torch.no_grad():
            _, deferral.statistics = _fused_loss(
                head, hidden, labels, request, "sum", return_statistics=True
            )
        return _given_loss(head, hidden, labels, request, "sum")
    loss_sum, deferral.statistics = _fused_loss(
        head, hidden, labels, request, "sum", return_statistics=True
    )
    return loss_sum


def _reduced_by_model(loss_sum: Tensor, request: LossRequest) -> Tensor:
    """The loss () that the model asked for, of the sum, which is left in the deferral."""
    deferral = request.logits.deferral
    deferral.loss_sum = loss_sum
    if request.reduction == "sum":
        return loss_sum
    divisor = deferral.divisor
    if divisor is None:
        assert deferral.labels is not None  # left there with the sum
        divisor = (deferral.labels != UPSTREAMS_IGNORE_INDEX).sum().clamp(min=1)
    return loss_sum / divisor


def _fused_loss(
    head: Any,
    hidden: Tensor,  # (N, D)
    labels: Tensor,  # (N,)
    request: LossRequest,
    reduction: str,
    *,
    return_statistics: bool = False,
) -> Any:
    """`linear_cross_entropy` with the settings: a loss, or with statistics the two."""
    settings = head.settings
    logit_scale, softcap = _scale_and_cap(settings, request)
    with_smoothing = request.logits.deferral.with_smoothing
    return linear_cross_entropy(
        hidden,
        head.weight,
        labels,
        bias=_bias(head, request),
        label_smoothing=settings.label_smoothing if with_smoothing else 0.0,
        smoothing_target=_target_on(head, hidden.device),
        token_weights=_token_weights(request),
        ignore_index=request.ignore_index,
        reduction=reduction,
        softcap=softcap,
        logit_scale=logit_scale,
        z_loss=settings.z_loss if with_smoothing else 0.0,
        filter_eps=settings.filter_eps,
        workspace=settings.workspace,
        return_statistics=return_statistics,
        impl=settings.impl,
    )


def _given_loss(
    head: Any, hidden: Tensor, labels: Tensor, request: LossRequest, reduction: str
) -> Tensor:
    """The loss of the user's own, which is a mean over the labels that count.

    A mean over nothing would be NaN, which a product with 0 does not take away. So where no label
    counts the function gets label 0 everywhere, and its mean is multiplied by 0."""
    if reduction == "none" or request.logits.token_weights is not None:
        raise CannotDefer("a loss= of your own is one mean, without token weights")
    model_options: dict[str, Any] = {}
    logit_scale, softcap = _scale_and_cap(head.settings, request)
    bias = _bias(head, request)
    if bias is not None:
        model_options["bias"] = bias
    if softcap is not None:
        model_options["softcap"] = softcap
    if logit_scale is not None:
        model_options["logit_scale"] = logit_scale
    valid = labels != request.ignore_index
    labels = labels.masked_fill(~valid, UPSTREAMS_IGNORE_INDEX)
    labels = torch.where(valid.any(), labels, torch.zeros_like(labels))
    mean = head.settings.loss(hidden, head.weight, labels, **model_options)
    return mean * (valid.any() if reduction == "mean" else valid.sum())


def _scale_and_cap(
    settings: LossSettings, request: LossRequest
) -> tuple[float | None, float | None]:
    """The logits' scale and cap, None where there is none.

    Raises ValueError where the settings give others than the model has."""
    given_scale = 1.0 if settings.logit_scale is None else settings.logit_scale
    _check_given("logit_scale", given_scale, request.logit_scale)
    _check_given("softcap", settings.softcap, request.softcap)
    return None if request.logit_scale == 1 else request.logit_scale, request.softcap


def _check_given(name: str, given: float | str | None, found: float | None) -> None:
    if isinstance(given, str) or given == found:
        return
    if given is None or found is None or abs(given - found) > 1e-6 * abs(found):
        raise ValueError(f"{name}={given} is given, and the model's is {found}: leave it out")


def _bias(head: Any, request: LossRequest) -> Tensor | None:
    """The bias (V,) of scaled logits. A model scales its head's whole output, the bias too."""
    bias = head.bias
    if bias is not None and request.logit_scale != 1:
        bias = bias * request.logit_scale
    added = request.added_bias
    if added is None:
        return bias
    return added if bias is None else bias + added


def _token_weights(request: LossRequest) -> Tensor | None:
    """The weights (N,) of the labels that the model's cross-entropy takes.

    Raises ValueError where these labels are others than the weights were given for."""
    weights = request.logits.token_weights
    if weights is None:
        return None
    expected = request.logits.labels
    assert expected is not None  # it is given with the weights
    if not torch.compiler.is_compiling():
        labels = request.labels.to(expected.device)
        counts = labels != request.ignore_index
        if not torch.equal(labels[counts], expected[counts]):
            raise CannotDefer("the model moves its labels, so that token_weights have lost theirs")
    return weights.to(request.logits.device)


def _target_on(head: Any, device: torch.device) -> Tensor | None:
    """The smoothing target (V,). It is copied to the device once: it is no buffer, so that what
    moves the model leaves it where it is."""
    target = head.settings.smoothing_target
    if target is None or target.device == device:
        return target
    target = target.to(device)
    # What compiled code makes may be overwritten by its next run.
    if not torch.compiler.is_compiling():
        head.settings = replace(head.settings, smoothing_target=target)
    return target
