"""The factor in one process; tests/kernel/triton/test_vocab_parallel.py has it over ranks."""

import pytest
import torch
import torch.distributed as dist

from smoothce import token_mean_factor

TWO_TARGETS = torch.tensor([[5, 6, -100, 7], [8, -100, -100, -100]])  # 6 and 7: no row's first


def test_valid_labels_are_counted_without_each_rows_first():
    assert token_mean_factor([TWO_TARGETS]) == pytest.approx(1 / 2)


def test_steps_undo_what_gradient_accumulation_divides_by():
    assert token_mean_factor([TWO_TARGETS, TWO_TARGETS]) == pytest.approx(2 / 4)
    assert token_mean_factor([TWO_TARGETS, TWO_TARGETS], steps=4) == pytest.approx(4 / 4)


def test_without_a_valid_label_nothing_is_divided_by_zero():
    no_targets = TWO_TARGETS.where(TWO_TARGETS == 5, 9)
    assert token_mean_factor([no_targets], ignore_index=9) == 1


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
