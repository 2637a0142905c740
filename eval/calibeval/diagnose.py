"""How certain can a language model's output layer be? The entropy bound and what is observed.

For logits z = C h with σ_C = ‖C‖₂ and ‖h‖₂ = √D σ_h, σ_h the root mean square of the entries of h:

    ‖z‖₂ ≤ r = σ_C √D σ_h,   g = r √(V / (V − 1)),
    H ≥ log(1 + (V − 1) e^{−g}) + g (V − 1) e^{−g} / (1 + (V − 1) e^{−g})

(after Theorem 4.2 of "Calibrated Language Models and How to Find Them with Label Smoothing",
derived anew and not compared with the printed form). The minimum is where one logit stands g above
all others. Without √D, and with σ_h a figure of the entries, the "bound" lies above entropies that
exist (tests/eval). A temperature τ divides r by τ. A softcap c keeps logits within ±c: then the
least entropy has some k of them at c and the rest at −c, and both bounds hold.

Where V is large and r is not small, the bound is next to 0 and says nothing. These do, from 0 to 1:

    gap = (median H − bound) / log V     what of all uncertainty the answers keep above the bound
    target_gap = (H of the smoothed target − bound) / log V
    reach = (max z − mean z) / g′        what of the largest distance the likeliest token takes,
                                         g′ = r √((V − 1) / V), or 2c (V − 1) / V where that is less
"""

import numpy as np
from scipy.special import entr

from calibeval.io import InputError

VACUOUS = 1e-6  # nats; a bound below it excludes no answer that matters


def two_levels(gap: float | np.ndarray, high: int | np.ndarray, vocabulary: int):
    """Entropy in nats when `high` of V equal logits stand `gap` above all others, equal too."""
    rest = (vocabulary - high) * np.exp(-gap)
    return np.log(high + rest) + gap * rest / (high + rest)


def entropy_bound(
    sigma_c: float,
    sigma_h: float,
    hidden: int,
    vocabulary: int,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> float:
    """Least entropy in nats of the distribution over V tokens."""
    radius = sigma_c * np.sqrt(hidden) * sigma_h / temperature
    bound = two_levels(radius * np.sqrt(vocabulary / (vocabulary - 1)), 1, vocabulary)
    if softcap:
        capped = two_levels(2 * softcap / temperature, np.arange(1, vocabulary), vocabulary)
        bound = max(bound, capped.min())
    return float(bound)


def smoothed_entropy(label_smoothing: float, vocabulary: int) -> float:
    """Entropy of the smoothed target: 1 − β + β/V on the label, β/V on each other token."""
    rest = label_smoothing / vocabulary
    return float(entr(1 - label_smoothing + rest) + (vocabulary - 1) * entr(rest))


def diagnose(engine, groups, label_smoothing: float, temperature: float) -> dict:
    """`summary` of the model of a `TransformersEngine` on jobs as scoring makes them."""
    import torch

    weight = engine.model.get_output_embeddings().weight.detach().float()
    if not weight.isfinite().all():
        raise InputError("the model's output layer is not finite: it has no bound")
    # σ_C² is the largest eigenvalue of the D × D matrix CᵀC: no V × D decomposition is needed.
    sigma_c = float(torch.linalg.eigvalsh(weight.T @ weight)[-1].clamp(min=0).sqrt())
    softcap = getattr(engine.model.config, "final_logit_softcapping", None)
    answers = []
    for _, hidden, logits in engine.states(groups):
        z = logits[0].float() / temperature
        sigma_h = hidden[0].float().square().mean().sqrt()
        entropy = torch.distributions.Categorical(logits=z).entropy()
        answers.append((sigma_h.item(), entropy.item(), (z.max() - z.mean()).item()))
    sizes = {"vocabulary": weight.shape[0], "hidden": weight.shape[1]}
    options = {"softcap": softcap, "temperature": temperature, "label_smoothing": label_smoothing}
    return summary(answers, sigma_c=sigma_c, **sizes, **options)


def summary(
    answers: list[tuple[float, float, float]],  # σ_h, entropy, max z − mean z of each
    *,
    vocabulary: int,
    hidden: int,
    sigma_c: float,
    softcap: float | None = None,
    temperature: float = 1.0,
    label_smoothing: float = 0.1,
) -> dict:
    """What was measured and what it says, in a sentence as well; entropies in nats."""
    sigma_h, entropies, distances = map(np.array, zip(*answers, strict=True))
    largest, share = sigma_h.max(), (vocabulary - 1) / vocabulary
    bound = entropy_bound(sigma_c, largest, hidden, vocabulary, temperature, softcap)
    target, observed = smoothed_entropy(label_smoothing, vocabulary), float(np.median(entropies))
    farthest = sigma_c * np.sqrt(hidden) * largest * np.sqrt(share)
    farthest = min(farthest, 2 * (softcap or np.inf) * share) / temperature
    gap = (observed - bound) / np.log(vocabulary)
    facts = f"its output layer allows entropies down to {bound:.3g} nats"
    if bound < VACUOUS:
        facts = f"the bound is vacuous here ({bound:.3g} nats)"
    facts += (
        f", the target at β = {label_smoothing:g} has {target:.3g}, and half of its answers are "
        f"below {observed:.3g}, which is {gap:.3f} log |V| above the bound"
    )
    hope, why = "can be expected to help", "more certain than the smoothed target"
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
        "sigma_h_largest": float(largest),
        "softcap": softcap,
        "temperature": temperature,
        "label_smoothing": label_smoothing,
        "questions": len(answers),
        "bound": bound,
        "target_entropy": target,
        "entropy": spread(entropies),
        "logit_distance": spread(distances),
        "gap": float(gap),
        "target_gap": float((target - bound) / np.log(vocabulary)),
        "reach": float(np.median(distances) / farthest),
        "sentence": f"Smoothing {hope}: {facts}; the answers are {why}.",
    }


def spread(values: np.ndarray) -> dict[str, float]:
    """Least, quartiles, greatest and mean."""
    names = ("least", "lower_quartile", "median", "upper_quartile", "greatest")
    quantiles = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
    return dict(zip(names, map(float, quantiles), strict=True)) | {"mean": float(values.mean())}


def plot_bound(of: dict, path) -> None:
    """Draw the bound against the hidden size for three vocabularies, and mark the model."""
    from matplotlib.figure import Figure

    from calibeval.report.figures import save

    figure = Figure(figsize=(4.6, 3.4), layout="constrained")
    axis, hidden, v = figure.subplots(), of["hidden"], of["vocabulary"]
    sigmas, fixed = (of["sigma_c"], of["sigma_h_largest"]), (of["temperature"], of["softcap"])
    sizes = np.geomspace(2, hidden * 16, 60)
    for size in (max(2, v // 4), v, v * 4):
        bounds = [entropy_bound(*sigmas, d, size, *fixed) for d in sizes]
        axis.plot(sizes, bounds, lw=1.3, label=f"bound, |V| = {size:,}")
    axis.plot(hidden, of["bound"], "o", color="black", ms=5, label="bound of this model")
    low, middle, high = (of["entropy"][k] for k in ("lower_quartile", "median", "upper_quartile"))
    error = [[middle - low], [high - middle]]
    axis.errorbar(hidden, middle, error, fmt="s", color="#e45756", ms=4, label="observed")
    target = f"target, β = {of['label_smoothing']:g}"
    axis.axhline(of["target_entropy"], color="#888", ls="--", lw=0.9, label=target)
    axis.set(xscale="log", xlabel="hidden size D", ylabel="entropy (nats)", ylim=(0, None))
    axis.legend(fontsize="x-small")
    save(figure, path)
