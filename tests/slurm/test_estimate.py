"""Memory and time of a training step: by hand, and as runs were measured."""

import json

import pytest
import yaml
from safetensors.torch import save_file

from sweeps import estimate, plan, preflight

GIB = 1 << 30
SHAPE = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
LLAMA_8B = SHAPE | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA_1B = SHAPE | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
P8, P1 = 8_030_261_248, 1_235_814_400
PAPER = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "max_seq_length": 2048,
    "gradient_checkpointing": True,
    "use_flash_attn": True,
    "attn_implementation": None,
    "loss_impl": "fused",
}
SHORT = PAPER | {"max_seq_length": 1024, "gradient_checkpointing": False, "use_flash_attn": False}
BUILTIN = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "max_seq_length": 2048,
    "gradient_checkpointing": False,
    "packing": None,
    "max_tokens": 16384,
    "loss_implementation": "auto",
}


@pytest.mark.parametrize(("ranks", "states"), [(4, 32.12e9), (8, 16.06e9)])
def test_llama_3_8b_under_zero_3(ranks, states):
    """By hand, of 8,192 tokens: a layer keeps 8192 (81920 + 4096 + 114688) bytes, 1.644e9."""
    parts = estimate.memory(LLAMA_8B, P8, PAPER, ranks, {"stage": 3})
    assert parts["states"] == pytest.approx(states, rel=1e-3)
    assert parts["weights"] == 2e9
    assert parts["activations"] == pytest.approx(32 * 8192 * 4096 * 2 + 1.644e9, rel=1e-3)
    assert parts["loss"] == pytest.approx(2.101e9, rel=1e-3)
    logits = estimate.memory(LLAMA_8B, P8, PAPER | {"loss_impl": "torch"}, ranks, {"stage": 3})
    assert logits["loss"] - parts["loss"] == 12 * 8192 * 128256
    # 262,144 tokens of 4.98e10 FLOPs, among 8 GPUs of 3.36e14 a second: 4.9 s.
    assert estimate.seconds(LLAMA_8B, P8, PAPER, 989e12) == pytest.approx(4.85, rel=1e-2)


@pytest.mark.parametrize(
    ("zero", "bytes_each"),
    [
        ({}, 16),
        ({"stage": 1}, 4 + 12 / 4),
        ({"stage": 2}, 2 + 14 / 4),
        ({"stage": 3}, 4),
        ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, 1),
    ],
)
def test_states_are_those_of_the_zero_paper(zero, bytes_each):
    parts = estimate.memory(LLAMA_8B, P8, PAPER, 4, zero)
    assert parts["states"] == pytest.approx(bytes_each * P8)


@pytest.mark.parametrize(
    ("model", "train", "ranks", "zero", "measured"),
    [
        (LLAMA_1B, SHORT, 2, {"stage": 3}, 32.1),  # patches/README.md
        (LLAMA_1B, SHORT | {"loss_impl": "torch"}, 2, {"stage": 3}, 37.5),
        (LLAMA_8B, PAPER, 4, {"stage": 3}, 37.0),
        (LLAMA_8B, PAPER | {"loss_impl": "torch"}, 4, {"stage": 3}, 46.8),
        (LLAMA_1B, BUILTIN, 1, {}, 42.3),  # slurm/sweeps/trainer/README.md
        (LLAMA_1B, BUILTIN | {"gradient_checkpointing": True}, 1, {}, 23.1),
    ],
)
def test_measured_peaks_are_within_the_margin(model, train, ranks, zero, measured):
    parameters = P8 if model is LLAMA_8B else P1
    total = sum(estimate.memory(model, parameters, train, ranks, zero).values()) / GIB
    assert measured <= total <= measured * (1 + estimate.MARGIN)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", (80, 989e12)),
        ("h200", (141, 989e12)),
        ("a100", (40, 312e12)),
        ("nvidia_a100-sxm4-80gb", (80, 312e12)),
        ("v100", None),
        ("l40", None),  # no l4
        ("NVIDIA RTX A4000", None),  # no a40
        ("nvidia_h100_80gb_hbm3_1g.10gb", (10, 989e12 / 7)),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", (20, 312e12 * 3 / 7)),
    ],
)
def test_gpus_by_their_names(name, known):
    assert estimate.gpu(name) == known


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "h100",
            "about 40 GB a GPU ± 15%: states 32.1, weights 2.0, activations 3.8, loss 2.1; a",
        ),
        ("l4", "warning: about 40 GB a GPU ± 15%"),
        (None, "about 40 GB a GPU ± 15%"),
    ],
)
def test_preflight_says_it_and_warns(tmp_path, kind, said):
    model, profile, file = tmp_path / "model", tmp_path / "my.yaml", tmp_path / "sweep.yaml"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA_8B | {"dtype": "bfloat16"}))
    save_file({}, model / "model.safetensors")
    with open(model / "model.safetensors", "r+b") as weights:
        weights.truncate(2 * P8)  # sparse
    (model / "consolidated.safetensors").write_bytes(bytes(2 * P1 // 1000))  # the same, once more
    profile.write_text(yaml.safe_dump({"gpu_type": kind}))
    train = {key: value for key, value in PAPER.items() if value is not None}
    train |= {"model_name_or_path": str(model), "train_file": "chats.jsonl"}
    sweep = {"name": "large", "output_root": str(tmp_path / "out"), "backend": "open-instruct"}
    sweep |= {"train": train, "grid": {"label_smoothing": [0.0, 0.1]}, "cluster": str(profile)}
    sweep |= {"world": {"processes_per_node": 4, "deepspeed": "configs/deepspeed/zero3.json"}}
    file.write_text(yaml.safe_dump(sweep))
    planned = plan.plan(file, [])
    (line,) = preflight.estimates(planned, "slurm")  # one for both runs
    assert line.startswith(f"{model}: {said}")
    assert ("A l4 counts as 24 GB: lower per_device_train_batch_size" in line) == (kind == "l4")
    mamba = {key: LLAMA_8B[key] for key in LLAMA_8B if "heads" not in key}
    gemma_3n = LLAMA_8B | {"intermediate_size": [14336] * 32}
    gpt2, experts = {"n_embd": 768, "n_layer": 12}, LLAMA_8B | {"num_local_experts": 8}
    for other in (gpt2, mamba, gemma_3n, experts):
        (model / "config.json").write_text(json.dumps(other))
        assert preflight.estimates(planned, "slurm") == []
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    profile.write_text(yaml.safe_dump({"gpus_per_process": 0}))
    assert preflight.estimates(planned, "slurm") == []
