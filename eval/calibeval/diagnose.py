"""How certain can a language model's output layer be? The entropy bound and what is observed.

For logits z = C h with σ_C = ‖C‖₂ and ‖h‖₂ = √D σ_h, σ_h the root mean square of the entries of h:

    ‖z‖₂ ≤ r = σ_C √D σ_h,   g = r √(V / (V − 1)),
    H ≥ log(1 + (V − 1) e^{−g}) + g (V − 1) e^{−g} / (1 + (V − 1) e^{−g})

(after Theorem 4.2 of "Calibrated Language Models and How to Find Them with Label Smoothing",
derived anew and not compared with the printed form). The minimum is where one logit stands g above
all others. Without √D, and with σ_h a figure of the entries, the "bound" lies above entropies that
exist (tests/eval). A softcap only shortens z.

Where V is large and r is not small, the bound is next to 0 and says nothing. These do, from 0 to 1:

    gap = (median H − bound) / log V     what of all uncertainty the answers keep above the bound
    target_gap = (H of the smoothed target − bound) / log V
"""

import numpy as np
from scipy.special import entr

from calibeval.io import InputError

VACUOUS = 1e-6  # nats; a bound below it excludes no answer that matters


def entropy_bound(sigma_c: float, sigma_h: float, hidden: int, vocabulary: int) -> float:
    """Least entropy in nats of the distribution over V tokens."""
    gap = sigma_c * np.sqrt(hidden) * sigma_h * np.sqrt(vocabulary / (vocabulary - 1))
    rest = (vocabulary - 1) * np.exp(-gap)
    return float(np.log1p(rest) + gap * rest / (1 + rest))


def smoothed_entropy(label_smoothing: float, vocabulary: int) -> float:
    """Entropy of the smoothed target: 1 − β + β/V on the label, β/V on each other token."""
    rest = label_smoothing / vocabulary
    return float(entr(1 - label_smoothing + rest) + (vocabulary - 1) * entr(rest))


def diagnose(engine, groups, label_smoothing: float) -> dict:
    """`summary` of the model of a `TransformersEngine` on jobs as scoring makes them."""
    import torch

    weight = engine.model.get_output_embeddings().weight.detach().float()
    if not weight.isfinite().all():
        raise InputError("the model's output layer is not finite: it has no bound")
    # σ_C² is the largest eigenvalue of the D × D matrix CᵀC: no V × D decomposition is needed.
    sigma_c = float(torch.linalg.eigvalsh(weight.T @ weight)[-1].clamp(min=0).sqrt())
    answers = []
    for _, hidden, logits in engine.states(groups):
        entropy = torch.distributions.Categorical(logits=logits[0].float()).entropy()
        answers.append((hidden[0].float().square().mean().sqrt().item(), entropy.item()))
    return summary(answers, *weight.shape, sigma_c, label_smoothing)


def summary(
    answers: list[tuple[float, float]],  # σ_h and entropy of each
    vocabulary: int,
    hidden: int,
    sigma_c: float,
    label_smoothing: float = 0.1,
) -> dict:
    """What was measured and what it says, in a sentence as well; entropies in nats."""
    sigma_h, entropies = map(np.array, zip(*answers, strict=True))
    bound = entropy_bound(sigma_c, sigma_h.max(), hidden, vocabulary)
    target, observed = smoothed_entropy(label_smoothing, vocabulary), float(np.median(entropies))
    gap = (observed - bound) / np.log(vocabulary)
    facts = f"its output layer allows entropies down to {bound:.3g} nats"
    if bound < VACUOUS:
        facts = f"the bound is vacuous here ({bound:.3g} nats)"
    hope, why = "has something to restrain here", "more certain than the smoothed target"
    if bound >= target:
        hope, why = "cannot be expected to help", "never more certain than smoothing asks"
    elif observed >= target:
        hope = "has little to restrain here"
        why = "less certain than the smoothed target; fine-tuning without it may change that"
    return {
        "vocabulary": vocabulary,
        "hidden": hidden,
        "sigma_c": sigma_c,
        "sigma_h": float(sigma_h.mean()),
        "sigma_h_largest": float(sigma_h.max()),
        "label_smoothing": label_smoothing,
        "questions": len(answers),
        "bound": bound,
        "target_entropy": target,
        "entropy": {k: float(getattr(np, k)(entropies)) for k in ("min", "median", "mean", "max")},
        "gap": float(gap),
        "target_gap": float((target - bound) / np.log(vocabulary)),
        "sentence": (
            f"Smoothing {hope}: {facts}, the target at β = {label_smoothing:g} has {target:.3g}, "
            f"and half of its answers are below {observed:.3g}, which is {gap:.3f} log |V| above "
            f"the bound; the answers are {why}."
        ),
    }
