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

from dataclasses import asdict, dataclass, replace

import numpy as np
from scipy.special import entr

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


@dataclass(frozen=True)
class Diagnosis:
    """A checkpoint's bound and what it says on a task, entropies in nats."""

    vocabulary: int
    hidden: int
    sigma_c: float
    sigma_h: float
    sigma_h_largest: float
    softcap: float | None
    temperature: float
    label_smoothing: float
    entropy: dict[str, float]  # of the answers: least, quartiles, greatest, mean
    logit_distance: dict[str, float]  # max z − mean z
    questions: int

    @property
    def bound(self) -> float:
        """`entropy_bound` at the largest σ_h."""
        sigmas = self.sigma_c, self.sigma_h_largest
        return entropy_bound(*sigmas, self.hidden, self.vocabulary, self.temperature, self.softcap)

    @property
    def target_entropy(self) -> float:
        """`smoothed_entropy` at this β."""
        return smoothed_entropy(self.label_smoothing, self.vocabulary)

    def gap(self, entropy: float) -> float:
        """(entropy − bound) / log V."""
        return float((entropy - self.bound) / np.log(self.vocabulary))

    @property
    def reach(self) -> float:
        """Median of max z − mean z over the largest that the output layer allows."""
        share = (self.vocabulary - 1) / self.vocabulary
        radius = self.sigma_c * np.sqrt(self.hidden) * self.sigma_h_largest
        largest = min(radius * np.sqrt(share), 2 * (self.softcap or np.inf) * share)
        return float(self.logit_distance["median"] * self.temperature / largest)

    @property
    def sentence(self) -> str:
        """Whether label smoothing can be expected to help this model, in plain words."""
        observed, target = self.entropy["median"], self.target_entropy
        facts = f"its output layer allows entropies down to {self.bound:.3g} nats"
        if self.bound < VACUOUS:
            facts = f"the bound is vacuous here ({self.bound:.3g} nats)"
        facts += (
            f", the target at β = {self.label_smoothing:g} has {target:.3g}, and half of its "
            f"answers are below {observed:.3g}, a gap of {self.gap(observed):.3f} log |V|"
        )
        if self.bound >= target:
            hope, why = "cannot be expected to help", "the model cannot become more certain than"
            why += " smoothing asks"
        elif observed >= target:
            hope, why = "has little to restrain here", "the answers are less certain than the"
            why += " smoothed target already; fine-tuning without it may change that"
        else:
            hope, why = "can be expected to help", "the answers are more certain than the"
            why += " smoothed target"
        return f"Smoothing {hope}: {facts}; {why}."

    def as_dict(self) -> dict:
        """Every figure and the sentence."""
        found = {k: getattr(self, k) for k in ("bound", "target_entropy", "reach", "sentence")}
        gaps = {"gap": self.entropy["median"], "target_gap": self.target_entropy}
        return asdict(self) | found | {name: self.gap(value) for name, value in gaps.items()}


def diagnose(engine, groups, label_smoothing: float = 0.1, temperature: float = 1.0) -> Diagnosis:
    """Diagnose the model of a `TransformersEngine` on jobs as scoring makes them."""
    import torch

    weight = engine.model.get_output_embeddings().weight.detach().float()
    # σ_C² is the largest eigenvalue of the D × D matrix CᵀC: no V × D decomposition is needed.
    sigma_c = float(torch.linalg.eigvalsh(weight.T @ weight)[-1].clamp(min=0).sqrt())
    softcap = getattr(engine.model.config, "final_logit_softcapping", None)
    sigma_h, entropies, distances = [], [], []
    for _, hidden, logits in engine.states(groups):
        z = logits[0].float() / temperature
        sigma_h.append(hidden[0].float().square().mean().sqrt().item())
        entropies.append(torch.distributions.Categorical(logits=z).entropy().item())
        distances.append((z.max() - z.mean()).item())
    return Diagnosis(
        vocabulary=weight.shape[0],
        hidden=weight.shape[1],
        sigma_c=sigma_c,
        sigma_h=float(np.mean(sigma_h)),
        sigma_h_largest=max(sigma_h),
        softcap=softcap,
        temperature=temperature,
        label_smoothing=label_smoothing,
        entropy=spread(entropies),
        logit_distance=spread(distances),
        questions=len(sigma_h),
    )


def spread(values: list[float]) -> dict[str, float]:
    """Least, quartiles, greatest and mean."""
    names = ("least", "lower_quartile", "median", "upper_quartile", "greatest")
    quantiles = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
    return dict(zip(names, map(float, quantiles), strict=True)) | {"mean": float(np.mean(values))}


def plot_bound(of: Diagnosis, path) -> None:
    """Draw the bound against the hidden size for three vocabularies, and mark the model."""
    from matplotlib.figure import Figure

    from calibeval.plots import save

    figure = Figure(figsize=(4.6, 3.4), layout="constrained")
    axis = figure.subplots()
    sizes = np.geomspace(2, of.hidden * 16, 60)
    for v in (max(2, of.vocabulary // 4), of.vocabulary, of.vocabulary * 4):
        bounds = [replace(of, hidden=size, vocabulary=v).bound for size in sizes]
        axis.plot(sizes, bounds, lw=1.3, label=f"bound, |V| = {v:,}")
    axis.plot(of.hidden, of.bound, "o", color="black", ms=5, label="bound of this model")
    low, middle, high = (of.entropy[k] for k in ("lower_quartile", "median", "upper_quartile"))
    error = [[middle - low], [high - middle]]
    axis.errorbar(of.hidden, middle, error, fmt="s", color="#e45756", ms=4, label="observed")
    target = f"target, β = {of.label_smoothing:g}"
    axis.axhline(of.target_entropy, color="#888", ls="--", lw=0.9, label=target)
    axis.set(xscale="log", xlabel="hidden size D", ylabel="entropy (nats)", ylim=(0, None))
    axis.legend(fontsize="x-small")
    save(figure, path)
