"""Questions behind a shared prefix, and choices as a tree, read as whole prompts do."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import transformers

from calibeval.ask.engines import Job
from calibeval.ask.engines.hf import BatchLimits, TransformersEngine
from calibeval.ask.engines.hf_model import allows_trees

VOCABULARY = 90
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}
SMALL_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 92,
    "initializer_range": 0.2,
}
SMALL_LLAMA4 = {
    **SMALL,
    "intermediate_size_mlp": 48,
    "head_dim": 8,
    "num_local_experts": 2,
    "no_rope_layers": [1, 0],
    "layer_types": ["chunked_attention", "full_attention"],
}
LONGEST = 91  # tokens that are read of the longest of `questions_by_texts`
LONGROPE = {
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    "original_max_position_embeddings": 70,
}


class Kind(NamedTuple):
    """An architecture, and what of a prompt it lets the engine share."""

    config: transformers.PretrainedConfig
    # Whether it reads choices as a tree. A narrow window, or positions that a mask does not move,
    # keep the choices apart.
    reads_trees: bool
    shares_prefixes: bool = True


KINDS = {
    "llama": Kind(transformers.LlamaConfig(**SMALL), True),
    "qwen2": Kind(transformers.Qwen2Config(**SMALL), True),
    "mistral, as wide as a prompt": Kind(
        transformers.MistralConfig(**SMALL, sliding_window=LONGEST), True
    ),
    "mistral, narrow": Kind(transformers.MistralConfig(**SMALL, sliding_window=40), False),
    "gpt2": Kind(transformers.GPT2Config(**SMALL_GPT2), True),
    "gemma2": Kind(transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=40), False),
    "llama4, one chunk": Kind(
        transformers.Llama4TextConfig(**SMALL_LLAMA4, attention_chunk_size=LONGEST), True
    ),
    "llama4, two chunks": Kind(
        transformers.Llama4TextConfig(**SMALL_LLAMA4, attention_chunk_size=LONGEST - 1), False
    ),
    "bloom": Kind(
        transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4), False
    ),
    "phi3, long": Kind(transformers.Phi3Config(**SMALL, **LONGROPE), False, shares_prefixes=False),
    "mamba": Kind(
        transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2),
        False,
        shares_prefixes=False,
    ),
}


@pytest.fixture
def saved_model(tmp_path):
    """saved_model(config) → the folder of a random model of that kind."""

    def save(config: transformers.PretrainedConfig) -> str:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


@pytest.fixture
def computed_tokens(monkeypatch):
    """How many tokens each forward over a batch has read, one after the other."""
    counts = []
    answer = TransformersEngine._answer

    def counting(engine, jobs, prefix):
        lengths = [len(job.context) - prefix.length + len(job.nodes) - 1 for job in jobs]
        counts.append(sum(lengths))
        return answer(engine, jobs, prefix)

    monkeypatch.setattr(TransformersEngine, "_answer", counting)
    return counts


def random_tokens(seed: int) -> Callable[[int], tuple[int, ...]]:
    """tokens(count) → that many random token ids."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, VOCABULARY, (count,), generator=generator).tolist())

    return tokens


def questions_by_letters() -> list[list[Job]]:
    """Two groups of seven questions of many lengths: behind a prefix of 60 tokens letters of one
    token, and behind one of 9 some of two."""
    tokens = random_tokens(1)
    groups = []
    for prefix_length, spelled in ((60, ()), (9, (7,))):
        prefix = tokens(prefix_length)
        letters = ((11,), (*spelled, 12), (13,), (*spelled, 14))
        groups.append([Job(index, prefix + tokens(1 + 5 * index), letters) for index in range(7)])
    return groups


def questions_by_texts() -> list[Job]:
    """Seven questions of many lengths behind one prefix, with choices of one to nine tokens."""
    tokens = random_tokens(2)
    prefix = tokens(52)
    beginning = tokens(2)  # of two choices
    return [
        Job(
            index,
            prefix + tokens(1 + 5 * index),
            (beginning + tokens(7), tokens(5), tokens(1), beginning),
        )
        for index in range(7)
    ]


