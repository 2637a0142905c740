"""Questions behind a shared prefix, and choices as a tree, read as whole prompts do."""

import pytest
import torch
import transformers

from calibeval.engines import Job
from calibeval.engines.hf import TransformersEngine, sees_all

SMALL = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 92, "vocab_size": 90}
ROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONG = {"rope_scaling": ROPE, "original_max_position_embeddings": 70}
ALONE = "phi3, long", "mamba"  # nothing is shared
# A narrow window, or positions that a mask does not move, keep the choices apart.
KINDS = {
    "llama": (transformers.LlamaConfig(**SMALL), True),
    "qwen2": (transformers.Qwen2Config(**SMALL), True),
    "mistral, wide": (transformers.MistralConfig(**SMALL, sliding_window=4096), True),
    "mistral, narrow": (transformers.MistralConfig(**SMALL, sliding_window=40), False),
    "gpt2": (transformers.GPT2Config(**GPT, initializer_range=0.2), True),
    "gpt-neox": (transformers.GPTNeoXConfig(**SMALL), True),
    "gemma2": (transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=40), False),
    "bloom": (transformers.BloomConfig(vocab_size=90, hidden_size=32, n_layer=2, n_head=4), False),
    "phi3, long": (transformers.Phi3Config(**SMALL, **LONG), False),
    "mamba": (transformers.MambaConfig(vocab_size=90, hidden_size=32, num_hidden_layers=2), False),
}


@pytest.fixture
def engine(tiny_model, tmp_path):
    """engine(config) → the engine on a random model of that kind."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)

    def make(config) -> TransformersEngine:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
        tokenizer.save_pretrained(tmp_path / "m")
        return TransformersEngine(str(tmp_path / "m"), batch_size=4)

    return make


@pytest.fixture
def computed(monkeypatch):
    """How many tokens each forward read."""
    counts, plain = [], TransformersEngine._batch

    def batch(engine, jobs, prefix):
        counts.append(sum(len(j.tokens) - prefix.length + len(j.nodes) - 1 for j in jobs))
        return plain(engine, jobs, prefix)

    monkeypatch.setattr(TransformersEngine, "_batch", batch)
    return counts


def drawn(seed: int):
    """tokens(count) → that many random token ids."""
    random = torch.Generator().manual_seed(seed)
    return lambda count: tuple(torch.randint(1, 90, (count,), generator=random).tolist())


def groups() -> list[list[Job]]:
    """Two prefixes, questions of many lengths, letters of one and of two tokens."""
    made, tokens = [], drawn(1)
    for length, spine in ((60, ()), (9, (7,))):
        prefix = tokens(length)
        letters = tuple((*(spine if i % 2 else ()), 11 + i) for i in range(4))
        made.append([Job(i, prefix + tokens(1 + 5 * i), letters) for i in range(7)])
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_questions_behind_a_prefix_agree_with_whole_prompts(engine, kind, computed):
    made = engine(KINDS[kind][0])
    for group in groups():
        assert all(job.is_chain for job in group)
        found = [answer for batch in made.batches([group]) for answer in batch]
        assert sorted(job.index for job, _ in found) == list(range(7))
        for job, logits in found:
            ids = torch.tensor([job.tokens + job.nodes[-1]])
            with torch.no_grad():
                whole = made.model(input_ids=ids).logits[0, len(job.tokens) - 1 :]
            assert torch.allclose(logits, whole, atol=2e-4, rtol=1e-3)
    assert kind in ALONE or sum(computed) < 0.8 * sum(j.length for g in groups() for j in g)


def trees(count: int = 7) -> list[Job]:
    """Questions of many lengths behind one prefix, with choices of one to nine tokens."""
    tokens = drawn(2)
    prefix, shared = tokens(52), tokens(2)
    made = [
        Job(i, prefix + tokens(1 + 5 * i), (shared + tokens(7), tokens(5), tokens(1), shared))
        for i in range(count)
    ]
    assert not any(job.is_chain for job in made)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_choices_as_a_tree_agree_with_whole_prompts(engine, kind, computed):
    config, packed = KINDS[kind]
    made, jobs = engine(config), trees()
    found = dict(made.score([jobs]))
    assert bool(made.packs) is packed
    for job in jobs:
        for branch, score in zip(job.branches, found[job.index], strict=True):
            ids = torch.tensor([job.tokens + branch])
            with torch.no_grad():
                logprobs = made.model(input_ids=ids).logits[0].log_softmax(-1)
            at = range(len(job.tokens) - 1, ids.shape[1] - 1)
            expected = sum(logprobs[i, ids[0, i + 1]].item() for i in at)
            assert score == pytest.approx(expected, abs=2e-4)
    whole = sum(len(job.tokens + branch) for job in jobs for branch in job.branches)
    if packed:
        assert sum(computed[2:]) < whole / 3  # behind the first question, asked both ways


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_a_batch_holds_no_more_logits_than_memory_is_kept_for(engine, kind, monkeypatch):
    made, jobs = engine(KINDS[kind][0]), trees()
    expected = dict(made.score([jobs]))
    vocabulary = made.model.config.vocab_size
    shapes = []
    made.model.get_output_embeddings().register_forward_hook(
        lambda module, given, output: shapes.append(output.shape[0] * output.shape[1])
    )
    most = max(len(job.nodes) for job in jobs)
    monkeypatch.setattr("calibeval.engines.hf.LOGITS", 2 * most * vocabulary)
    found = dict(made.score([jobs]))
    assert max(shapes) <= 2 * most < sum(shapes)
    for job in jobs:
        assert found[job.index] == pytest.approx(expected[job.index], abs=2e-4)


def test_which_models_see_all():
    hybrid = transformers.LlamaConfig(**SMALL)
    hybrid.layer_types = ["full_attention", "linear_attention"]
    assert not sees_all(hybrid, 100)
    windows = transformers.Gemma2Config(**SMALL, sliding_window=4096)
    assert sees_all(windows, 4095) and not sees_all(windows, 4096)
