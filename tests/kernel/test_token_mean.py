"""The factor in one process; tests/kernel/triton/test_vocab_parallel.py has it over ranks."""

import pytest
import torch
import torch.distributed as dist

from smoothce import token_mean_factor

TWO_TARGETS = torch.tensor([[5, 6, -100, 7], [8, -100, -100, -100]])  # 6 and 7: no row's first


@pytest.mark.parametrize(
    ("labels", "options", "factor"),
    [
        ([TWO_TARGETS], {}, 1 / 2),
        ([TWO_TARGETS, TWO_TARGETS], {}, 2 / 4),  # undoes what accumulation divides by
        ([TWO_TARGETS, TWO_TARGETS], {"steps": 4}, 4 / 4),
        ([TWO_TARGETS.where(TWO_TARGETS == 5, 9)], {"ignore_index": 9}, 1),  # no target, no 0 / 0
    ],
)
def test_a_factor_counts_valid_labels_without_each_rows_first(labels, options, factor):
    assert token_mean_factor(labels, **options) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("labels", "steps", "error", "message"),
    [
        ([], 1, ValueError, "micro-batches"),
        (TWO_TARGETS, 1, TypeError, "list of tensors, one a micro-batch"),
        ([[1, 2]], 1, TypeError, "list of tensors, one a micro-batch"),
        ([TWO_TARGETS], 0, ValueError, "steps must be 1 or more, not 0"),
    ],
)
def test_mistakes_are_named(labels, steps, error, message):
    with pytest.raises(error, match=message):
        token_mean_factor(labels, steps=steps)


def test_labels_on_the_cpu_are_refused_where_nccl_alone_sums_them(monkeypatch):
    """NCCL sums on GPUs alone. Its own error names no argument."""

    def all_reduce(tensor):
        raise RuntimeError("No backend type associated with device type cpu")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with pytest.raises(ValueError, match=r"labels are on cpu.*batch\.cuda\(\) for batch in"):
        token_mean_factor([TWO_TARGETS])
