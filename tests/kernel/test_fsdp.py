"""FSDP2 on two CPU ranks over gloo, against one process with torch's loss."""

import faulthandler
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from smoothce import patch_model, unpatch_model
from smoothce.hf_patch.head import LossSettings
from smoothce.hf_patch.patching import install

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
transformers = pytest.importorskip("transformers")
fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("torch's fully_shard is public since 2.6", allow_module_level=True)
tiny_models = pytest.importorskip("tiny_models")
from tiny_models import batch, expected, gradients, tiny  # noqa: E402

BETA, RANKS = 0.1, 2


def patch_and_shard(model, when):
    parts = (*model.model.layers, model.lm_head, model)
    if when == "after fully_shard":
        for part in parts:
            fsdp.fully_shard(part)
    patch_model(model, label_smoothing=BETA)
    if when != "after fully_shard":
        for part in parts:
            fsdp.fully_shard(part)


def sharded(model, when):
    source = model.state_dict()
    if when == "on meta":
        with torch.device("meta"):
            model = type(model)(model.config).train()
    patch_and_shard(model, when)
    if when == "on meta":
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


def assert_gradients(model, want):
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad.full_tensor(), want[name], rtol=1e-4, atol=1e-6, msg=name
        )


def check_gradients(when):
    model = tiny()
    want = gradients(model, expected(model, batch(), BETA))
    model = sharded(tiny(), when)
    for _ in range(2):
        model.zero_grad()
        model(**batch()).loss.backward()
        assert_gradients(model, want)
    unpatch_model(model)
    torch.testing.assert_close(model(**batch()).loss, tiny()(**batch()).loss)


def check_trls_loss():
    """TRL makes its loss of the statistics that the model gives it, and the classifier is gathered
    for its backward pass."""
    model = tiny()
    want = gradients(model, expected(model, batch(), BETA))
    model = tiny()
    # This implementation needs the classifier in its backward pass.
    install(model, LossSettings(label_smoothing=BETA, impl="reference"), for_trl=True)
    # With a policy, FSDP2 takes a copy of every dataclass among a module's arguments.
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.float32)
    for part in (*model.model.layers, model.lm_head, model):
        fsdp.fully_shard(part, mp_policy=policy)
    outputs = model(**batch(), fused_lm_head=True)
    (-outputs.log_probs.sum() / outputs.label_mask.sum()).backward()
    assert_gradients(model, want)


def check_a_mixtures_auxiliary_loss(when):
    model = tiny("MixtralForCausalLM", output_router_logits=True)
    outputs = model(**batch())
    plain = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), batch()["labels"][:, 1:].flatten()
    )
    want = outputs.loss - plain + expected(model, batch(), BETA)
    patch_and_shard(model, when)
    torch.testing.assert_close(model(**batch()).loss, want, rtol=1e-4, atol=1e-6)


def check_ranks_that_accelerate_gives_their_weights(rank):
    """Of which the first alone has any until then."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    # By itself accelerate shards on accelerators only.
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_XPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            cpu_ram_efficient_loading=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    )
    model = tiny()
    want = gradients(model, expected(model, batch(), BETA))
    model.zero_grad()
    if rank > 0:
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
    patch_model(model, label_smoothing=BETA)
    optimizer = torch.optim.SGD(model.parameters())
    prepared, _ = accelerator.prepare(model, optimizer)  # FSDP2 wants both
    prepared(**batch()).loss.backward()
    assert_gradients(prepared, want)


def work(rank, store):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # which accelerate asks for
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    checks = [
        partial(check_gradients, "before fully_shard"),
        partial(check_gradients, "on meta"),
        partial(check_gradients, "after fully_shard"),
        check_trls_loss,
        partial(check_a_mixtures_auxiliary_loss, "before fully_shard"),
        partial(check_a_mixtures_auxiliary_loss, "after fully_shard"),
        partial(check_ranks_that_accelerate_gives_their_weights, rank),
    ]
    for check in checks:
        # A rank that waits for one that will never come ends the test, with every thread's stack.
        faulthandler.dump_traceback_later(240, exit=True)
        check()
        dist.barrier()


def test_fsdp2_trains_as_one_process(tmp_path):
    """All in one start of the ranks, which takes longer than what they do."""
    pytest.importorskip("accelerate")
    mp.spawn(work, (str(tmp_path / "store"),), RANKS)
