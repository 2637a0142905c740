"""FSDP2 on two CPU ranks over gloo, against one process with torch's loss."""

import faulthandler
import os
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from smoothce import patch_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
transformers = pytest.importorskip("transformers")
fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("torch's fully_shard is public since 2.6", allow_module_level=True)
tiny_models = pytest.importorskip("tiny_models")
from tiny_models import batch, expected, gradients, tiny  # noqa: E402

BETA, RANKS = 0.1, 2


def sharded(model, on_meta):
    """Patched before `fully_shard`, where it cannot run yet if it is on the meta device."""
    source = model.state_dict()
    if on_meta:
        with torch.device("meta"):
            model = type(model)(model.config).train()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch_model(model, label_smoothing=BETA)
    assert any("meta device" in str(warning.message) for warning in told) == on_meta
    for layer in (*model.model.layers, model.lm_head, model):
        fsdp.fully_shard(layer)
    if on_meta:
        rotary = tiny().model.rotary_emb
        model.to_empty(device="cpu")
        model.model.rotary_emb.inv_freq = rotary.inv_freq
        model.model.rotary_emb.original_inv_freq = rotary.inv_freq.clone()
        for name, parameter in model.named_parameters():
            shards = torch.distributed.tensor.distribute_tensor(
                source[name], parameter.device_mesh, parameter.placements
            )
            parameter.data.copy_(shards)
    return model


def work(rank, store, on_meta):
    faulthandler.dump_traceback_later(240, exit=True)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    model = tiny()
    want = gradients(model, expected(model, batch(), BETA))
    model = sharded(tiny(), on_meta)
    for _ in range(2):
        model.zero_grad()
        model(**batch()).loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.grad.full_tensor(), want[name], rtol=1e-4, atol=1e-6, msg=name
            )
    dist.barrier()


@pytest.mark.parametrize("on_meta", [False, True])
def test_gradients(on_meta, tmp_path):
    mp.spawn(work, (str(tmp_path / "store"), on_meta), RANKS)
