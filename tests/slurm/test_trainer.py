"""The builtin trainer: where the loss lies, which rows make a step, what its update is."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from world import make_tokenizer

from calibeval.io import InputError
from calibeval.references import TULU
from sweeps.files import SweepError
from sweeps.plan import plan
from sweeps.trainer.data import load_examples
from sweeps.trainer.loop import load_model
from sweeps.trainer.order import Order


def write(path, *conversations):
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in conversations))
    return path


def test_a_tokenizer_without_a_template_gets_tulus(tokenizer):
    assert tokenizer.chat_template == TULU


def test_loss_lies_on_the_assistants_tokens_and_nowhere_else(tokenizer, tmp_path):
    messages = [
        {"role": "system", "content": "w1 w2"},
        {"role": "user", "content": "what is w3?"},
        {"role": "assistant", "content": "A w4"},
        {"role": "user", "content": "B?"},
        {"role": "assistant", "content": "C w5"},
    ]
    examples = load_examples(write(tmp_path / "a.jsonl", messages), tokenizer, None)
    said = tokenizer.decode(examples.tokens[examples.supervised])
    # The newline after an intermediate turn is the template's, written after the assistant's text.
    assert said.replace("\n", "") == "A w4</s>C w5</s>"
    assert tokenizer.decode(examples.tokens).startswith("<|system|>\nw1 w2\n<|user|>\nwhat is w3?")


def test_a_conversation_that_the_template_refuses_is_shown(tiny, tmp_path):
    """Gemma's and Mistral's refuse a system message."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    path = write(tmp_path / "chats.jsonl", [{"role": "system", "content": "be nice"}])
    with pytest.raises(SweepError) as caught:
        load_examples(path, tokenizer, None)
    shown = 'refuses [{"role": "system", "content": "be nice"}]: System role not supported; '
    assert f"{tiny}/model: its chat template {shown}" in str(caught.value)
    assert str(caught.value).endswith("use train.chat_template_name=tulu")


def test_truncation_drops_rows_without_a_target(tokenizer, tmp_path):
    long = [
        {"role": "user", "content": "w1 " * 50},
        {"role": "assistant", "content": "A"},
    ]
    short = [{"role": "user", "content": "B"}, {"role": "assistant", "content": "A"}]
    path = write(tmp_path / "a.jsonl", long, short)
    examples = load_examples(path, tokenizer, 64)
    assert (len(examples), examples.dropped) == (1, 1)
    with pytest.raises(SweepError, match="max_seq_length=3"):
        load_examples(path, tokenizer, 3)


@pytest.mark.parametrize("row", ["{", "[]", '{"messages": []}', '{"messages": [{"role": "user"}]}'])
def test_a_bad_row_is_named(tokenizer, tmp_path, row):
    path = tmp_path / "a.jsonl"
    write(path, [{"role": "user", "content": "B"}, {"role": "assistant", "content": "A"}])
    path.write_text(path.read_text() + row + "\n")
    with pytest.raises(InputError, match=r"a\.jsonl, line 2: "):
        load_examples(path, tokenizer, None)


@given(
    examples=st.integers(1, 200),
    size=st.integers(1, 5),
    ranks=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_an_epoch_visits_every_example_once(examples, size, ranks, accumulation, seed):
    order = Order(examples, seed, size, ranks, accumulation)
    seen = []
    for step in range(order.steps_per_epoch):
        rows = order.rows(step)
        for number in range(accumulation):
            for rank in range(ranks):
                seen += order.micro(rows, number, rank)
    assert sorted(seen) == list(range(examples))


@given(st.integers(1, 100), st.integers(0, 5))
def test_a_global_batch_does_not_depend_on_its_split(examples, step):
    whole = Order(examples, 7, 8, 1, 1)
    for ranks, accumulation, size in ((2, 1, 4), (1, 2, 4), (2, 2, 2), (1, 8, 1)):
        assert Order(examples, 7, size, ranks, accumulation).rows(step) == whole.rows(step)


def test_targets_leave_out_the_first_token(tokenizer, tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        [{"role": "user", "content": "B"}, {"role": "assistant", "content": "A"}],
        [{"role": "user", "content": "B"}, {"role": "assistant", "content": "A w1 w2"}],
    )
    examples = load_examples(path, tokenizer, None)
    batch = examples.collate([0, 1], 3, 0)
    assert batch["labels"].shape[0] == 3
    assert (batch["labels"][:, 1:] != -100).sum(1).tolist() == [*examples.targets, 0]


def test_a_damaged_model_is_named_and_a_larger_tokenizer_is_said(sweep_file, tiny, tmp_path):
    shutil.copytree(tiny / "model", tmp_path / "model")
    path = sweep_file(train={"model_name_or_path": str(tmp_path / "model")})
    config, said = plan(path, []).cells[0].config, []
    rows = len(make_tokenizer())
    grown = load_model(config.keys, rows + 3, config.world, said.append)
    assert grown.get_input_embeddings().weight.shape[0] >= rows + 3
    assert f"the tokenizer's {rows + 3} entries outgrow the model's {rows}" in said[0]
    with open(tmp_path / "model" / "model.safetensors", "r+b") as weights:
        weights.truncate(1000)
    with pytest.raises(InputError, match=f"{tmp_path}/model: cannot be loaded as a causal"):
        load_model(config.keys, rows, config.world, said.append)
    assert len(said) == 1
