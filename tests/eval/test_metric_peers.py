"""The metrics against the packages that people use, off those packages' known bugs.

Runs where the peers are installed: tests/eval/peers_env.sh makes such an environment.
"""

import os

import numpy as np
import pytest
import torch
from made_records import draw

from calibeval import metrics
from calibeval.measures import definitions
from calibeval.measures.samples import Sample, Scores

pytestmark = pytest.mark.slow


cases = pytest.mark.parametrize(
    ("n", "sharpness"), [(100, 1.0), (1500, 2.0), (1500, 1.0), (5000, 0.5)]
)


@cases
def test_uncertainty_calibrations_debiased_error(n, sharpness):
    """The debiased l2 error of Kumar et al. 2019.

    Its error is for one confidence a bin, so confidences are rounded to that.
    """
    pytest.importorskip("calibration")
    from calibration.utils import bin as fill_bins
    from calibration.utils import unbiased_square_ce

    scores = Scores(*draw(n, sharpness, 3))
    # It refuses bins with fewer than two answers, so the bins cover the filled range only.
    confidence = (np.floor(scores.confidence * 15).clip(max=14) + 0.5) / 15
    data = list(zip(confidence, scores.correct, strict=True))
    filled = [b for b in fill_bins(data, list(np.arange(1, 16) / 15)) if len(b) > 1]
    p, y = np.array([pair for b in filled for pair in b]).T
    logprobs = np.log(np.stack([p, np.minimum(p, 1 - p) / 2], 1))
    rounded = Scores(logprobs, np.where(y == 1, 0, 1))
    expected = max(unbiased_square_ce(filled), 0)
    found = definitions.rms_debiased(Sample.observed(rounded))[0] ** 2
    assert found == pytest.approx(expected, abs=1e-12)


@cases
def test_scikit_learns_log_loss(n, sharpness):
    metrics = pytest.importorskip("sklearn.metrics")
    stated, labels = draw(n, sharpness, 5)
    expected = metrics.log_loss(labels, np.exp(stated), labels=range(4))
    assert definitions.nll(Sample.observed(Scores(stated, labels)))[0] == pytest.approx(
        expected, abs=1e-9
    )


@cases
def test_scikit_learns_auroc(n, sharpness):
    metrics = pytest.importorskip("sklearn.metrics")
    scores = Scores(*draw(n, sharpness, 5))
    expected = metrics.roc_auc_score(scores.correct, scores.confidence)
    assert definitions.auroc(Sample.observed(scores))[0] == pytest.approx(expected, abs=1e-12)


@cases
def test_brier_is_its_definition(n, sharpness):
    stated, labels = draw(n, sharpness, 5)
    expected = ((np.exp(stated) - np.eye(4)[labels]) ** 2).sum(1).mean()
    assert definitions.brier(Sample.observed(Scores(stated, labels)))[0] == pytest.approx(
        expected, abs=1e-12
    )


@cases
def test_hendrycks(n, sharpness, monkeypatch):
    """`rmsce` and `ece` of its calib_tools.py, from a checkout."""
    checkout = os.environ.get("HENDRYCKS_TEST")
    if not checkout:
        pytest.skip("HENDRYCKS_TEST does not name a checkout of hendrycks/test")
    monkeypatch.syspath_prepend(checkout)
    import calib_tools

    stated, labels = draw(n, sharpness, 6)
    probs = np.exp(stated)
    # It folds a confidence of exactly one half as well.
    probs[::7] = [0.5, 0.2, 0.2, 0.1]
    scores = Scores(np.log(probs), labels)
    expected = calib_tools.rmsce(scores.correct.astype(int), scores.confidence)
    assert definitions.rms_hendrycks(Sample.observed(scores))[0] == pytest.approx(
        expected, abs=1e-12
    )
    expected = calib_tools.ece(labels, probs, num_bins=15)
    assert definitions.ece(Sample.observed(scores))[0] == pytest.approx(expected, abs=1e-12)


@cases
def test_relplots_smooth_ece(n, sharpness):
    """The error with its bandwidth, and the curve."""
    relplot = pytest.importorskip("relplot")
    from relplot.kernels import ReflectedGaussianKernel

    sample = Sample.observed(Scores(*draw(n, sharpness, 0)))
    p = sample.scores.confidence
    y = sample.scores.correct
    expected, expected_bandwidth = relplot.smECE(p, y, return_width=True)
    error, bandwidth = definitions.smooth_ece_at(sample)
    assert error[0] == pytest.approx(expected, abs=1e-9)
    assert bandwidth[0] == expected_bandwidth
    mesh = np.linspace(0, 1, 101)
    above_diagonal, _ = ReflectedGaussianKernel(expected_bandwidth).smooth(p, y - p, mesh)
    curve = definitions.smooth_curve(sample, expected_bandwidth, mesh)[0]
    assert curve == pytest.approx(mesh + above_diagonal, abs=1e-9)


@cases
def test_isotonic_regression(n, sharpness):
    """CORP's recalibration; with ties, as both pool them."""
    isotonic = pytest.importorskip("sklearn.isotonic")
    stated, labels = draw(n, sharpness, 0)
    for logprobs in (stated, np.round(stated, 1)):
        sample = Sample.observed(Scores(logprobs, labels))
        p = sample.scores.confidence
        fitted = isotonic.IsotonicRegression().fit_transform(p, sample.scores.correct)
        expected = fitted[sample.scores.order]
        assert definitions.isotonic_fit(sample)[0] == pytest.approx(expected, abs=1e-9)


@cases
@pytest.mark.parametrize("bins", [10, 15])
def test_torchmetrics(n, sharpness, bins):
    """Calibration errors in l1 and l2, of choices and of an event, and the area under ROC."""
    functional = pytest.importorskip("torchmetrics.functional.classification")
    from torchmetrics.functional.classification.calibration_error import _ce_compute

    stated, labels = draw(n, sharpness, 3)
    given = torch.tensor(np.exp(stated)), torch.tensor(labels)
    confidence, best = given[0].max(1)
    correct = (best == given[1]).double()
    for norm, metric in (("l1", metrics.ece), ("l2", metrics.rms)):
        # It rounds the confidences of choices to float32, then calls this.
        expected = _ce_compute(confidence, correct, bins, norm)
        assert metric(*given, bins) == pytest.approx(expected.item(), abs=1e-9)
        rounded = functional.multiclass_calibration_error(
            *given, num_classes=4, n_bins=bins, norm=norm
        )
        assert metric(*given, bins) == pytest.approx(rounded.item(), abs=1e-6)
    event = given[0][:, 0], (given[1] == 0).int()
    expected = functional.binary_calibration_error(*event, norm="l1", n_bins=bins)
    assert metrics.ece(*event, bins) == pytest.approx(expected.item(), abs=1e-9)
    # Its area is a float32, whatever the input is.
    expected = functional.binary_auroc(*event)
    assert metrics.auroc(*event) == pytest.approx(expected.item(), abs=1e-6)
