"""Attention for packed rows against plain attention, one document at a time."""

import itertools

import pytest
import torch
from torch import Tensor

from smoothce import use_packed_attention
from smoothce.packed_attention import packed_attention


def attention_one_by_one(
    query: Tensor,  # (T, H, d)
    key: Tensor,  # (T, H_kv, d)
    value: Tensor,  # (T, H_kv, d)
    bounds: Tensor,  # (n + 1,)
    scaling: float,
    window: int,
) -> Tensor:  # (T, H, d)
    """Each conversation's attention by torch, with the mask written out; window 0 is none."""
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    outputs = []
    for start, end in itertools.pairwise(bounds.tolist()):
        length = end - start
        distance = torch.arange(length)[:, None] - torch.arange(length)
        visible = (distance >= 0) & (distance < (window or end))
        output = torch.nn.functional.scaled_dot_product_attention(
            query[start:end].transpose(0, 1),
            key[start:end].transpose(0, 1),
            value[start:end].transpose(0, 1),
            attn_mask=visible.to(query.device),
            scale=scaling,
        )
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def assert_relatively_close(found: Tensor, expected: Tensor) -> None:
    error = (found.float() - expected).norm() / expected.norm()
    assert error < 1e-2, error


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 4, 256), (8, 4, 64)])
@pytest.mark.parametrize("window", [0, 5, 96])
def test_flash_attention_is_attention(heads, groups, size, window, compiled):
    torch.manual_seed(0)
    lengths = torch.tensor([0, 130, 1, 37, 300, 44])
    total = int(lengths.sum())
    bounds = lengths.cumsum(0).int().cuda()

    def draw(head_count: int) -> Tensor:
        """Numbers that bf16 holds exactly, in fp32."""
        return torch.randn(total, head_count, size, device="cuda").bfloat16().float()

    exact = [draw(heads), draw(heads // groups), draw(heads // groups)]
    for tensor in exact:
        tensor.requires_grad_()
    gradient = draw(heads)
    expected = attention_one_by_one(*exact, bounds, size**-0.5, window)
    expected.backward(gradient)
    inputs = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]

    def attend(*inputs: Tensor) -> Tensor:
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in inputs)
        output, _ = packed_attention(
            None,
            query,
            key,
            value,
            None,
            cu_seq_lens_q=bounds,
            max_length_q=384,
            sliding_window=window,
        )
        return output[0]

    run = torch.compile(attend, dynamic=True) if compiled else attend
    output = run(*inputs)
    output.backward(gradient.bfloat16())
    assert_relatively_close(output, expected)
    for half, full in zip(inputs, exact, strict=True):
        assert_relatively_close(half.grad, full.grad)


LENGTHS = [7, 1, 4, 9]


def packed_batch():
    """Documents end to end, as TRL's collator gives them."""
    bounds = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    ids = torch.randint(3, 67, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    return {
        "input_ids": ids,
        "position_ids": positions,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
    }


@pytest.fixture
def tiny_models():
    pytest.importorskip("transformers", minversion="4.56")
    return pytest.importorskip("tiny_models")


WINDOWED = {"sliding_window": 3}
MODELS = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": WINDOWED,
    "Qwen3ForCausalLM": {},
    "GemmaForCausalLM": {},
}


@pytest.mark.parametrize("bounds_given", [True, False])
@pytest.mark.parametrize(("name", "settings"), MODELS.items())
def test_documents_do_not_see_each_other(name, settings, bounds_given, tiny_models):
    """Each has the logits that it has alone, and no gradient reaches another."""
    model = use_packed_attention(tiny_models.tiny(name, **settings))
    batch = packed_batch()
    if not bounds_given:
        batch = {key: batch[key] for key in ("input_ids", "position_ids")}
    embedded = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, **batch, use_cache=False).logits
    alone = tiny_models.tiny(name, **settings)
    starts = itertools.accumulate([0, *LENGTHS[:-1]])
    for start, length in zip(starts, LENGTHS, strict=True):
        document = slice(start, start + length)
        want = alone(inputs_embeds=embedded[:, document].detach(), use_cache=False).logits
        torch.testing.assert_close(logits[:, document], want, rtol=1e-4, atol=1e-5)
        (gradient,) = torch.autograd.grad(logits[:, document].sum(), embedded, retain_graph=True)
        gradient[:, document] = 0
        assert not gradient.any()


def test_padded_batches_and_generation_are_as_ever(tiny_models):
    batch = tiny_models.batch()
    batch["attention_mask"][1, :2] = 0
    plain, packed = tiny_models.tiny(), use_packed_attention(tiny_models.tiny())
    seen = batch["attention_mask"].bool()
    torch.testing.assert_close(
        packed(**batch).logits[seen], plain(**batch).logits[seen], rtol=1e-4, atol=1e-5
    )
    prompt = batch["input_ids"][:, :4]
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(packed.generate(prompt, **options), plain.generate(prompt, **options))


def test_attention_of_another_kind_is_refused(tiny_models):
    with pytest.raises(ValueError, match="Gemma2ForCausalLM's attention caps its scores"):
        use_packed_attention(tiny_models.tiny("Gemma2ForCausalLM", attn_logit_softcapping=50.0))
    query = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="packed attention has no s_aux"):
        packed_attention(None, query, query, query, None, s_aux=torch.zeros(2))
    encoder = torch.nn.Module()
    encoder.is_causal = False
    with pytest.raises(ValueError, match="packed attention is causal"):
        packed_attention(encoder, query, query, query, None)
