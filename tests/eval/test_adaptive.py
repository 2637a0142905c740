"""A temperature for each token: its loss, its training, and scores with it by whole prompts."""

import json
import math

import pytest
import torch
from made_records import WORDS, read_lines, scored, write_lines
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from calibeval.ask import adaptive, model_digest
from calibeval.ask.adaptive import TemperatureHead


@pytest.fixture
def alpaca(tmp_path):
    """Twelve rows of Alpaca's form, one of which has no response."""
    words = WORDS.split()
    rows = []
    for number in range(12):
        response = " ".join(words[number % 5 : number % 5 + 1 + number % 4])
        rows.append({"instruction": f"{words[number]}?", "input": "", "output": response})
    rows[5]["output"] = ""
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture
def head_file(tiny_model, tmp_path):
    """A head of the tiny model whose temperatures differ from token to token."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    torch.manual_seed(3)
    head = TemperatureHead(model.config, "transformer")
    torch.nn.init.normal_(head.output.weight, std=0.2)
    head.save(tmp_path / "head.pt", model_digest.digest(str(tiny_model)))
    return tmp_path / "head.pt"


def logprobs_of_whole(tiny_model, head_file, context: str, choices: list[str]) -> list[float]:
    """log P of each choice by one forward of each whole prompt, at its tokens' temperatures."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    head = TemperatureHead.load(head_file, model.config, None)
    start = len(tokenizer(context)["input_ids"])
    found = []
    for choice in choices:
        ids = torch.tensor([tokenizer(context + choice)["input_ids"]])
        with torch.no_grad():
            output = model(ids, output_hidden_states=True)
            temperatures = head(output.hidden_states[-1]).exp()
            logprobs = (output.logits / temperatures[..., None]).log_softmax(-1)[0]
        places = range(start, ids.shape[1])
        found.append(sum(float(logprobs[place - 1, ids[0, place]]) for place in places))
    return found


def test_letters_are_at_their_tokens_temperatures_and_accuracy_stays(
    command, tiny_model, head_file, mmlu
):
    plain = scored(*command[-1:], *command[1:-2])
    command[-1].unlink()
    command[-1].with_name("r.jsonl.meta.json").unlink()
    rows = scored(*command[-1:], *command[1:-2], "--temperature-head", head_file)
    ratios = set()
    for before, after in zip(plain, rows, strict=True):
        order = sorted(range(4), key=before["logprobs"].__getitem__)
        assert sorted(range(4), key=after["logprobs"].__getitem__) == order
        spread_before = max(before["logprobs"]) - min(before["logprobs"])
        ratios.add(round(spread_before / (max(after["logprobs"]) - min(after["logprobs"])), 3))
    assert len(ratios) > 20  # temperatures differ from question to question


def test_texts_and_written_answers_are_those_of_whole_prompts(tiny_model, head_file, tmp_path):
    questions = [{"question": f"Which force {n}?", "aliases": ["a law"]} for n in range(5)]
    write_lines(tmp_path / "questions.jsonl", questions)
    options = ("--task", "answers", "--data", tmp_path / "questions.jsonl", "--model", tiny_model)
    plain = scored(tmp_path / "plain.jsonl", *options)
    rows = scored(tmp_path / "r.jsonl", *options, "--temperature-head", head_file)
    choices = ["true cells", "the kings", "a law"]
    row = {"question": "Which?", "choices": choices, "answer": 1}
    texts = write_lines(tmp_path / "texts.jsonl", [row])
    options = ("--task", "jsonl", "--data", texts, "--model", tiny_model, "--shots", "0")
    (text,) = scored(
        *(tmp_path / "t.jsonl", *options, "--scoring", "continuation"),
        *("--temperature-head", head_file),
    )
    context = "The following are questions (with answers) about general knowledge.\n\n"
    context += "Question: Which?\nAnswer:"
    expected = logprobs_of_whole(tiny_model, head_file, context, [f" {c}" for c in choices])
    assert text["logprobs"] == pytest.approx(expected, abs=1e-4)
    assert [row["answer"] for row in rows] == [row["answer"] for row in plain]
    assert [row["logprobs"] for row in rows] != [row["logprobs"] for row in plain]