def logits_of(engine: TransformersEngine, tokens: tuple[int, ...]) -> torch.Tensor:
    """What the model itself makes of a whole prompt: (tokens, V)."""
    with torch.no_grad():
        return engine.model(input_ids=torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_questions_behind_a_prefix_agree_with_whole_prompts(saved_model, kind, computed_tokens):
    engine = TransformersEngine(saved_model(KINDS[kind].config), batch_size=4)
    for group in questions_by_letters():
        assert all(job.is_chain for job in group)
        answers = [answer for batch in engine.batches([group]) for answer in batch]
        assert sorted(job.index for job, _ in answers) == list(range(7))
        for job, logits in answers:
            whole = logits_of(engine, job.context + job.nodes[-1])
            assert torch.allclose(logits, whole[len(job.context) - 1 :], atol=2e-4, rtol=1e-3)
    if KINDS[kind].shares_prefixes:
        all_tokens = sum(job.length for group in questions_by_letters() for job in group)
        assert sum(computed_tokens) < 0.8 * all_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_choices_as_a_tree_agree_with_whole_prompts(saved_model, kind, computed_tokens):
    engine = TransformersEngine(saved_model(KINDS[kind].config), batch_size=4)
    jobs = questions_by_texts()
    assert not any(job.is_chain for job in jobs)
    assert max(job.length for job in jobs) == LONGEST
    scores = dict(engine.score([jobs]))
    for job in jobs:
        for branch, score in zip(job.branches, scores[job.index], strict=True):
            logprobs = logits_of(engine, job.context + branch).log_softmax(-1)
            places = range(len(job.context) - 1, len(job.context) - 1 + len(branch))
            expected = sum(
                logprobs[place, token].item() for place, token in zip(places, branch, strict=True)
            )
            assert score == pytest.approx(expected, abs=2e-4)
    assert bool(engine.reads_trees) is KINDS[kind].reads_trees
    if KINDS[kind].reads_trees:
        all_tokens = sum(len(job.context + branch) for job in jobs for branch in job.branches)
        behind_the_trial = computed_tokens[2:]  # the first question is asked in both ways
        assert sum(behind_the_trial) < all_tokens / 3


@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_a_batch_holds_no_more_logits_than_memory_is_kept_for(saved_model, kind):
    engine = TransformersEngine(saved_model(KINDS[kind].config))
    jobs = questions_by_texts()
    expected = dict(engine.score([jobs]))
    most_nodes = max(len(job.nodes) for job in jobs)
    engine.limits = BatchLimits(logits=2 * most_nodes * VOCABULARY)
    places = []  # of each forward, rows × places a row

    def record_shape(module, arguments, output):
        places.append(output.shape[0] * output.shape[1])

    engine.model.get_output_embeddings().register_forward_hook(record_shape)
    scores = dict(engine.score([jobs]))
    assert max(places) <= 2 * most_nodes < sum(places)
    for job in jobs:
        assert scores[job.index] == pytest.approx(expected[job.index], abs=2e-4)


def test_what_is_skipped_changes_no_other_score(saved_model):
    """A run that goes on comes to the same bytes."""
    folder = saved_model(KINDS["llama"].config)
    jobs = questions_by_texts()
    expected = dict(TransformersEngine(folder, batch_size=2).score([jobs]))
    skipped = {0, 1, 2}  # the first batch, and half of the second
    scores = dict(TransformersEngine(folder, batch_size=2).score([jobs], skipped))
    assert set(scores) == {2, 3, 4, 5, 6}
    assert scores == {index: expected[index] for index in scores}


def test_recurrent_layers_do_not_see_all():
    hybrid = transformers.LlamaConfig(**SMALL)
    hybrid.layer_types = ["full_attention", "linear_attention"]
    assert not allows_trees(hybrid, 100)
