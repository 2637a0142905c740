"""What a training step asks of a GPU, by arithmetic: memory and time before anything is queued."""

import re

# GB of memory and dense bf16 tensor-core peak in FLOP/s, from NVIDIA's data sheets; the first name
# that fits counts.
GPUS = {
    "B200": (180, 2250e12),
    "GH200": (96, 989e12),
    "H200": (141, 989e12),
    "H100 PCIe": (80, 756e12),
    "H100 NVL": (94, 835e12),
    "H100": (80, 989e12),
    "A100": (40, 312e12),
    "L40S": (48, 362e12),
    "A40": (48, 150e12),
    "A30": (24, 165e12),
    "A10": (24, 125e12),
    "L4": (24, 121e12),
    "RTX 4090": (24, 165e12),
    "RTX 3090": (24, 71e12),
}
# Of `memory`: 1 to 14 % above six peaks of usual settings in patches/ and sweeps/trainer/, and
# at very many tokens at a time 5 % below (32 × 2,048, fused) and 24 % above (28 × 2,048, torch's).
MARGIN = 0.15
# Of the peak, by model FLOPs: the least of 0.34 (patches/README.md), 0.39 and 0.49
# (sweeps/trainer/README.md), for a time limit has to hold.
UTILISATION = 0.34


def gpu(name: str) -> tuple[int, float] | None:
    """GB and FLOP/s of a GPU, as nvidia-smi or a cluster calls it; a size in the name counts.

    Of a part of one (3g.40gb) the size that stands last, and so many sevenths of the peak.
    """
    named = (known for known in GPUS if re.search(rf"{known}(?!\d)", name, re.IGNORECASE))
    if (known := next(named, None)) is None:
        return None
    sizes = re.findall(r"(\d+)[ _]?gb", name.lower())
    part = re.search(r"(\d)g\.\d", name)
    whole, peak = GPUS[known]
    return int(sizes[-1]) if sizes else whole, peak * int(part[1]) / 7 if part else peak


def known_shape(model: dict) -> bool:
    """Whether a config.json is of a dense decoder, which `memory` and `seconds` describe."""
    shape = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    whole = all(type(model.get(key)) is int for key in (*shape, "vocab_size"))
    return whole and not any("experts" in key for key in model)


def memory(model: dict, parameters: int, train: dict, ranks: int, zero: dict) -> dict[str, float]:
    """Bytes at the fullest moment of a step on each GPU, by part; `zero` is DeepSpeed's section.

        states       16 P, of which ranks share all (ZeRO-3), 14 P (2) or 12 P (1)
        weights      2 P: bf16 copies without DeepSpeed; what ZeRO-3 has gathered, at most 2e9
        activations  T (20 D + 4 K + 8 F) a layer, + 8 T S H where attention is eager; with
                     checkpointing 2 T D a layer and one layer's
        loss         4 V D: the head and its gradient; from logits, + 12 T V

    P parameters; T tokens of a micro-batch in sequences of S; D hidden, F intermediate, K key and
    value features, H heads, V vocabulary. States: Rajbhandari et al. 2020 (ZeRO), section 3.1; with
    optimizer offload their 12 P are the host's. Activations: what autograd keeps of transformers'
    Llama in bf16, norms in fp32, counted as Korthikanti et al. 2022 (section 4) count GPT's.
    """
    stage, length = zero.get("stage", 0), train["max_seq_length"]
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    keys = model.get("num_key_value_heads", heads) * (model.get("head_dim") or hidden // heads)
    tokens = train["per_device_train_batch_size"] * length
    if "max_tokens" in train and train["packing"] is not False:
        tokens = min(train["max_tokens"], tokens * train["gradient_accumulation_steps"])
    shared = {3: 16, 2: 14, 1: 12}.get(stage, 0)
    held = 12 / ranks if zero.get("offload_optimizer") else 0
    states = (16 - shared + shared / ranks - held) * parameters
    layer = tokens * (20 * hidden + 4 * keys + 8 * model["intermediate_size"])
    named, flash = train.get("attn_implementation"), train.get("use_flash_attn", True)
    if named == "eager" or not (named or flash):
        layer += 8 * tokens * length * heads
    activations = model["num_hidden_layers"] * layer
    if train["gradient_checkpointing"]:
        activations = model["num_hidden_layers"] * 2 * tokens * hidden + layer
    loss = 4 * model["vocab_size"] * hidden
    if "torch" in train.get("loss_impl", "") or train.get("loss_implementation") == "reference":
        loss += 12 * tokens * model["vocab_size"]
    weights = {0: 2 * parameters, 3: min(2 * parameters, 2e9)}.get(stage, 0)
    return {"states": states, "weights": weights, "activations": activations, "loss": loss}


def seconds(model: dict, parameters: int, train: dict, peak: float) -> float:
    """Of an update of full sequences: 6 P + 6 L D S FLOPs a token (Chowdhery et al. 2022, PaLM)."""
    length = train["max_seq_length"]
    attention = 6 * model["num_hidden_layers"] * model["hidden_size"] * length
    sequences = train["per_device_train_batch_size"] * train["gradient_accumulation_steps"]
    return sequences * length * (6 * parameters + attention) / (UTILISATION * peak)