def test_the_loss_is_selective():
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.5, 0.0], [3.0, 1.0, 0.0]])
    log_temperatures = torch.tensor([0.3, -0.2, 0.1])
    labels = torch.tensor([0, 0, 0])  # the likeliest, not the likeliest, the likeliest
    logprobs = (logits / log_temperatures.exp()[:, None]).log_softmax(-1)
    right = -(logprobs[0, 0] + logprobs[2, 0]) / 2
    wrong = -logprobs[1].mean()
    found = adaptive.selective_loss(logits, log_temperatures, labels, alpha=0.3)
    assert float(found) == pytest.approx(float(0.7 * right + 0.3 * wrong), abs=1e-6)


@pytest.mark.parametrize("kind", ["transformer", "linear"])
def test_training_lowers_the_loss_and_leaves_the_model(
    kind, alpaca, tiny_model, tmp_path, run, monkeypatch
):
    monkeypatch.setattr(adaptive, "LEARNING_RATE", 0.01)
    monkeypatch.setattr(adaptive, "EPOCHS", 8)
    out = tmp_path / "head.pt"
    run("temperature-head", "--model", tiny_model, "--data", alpaca, "--out", out, "--head", kind)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rows = adaptive._rows(alpaca)
    assert len(rows) == 11
    batch = [adaptive._tokenized(row, tokenizer) for row in rows]
    trained = TemperatureHead.load(out, model.config, model_digest.digest(str(tiny_model)))
    fresh = TemperatureHead(model.config, kind)
    with torch.no_grad():
        losses = [
            float(adaptive._loss_of_batch(model, head, batch, 0.5)) for head in (fresh, trained)
        ]
    assert losses[1] < losses[0] - 0.05
    assert trained.kind == kind
    tokens, prompt_length = batch[0]
    response = tokenizer.decode(tokens[prompt_length:])
    assert response == rows[0]["output"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--alpha", "1.5"), "--alpha 1.5: expected a number from 0 to 1"),
        (("--data", "{rows}"), "expected a JSON list of objects with the texts instruction"),
        (("--out", "{rows}"), "is there already"),
    ],
)
def test_bad_input(options, expected, alpaca, tiny_model, tmp_path, refused):
    rows = tmp_path / "rows.json"
    rows.write_text('[{"question": "Which?"}]')
    words = [word.replace("{rows}", str(rows)) for word in options]
    out = tmp_path / "head.pt"
    command = ("temperature-head", "--model", tiny_model, "--data", alpaca, "--out", out)
    assert expected in refused(*command, *words)


def test_no_head_is_made_for_a_model_that_caps_its_logits(alpaca, tiny_model, tmp_path, refused):
    capped = tmp_path / "capped"
    sizes = {"vocab_size": 32_000, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(
        Gemma2Config(**sizes, **heads, final_logit_softcapping=0.1, initializer_range=0.5)
    )
    model.save_pretrained(capped)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(capped)
    out = tmp_path / "head.pt"
    message = refused("temperature-head", "--model", capped, "--data", alpaca, "--out", out)
    assert "changes its logits after the output layer" in message


def test_a_head_is_of_its_model(command, tmp_path, refused, head_file):
    other = tmp_path / "other.pt"
    torch.save({"kind": "linear", "state": {"output.weight": torch.ones(1, 3)}}, other)
    assert "is no head of this model" in refused(*command, "--temperature-head", other)
    content = torch.load(head_file, weights_only=True)
    torch.save({**content, "model": "0" * 64}, other)  # of another checkpoint of the same shape
    assert "trained on other weights" in refused(*command, "--temperature-head", other)
    message = refused(*command, "--temperature-head", head_file, "--engine", "vllm")
    assert "--temperature-head: is for engine transformers" in message


def test_records_with_a_head_and_without_are_not_mixed(command, head_file, run, refused):
    run(*command)
    message = refused(*command, "--temperature-head", head_file)
    assert "was made with temperature_head None" in message
    assert not math.isnan(read_lines(command[-1])[0]["letter_mass"])
