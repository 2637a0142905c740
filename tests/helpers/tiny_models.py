"""Tiny causal language models, a batch for them, and what their loss should be."""

import torch
import torch.nn.functional as F
import transformers

VOCABULARY = 67
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
SOFTCAPPED = {"final_logit_softcapping": 1.5, "sliding_window": 8}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXTRA = {
    "Gemma2ForCausalLM": SOFTCAPPED,
    "Gemma3ForCausalLM": SOFTCAPPED,
    "CohereForCausalLM": {"logit_scale": 0.3},
    "GraniteForCausalLM": {"logits_scaling": 6.0},
    "MixtralForCausalLM": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "OlmoeForCausalLM": EXPERTS,
    "Qwen2MoeForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "Qwen3MoeForCausalLM": EXPERTS,
}


def tiny(name="LlamaForCausalLM", tied=False, **settings):
    """A model in training mode, without dropout, with weights large enough for a skewed softmax."""
    architecture = getattr(transformers, name)
    return tiny_of(architecture, tied, **EXTRA.get(name, {}), **settings)


def tiny_of(architecture, tied=False, **settings):
    """The same of a class, which need not be transformers'."""
    config = architecture.config_class(**{**SHAPE, "tie_word_embeddings": tied, **settings})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = architecture(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def sequences(count=8):
    return torch.randint(3, VOCABULARY, (count, 9), generator=torch.Generator().manual_seed(1))


def batch():
    """Three sequences; their prompts and what is padded have no labels."""
    ids = sequences(3)
    labels = ids.clone()
    mask = torch.ones_like(ids)
    labels[:, :3] = -100
    labels[0, 6:] = -100
    mask[0, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def expected(model, batch, beta, reduction="mean", **settings):
    """The loss of the unpatched forward's logits, shifted, through torch's loss."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**inputs, **settings).logits[:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits, labels, label_smoothing=beta, reduction=reduction)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, theirs):
    assert theirs  # without gradients nothing would be compared
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        error = (ours[name] - gradient).norm().item()
        assert error <= 2e-5 * gradient.norm().item() + 1e-6, (name, error)
