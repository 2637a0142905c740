"""The metrics against the packages that people use, off those packages' known bugs.

Runs where the peers are installed: tests/eval/peers_env.sh makes such an environment.
"""

import os

import numpy as np
import pytest
from made_records import draw

from calibeval import measures
from calibeval.measures import Sample, Scores

pytestmark = pytest.mark.slow


cases = pytest.mark.parametrize(
    ("n", "sharpness"), [(100, 1.0), (1500, 2.0), (1500, 1.0), (5000, 0.5)]
)


@cases
def test_uncertainty_calibration(n, sharpness):
    """ECE, and the debiased l2 error of Kumar et al. 2019.

    Its debiased error is for one confidence a bin, so confidences are rounded to that.
    """
    calibration = pytest.importorskip("calibration")
    from calibration.utils import bin as fill
    from calibration.utils import unbiased_square_ce

    said, labels = draw(n, sharpness, 3)
    of, probs = Scores(said, labels), np.exp(said)
    theirs = calibration.get_ece(probs, labels, num_bins=15)
    assert measures.ece(Sample(of))[0] == pytest.approx(theirs, abs=1e-9)
    # It refuses bins with fewer than two answers, so the bins cover the filled range only.
    confidence = (np.floor(of.confidence * 15).clip(max=14) + 0.5) / 15
    data = list(zip(confidence, of.correct, strict=True))
    filled = [b for b in fill(data, list(np.arange(1, 16) / 15)) if len(b) > 1]
    p, y = np.array([pair for b in filled for pair in b]).T
    sub = Scores(np.log(np.stack([p, np.minimum(p, 1 - p) / 2], 1)), np.where(y == 1, 0, 1))
    theirs = unbiased_square_ce(filled)
    assert measures.rms_debiased(Sample(sub))[0] ** 2 == pytest.approx(max(theirs, 0), abs=1e-12)


@cases
def test_scikit_learn(n, sharpness):
    """NLL, Brier and AUROC."""
    metrics = pytest.importorskip("sklearn.metrics")
    said, labels = draw(n, sharpness, 5)
    of, probs = Scores(said, labels), np.exp(said)
    expected = metrics.log_loss(labels, probs, labels=range(4))
    assert measures.nll(Sample(of))[0] == pytest.approx(expected, abs=1e-9)
    expected = ((probs - np.eye(4)[labels]) ** 2).sum(1).mean()
    assert measures.brier(Sample(of))[0] == pytest.approx(expected, abs=1e-12)
    expected = metrics.roc_auc_score(of.correct, of.confidence)
    assert measures.auroc(Sample(of))[0] == pytest.approx(expected, abs=1e-12)


@cases
def test_hendrycks(n, sharpness, monkeypatch):
    """`rmsce` and `ece` of its calib_tools.py, from a checkout."""
    checkout = os.environ.get("HENDRYCKS_TEST")
    if not checkout:
        pytest.skip("HENDRYCKS_TEST does not name a checkout of hendrycks/test")
    monkeypatch.syspath_prepend(checkout)
    import calib_tools

    said, labels = draw(n, sharpness, 6)
    probs = np.exp(said)
    # It folds a confidence of exactly one half as well.
    probs[::7] = [0.5, 0.2, 0.2, 0.1]
    of = Scores(np.log(probs), labels)
    theirs = calib_tools.rmsce(of.correct.astype(int), of.confidence)
    assert measures.rms_hendrycks(Sample(of))[0] == pytest.approx(theirs, abs=1e-12)
    theirs = calib_tools.ece(labels, probs, num_bins=15)
    assert measures.ece(Sample(of))[0] == pytest.approx(theirs, abs=1e-12)


@cases
def test_relplot(n, sharpness):
    """Smooth ECE with its bandwidth, and the curve."""
    relplot = pytest.importorskip("relplot")
    from relplot.kernels import ReflectedGaussianKernel

    of = Sample(Scores(*draw(n, sharpness, 0)))
    p, y = of.scores.confidence, of.scores.correct
    expected, width = relplot.smECE(p, y, return_width=True)
    found, sigma = measures.smooth_ece_at(of)
    assert found[0] == pytest.approx(expected, abs=1e-9) and sigma[0] == width
    mesh = np.linspace(0, 1, 101)
    theirs, _ = ReflectedGaussianKernel(width).smooth(p, y - p, mesh)
    curve = measures.smooth_curve(of, width, mesh)[0]
    assert curve == pytest.approx(mesh + theirs, abs=1e-9)


@cases
def test_isotonic_regression(n, sharpness):
    """CORP's recalibration; with ties, as both pool them."""
    isotonic = pytest.importorskip("sklearn.isotonic")
    said, labels = draw(n, sharpness, 0)
    for logprobs in (said, np.round(said, 1)):
        of = Sample(Scores(logprobs, labels))
        p, y = of.scores.confidence, of.scores.correct
        expected = isotonic.IsotonicRegression().fit_transform(p, y)
        assert measures.recalibrated(of)[0] == pytest.approx(expected, abs=1e-9)
