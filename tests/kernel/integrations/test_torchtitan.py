"""torchtitan's own model and the trainer's hooks for a loss that runs the head."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

pytest.importorskip("torchtitan.components.loss")
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.models import llama3

from smoothce.integrations.torchtitan import SmoothedLoss

BETA = 0.2


def tiny():
    """torchtitan's debug model without its layers, whose attention needs a GPU."""
    torch.manual_seed(0)
    model = llama3.llama3_configs["debugmodel"](attn_backend="flex").build()
    model.layers.clear()
    model.init_weights()
    return model.train()


def data(model, rows=2, tokens=8):
    vocabulary = model.lm_head.weight.shape[0]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (rows, tokens), generator=generator)
    labels = torch.randint(vocabulary, (rows, tokens), generator=generator)
    labels[0, :3] = -100
    return ids, labels


def gradients(model, loss_of):
    """Of a function of nothing: gradients are zero before its forward, in which some are made."""
    model.zero_grad()
    loss_of().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def dense(model, ids, labels, beta):
    logits = model(ids).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), label_smoothing=beta, reduction="sum") / 13


def hooked(model):
    """The loss as the trainer makes it, and the model without its head."""
    loss = SmoothedLoss.Config(label_smoothing=BETA).build(compile_config=None)
    assert isinstance(loss, ChunkedLossWrapper)  # by which the trainer knows to call what follows
    loss.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    return loss


def test_an_update_without_tokens_is_zero():
    model = tiny()
    ids, labels = data(model)
    hidden_of = hooked(model)
    loss, _ = hidden_of(model(ids), labels.fill_(-100), torch.tensor(0))
    assert loss == 0


def test_loss_and_gradients():
    model = tiny()
    ids, labels = data(model)
    want = dense(model, ids, labels, BETA)
    theirs = gradients(model, lambda: dense(model, ids, labels, BETA))
    loss = hooked(model)
    found, metrics = loss(model(ids), labels, torch.tensor(13.0))
    assert metrics == {}
    torch.testing.assert_close(found.detach(), want.detach(), rtol=1e-5, atol=1e-6)
    ours = gradients(model, lambda: loss(model(ids), labels, torch.tensor(13.0))[0])
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


def work(rank, store):
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = tiny()
    ids, labels = data(model)
    theirs = gradients(model, lambda: dense(model, ids, labels, BETA))
    fully_shard(model.lm_head)
    fully_shard(model)
    loss = hooked(model)
    for _ in range(2):
        ours = gradients(model, lambda: loss(model(ids), labels, torch.tensor(13.0))[0])
        for name, gradient in theirs.items():
            found = ours[name].full_tensor()
            assert (found - gradient).norm() <= 1e-5 * gradient.norm(), name
    dist.barrier()


@pytest.mark.slow
def test_sharded_by_fsdp2(tmp_path):
    torch.multiprocessing.spawn(work, (str(tmp_path / "store"),), 2)


def test_validation_is_of_the_plain_loss():
    model = tiny()
    ids, labels = data(model)
    with torch.no_grad():
        want = dense(model, ids, labels, 0.0)
        loss = hooked(model)
        found, _ = loss(model(ids), labels, torch.tensor(13.0))
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def test_a_head_that_is_trained_alone_is_smoothed():
    """Hidden states of a frozen decoder need no gradient, and it is training all the same."""
    model = tiny()
    ids, labels = data(model)
    want = dense(model, ids, labels, BETA)
    loss = hooked(model)
    found, _ = loss(model(ids).detach(), labels, torch.tensor(13.0))
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
