"""The paper's kernels: right without the filter, biased as described with it."""

import pytest
import torch
from loss_check import DEVICE, error, gradients, inputs

from smoothce import paper, reference
from smoothce.options import Options


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_unfiltered_equals_the_reference(sort, reduction):
    data = inputs(37, 50, 20, masked=0.3)
    options = Options(label_smoothing=0.1, filter_eps=None, reduction=reduction)
    expected = gradients(reference.loss, *data, options)

    def loss(*args):
        return paper.loss(*args, sort=sort)

    for a, b in zip(gradients(loss, *data, options), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_filter_drops_whole_tiles_and_their_smoothing():
    v = 96
    z, _, _, _ = inputs(16, 1, v, spread=1.0)
    z = torch.cat([z[:, :16] + 12, z[:, 16:]], 1)
    labels = torch.zeros(16, dtype=torch.long, device=DEVICE)
    options = Options(label_smoothing=0.1, filter_eps=0.01)
    eye = torch.eye(v, device=DEVICE)
    _, d_hidden, _ = gradients(paper.loss, z, eye, labels, None, options)
    _, exact, _ = gradients(reference.loss, z, eye, labels, None, options)
    if paper.kernels.TILE["WIDTH"] == 16:
        assert (d_hidden == 0).sum() == 16 * 80
        assert d_hidden.sum(1).min() > 0.5 * 0.1 * 80 / 96 / 16  # no longer sums to zero
        assert 1e-4 < error(d_hidden, exact) < 0.5
