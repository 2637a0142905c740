"""How certain can a language model's output layer be? The entropy bound and what is observed.

For logits z = C h with σ_C = ‖C‖₂ and ‖h‖₂ = √D σ_h, σ_h the root mean square of the entries of h:

    ‖z‖₂ ≤ r = σ_C √D σ_h,   g = r √(V / (V − 1)),
    H ≥ log(1 + (V − 1) e^{−g}) + g (V − 1) e^{−g} / (1 + (V − 1) e^{−g})

(after Theorem 4.2 of "Calibrated Language Models and How to Find Them with Label Smoothing",
derived anew and not compared with the printed form). The minimum
is where one logit stands g above all others. Without √D, and
with σ_h a figure of the entries, the "bound" lies above entropies that exist (tests/eval).
A temperature τ divides r by τ. A softcap c keeps logits within ±c: then the least entropy has some
k of them at c and the rest at −c, and both bounds hold.
"""

from dataclasses import asdict, dataclass

import numpy as np


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
    top = 1 - label_smoothing + rest
    tail = (vocabulary - 1) * rest * np.log(rest) if rest else 0.0
    return float(-(top * np.log(top) if top else 0.0) - tail)


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
    bound: float
    target_entropy: float
    entropy: dict[str, float]
    logit_distance: dict[str, float]
    questions: int

    @property
    def sentence(self) -> str:
        """Whether label smoothing can be expected to help this model, in plain words."""
        observed, target = self.entropy["median"], self.target_entropy
        facts = (
            f"its output layer allows entropies down to {self.bound:.3g} nats, the target at "
            f"β = {self.label_smoothing:g} has {target:.3g}, and half of its answers are below "
            f"{observed:.3g}"
        )
        if self.bound >= target:
            return (
                f"Smoothing cannot be expected to help: {facts}; the model cannot become more "
                f"certain than smoothing asks."
            )
        if observed >= target:
            return (
                f"Smoothing has little to restrain here: {facts}; the answers are less certain "
                f"than the smoothed target already. Fine-tuning without it may change that."
            )
        return (
            f"Smoothing can be expected to help: {facts}; the answers are more certain than the "
            f"smoothed target."
        )

    def as_dict(self) -> dict:
        """Every figure and the sentence."""
        return asdict(self) | {"sentence": self.sentence}


def diagnose(engine, groups, label_smoothing: float = 0.1, temperature: float = 1.0) -> Diagnosis:
    """Diagnose the model of a `TransformersEngine` on jobs as scoring makes them."""
    import torch

    head = engine.model.get_output_embeddings()
    weight = head.weight.detach().float()
    # σ_C² is the largest eigenvalue of the D × D matrix CᵀC: no V × D decomposition is needed.
    sigma_c = float(torch.linalg.eigvalsh(weight.T @ weight)[-1].clamp(min=0).sqrt())
    softcap = getattr(engine.model.config, "final_logit_softcapping", None)
    norms, entropies, distances = [], [], []
    for _, hidden, logits in engine.states(groups):
        z = logits[0].float() / temperature
        logprobs = z.log_softmax(-1)
        norms.append(hidden[0].float().norm().item())
        entropies.append(-(logprobs.exp() * logprobs).sum().item())
        distances.append((z.max() - z.mean()).item())
    vocabulary, hidden_size = weight.shape
    sigma_h = np.array(norms) / np.sqrt(hidden_size)
    return Diagnosis(
        vocabulary=vocabulary,
        hidden=hidden_size,
        sigma_c=sigma_c,
        sigma_h=float(sigma_h.mean()),
        sigma_h_largest=float(sigma_h.max()),
        softcap=softcap,
        temperature=temperature,
        label_smoothing=label_smoothing,
        bound=entropy_bound(
            sigma_c, float(sigma_h.max()), hidden_size, vocabulary, temperature, softcap
        ),
        target_entropy=smoothed_entropy(label_smoothing, vocabulary),
        entropy=spread(entropies),
        logit_distance=spread(distances),
        questions=len(norms),
    )


def spread(values: list[float]) -> dict[str, float]:
    """Least, quartiles, greatest and mean."""
    names = ("least", "lower_quartile", "median", "upper_quartile", "greatest")
    quantiles = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
    return dict(zip(names, map(float, quantiles), strict=True)) | {"mean": float(np.mean(values))}


def prepare_bound(of: Diagnosis, points: int = 60) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """{V: (hidden sizes, bounds)} with the model's own σ_C and σ_h, the plot behind `diagnose`."""
    sizes = np.geomspace(2, of.hidden * 16, points)
    fixed = of.temperature, of.softcap

    def bounds(vocabulary: int) -> np.ndarray:
        every = [entropy_bound(of.sigma_c, of.sigma_h, d, vocabulary, *fixed) for d in sizes]
        return np.array(every)

    vocabularies = (max(2, of.vocabulary // 4), of.vocabulary, of.vocabulary * 4)
    return {vocabulary: (sizes, bounds(vocabulary)) for vocabulary in vocabularies}


def plot_bound(of: Diagnosis, path) -> None:
    """Draw the bound against the hidden size for three vocabularies, and mark the model."""
    from matplotlib.figure import Figure

    from calibeval.report.figures import save

    figure = Figure(figsize=(4.6, 3.4), layout="constrained")
    axis = figure.subplots()
    for vocabulary, (sizes, bounds) in prepare_bound(of).items():
        axis.plot(sizes, bounds, lw=1.3, label=f"bound, |V| = {vocabulary:,}")
    axis.plot(of.hidden, of.bound, "o", color="black", ms=5, label="bound of this model")
    low, middle, high = (of.entropy[k] for k in ("lower_quartile", "median", "upper_quartile"))
    error = [[middle - low], [high - middle]]
    axis.errorbar(of.hidden, middle, error, fmt="s", color="#e45756", ms=4, label="observed")
    target = f"target, β = {of.label_smoothing:g}"
    axis.axhline(of.target_entropy, color="#888", ls="--", lw=0.9, label=target)
    axis.set(xscale="log", xlabel="hidden size D", ylabel="entropy (nats)", ylim=(0, None))
    axis.legend(fontsize="x-small")
    save(figure, path)
