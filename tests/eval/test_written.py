"""Answers that a model writes: exact match, the three confidences, records and bad input."""

import json
import math
import random
import re
import shutil

import pytest
import torch
from made_records import WORDS, log_probability, read_lines, scored, write_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from calibeval import compare, records, summarize
from calibeval.ask import tasks, written
from calibeval.ask.engines import Writing, hf_writing
from calibeval.ask.engines.hf import TransformersEngine
from calibeval.ask.request import Task

PIECES = (
    *("the", "The", "a", "An", "an", "theatre", "Beatles", "U.S.", "don't", "rock", "&", "roll"),
    *("Æsop", "İzmir", "1,000", "_", "snake_case", "-", "\u2018q\u2019", "\u00b4", "`", "“x”"),
    *("\u00a0", "\u2003", "…", "é", "e\u0301", "A.", "(a)", "7th"),
)
# What exact_match_score of mandarjoshi90/triviaqa at 51b5359, evaluation/triviaqa_evaluation.py,
# says of `made_cases`, over their aliases: a bit a case, the first case in the highest bit.
OFFICIAL = int(
    "dbaf3fde1433a5f9599ffd2be97bdcc56dd56befdb37bf76dbd79d2b5bed69f06dffee12f7d5e3ded7a5f1"
    "b6b5b9679d6d727e46eff1af7f7a7a8d83f3f677d9d28fe9e9947b462fd373fcea787e7facf9b3a41fe709"
    "47bfe7edebb9e873d1cf9f4de7f8b3be3e3c5fa85dc5db41bd0dc65d7cb8eebb5b23e5f9ae4c2b",
    16,
)


def made_cases() -> list[tuple[str, list[str]]]:
    """Return 1,000 answers, each with one to three aliases, many of which differ in looks alone."""
    rng = random.Random(0)
    cases = []
    for _ in range(1000):
        aliases = []
        for _ in range(rng.randint(1, 3)):
            aliases.append(rng.choice(["", " "]).join(rng.choices(PIECES, k=rng.randint(1, 4))))
        answer = rng.choice(aliases)
        for _ in range(rng.randint(0, 3)):
            old = rng.choice([" ", "the", "a", "_", "-", "'", rng.choice(PIECES)])
            new = rng.choice([" ", "", "  ", "_", "The ", ".", old.upper(), rng.choice(PIECES)])
            answer = answer.replace(old, new, 1)
        if rng.random() < 0.6:
            answer += f" {rng.choice(PIECES)}"
        cases.append((answer, aliases))
    return cases


def test_exact_match_is_the_official_scripts():
    right = [written.is_right(answer, aliases) for answer, aliases in made_cases()]
    assert int("".join("01"[one] for one in right), 2) == OFFICIAL
    assert 300 < sum(right) < 700


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("The Beatles!", 0.5), ("fab four", 0.25), ("Rolling", 0.0), ("", 0.0)],
)
def test_agreement_knows_nothing_of_the_right_answer(answer, expected):
    samples = ["beatles", "The  fab-four", "stones", "Beatles."]
    assert written.agreement(answer, samples) == expected


@pytest.fixture
def questions(tmp_path):
    """Twelve questions with two aliases each."""
    rng = random.Random(3)
    rows = []
    for number in range(12):
        words = " ".join(rng.choices(WORDS.split(), k=rng.randint(3, 9)))
        rows.append({"question": f"{words} {number}?", "aliases": ["kings", "a law"]})
    return write_lines(tmp_path / "questions.jsonl", rows)


@pytest.fixture
def task(questions, tmp_path):
    """A task file of these questions, whose answers end before an e or after twelve tokens."""
    path = tmp_path / "own.yaml"
    path.write_text(
        "data: {path: questions.jsonl}\nscoring: generate\nnormalise: tokens\n"
        'stop: ["e"]\nmax_tokens: 12\nshots: 0\n'
    )
    return path


def test_each_confidence_is_that_of_whole_prompts(task, questions, tiny_model, tmp_path):
    rows = scored(
        *(tmp_path / "r.jsonl", "--task", task, "--model", tiny_model, "--samples", "3"),
        *("--batch-size", "5"),
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ends = {model.generation_config.eos_token_id}
    for row, question in zip(rows, read_lines(questions), strict=True):
        context = f"Question: {question['question']}\nAnswer:"
        ids = tokenizer(context)["input_ids"]
        context_length = len(ids)
        total = 0.0
        while True:
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(logprobs.argmax()))
            total += float(logprobs.max())
            answer = tokenizer.decode(ids[context_length:], skip_special_tokens=True)
            length = len(ids) - context_length
            if ids[-1] in ends or "e" in answer or length == 12:
                break
        assert row["answer"] == answer.partition("e")[0].strip()
        assert row["logprobs"] == pytest.approx([total], abs=1e-4)
        assert row["tokens"] == [length]
        assert row.get("cut", False) == (ids[-1] not in ends and "e" not in answer)
        asked = (
            f"Question: {question['question']}\nProposed answer: {row['answer']}\n"
            "Is the proposed answer right?\nA. True\nB. False\nAnswer:"
        )
        odds = log_probability(tiny_model, asked, " A") - log_probability(tiny_model, asked, " B")
        assert row["p_true"] == pytest.approx(1 / (1 + math.exp(-odds)), abs=1e-5)
        assert len(row["samples"]) == 3
        same = [
            written.normalized(one) == written.normalized(row["answer"]) for one in row["samples"]
        ]
        assert row["agreement"] == sum(same) / 3
        assert row["label"] == (0 if written.is_right(row["answer"], ["kings", "a law"]) else 1)
    assert len({row["tokens"][0] for row in rows}) > 2


def test_samples_are_of_the_models_own_probabilities(tiny_model, tmp_path):
    """A folder may say top-k and a penalty, which would make other samples than are asked for."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "top_k": 1, "repetition_penalty": 9.0, "eos_token_id": 2})
    )
    engine = TransformersEngine(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    context = tuple(tokenizer("which of the following")["input_ids"])
    how = Writing(max_tokens=1, stop=("\n",), count=4000, temperature=1.5)
    ((*samples,),) = engine.write([context], how, tokenizer)
    with torch.no_grad():
        logits = engine.model(torch.tensor([context])).logits[0, -1] / 1.5
    expected = logits.softmax(-1)
    drawn = torch.tensor([sample.tokens[0] for sample in samples])
    shares = torch.bincount(drawn, minlength=len(expected)) / len(samples)
    assert (shares - expected).abs().sum() < 0.3  # 0.2 by chance
    assert engine.model.generation_config.top_k == 1


def test_likeliest_answers_are_the_same_however_many_tokens_are_written_at_once(
    tiny_model, monkeypatch
):
    """Stop texts of several tokens, or with a space at the end, may begin in the part before."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    contexts = [tuple(tokenizer(f"the law of {word}")["input_ids"]) for word in WORDS.split()[:7]]
    found = []
    for tokens_at_once, batch_size in ((12, 7), (1, 3), (5, 1)):
        monkeypatch.setattr(hf_writing, "TOKENS_AT_ONCE", tokens_at_once)
        engine = TransformersEngine(str(tiny_model), batch_size=batch_size)
        for stop in (("\n",), ("s ",), ("th", "of")):
            how = Writing(max_tokens=12, stop=stop)
            found.append([answer for (answer,) in engine.write(contexts, how, tokenizer)])
    assert found[:3] == found[3:6] == found[6:]
    for answers, stop in zip(found, (("\n",), ("s ",), ("th", "of")), strict=False):
        for answer in answers:
            *begun, _ = answer.tokens
            assert not any(text in tokenizer.decode(begun) for text in stop)
    assert any(not answer.is_cut for answers in found for answer in answers)


def test_a_killed_run_ends_with_the_same_bytes(task, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(written, "QUESTIONS_AT_ONCE", 4)
    options = ("--task", task, "--model", tiny_model, "--samples", "2", "--batch-size", "3")
    whole = tmp_path / "whole.jsonl"
    rows = scored(whole, *options)
    part = tmp_path / "again.jsonl.part"
    write_lines(part, rows[:6])
    settings = json.loads(records.sidecar(whole).read_text())
    records.sidecar(part).write_text(json.dumps(settings))
    scored(tmp_path / "again.jsonl", *options)
    assert (tmp_path / "again.jsonl").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({"aliases": []}, (), "line 1: aliases is []"),
        ({}, ("--samples", "2", "--sampling-temperature", "0"), "--sampling-temperature: 0 gives"),
        ({}, ("--scoring", "letters"), "--scoring letters: "),
    ],
)
def test_bad_input(task, questions, tiny_model, tmp_path, refused, changes, options, expected):
    first, *others = read_lines(questions)
    write_lines(questions, [{**first, **changes}, *others])
    out = tmp_path / "r.jsonl"
    message = refused("score", "--task", task, "--model", tiny_model, "--out", out, *options)
    assert expected in message
    assert not out.exists()


def made_records(path, n=400, seed=0, sharpness=1.0):
    """Write records of written answers whose likelihood is calibrated, but for the sharpness."""
    rng = random.Random(7)
    own = random.Random(seed)
    rows = []
    for number in range(n):
        p = rng.random()
        right = own.random() < p
        tokens = rng.randint(1, 9)
        rows.append(
            {
                **{"id": f"q{number}", "subject": f"s{number % 3}", "label": 0 if right else 1},
                **{"logprobs": [sharpness * tokens * math.log(p)], "tokens": [tokens]},
                **{"scoring": "generate", "normalise": "tokens", "prompt_sha256": str(number)},
                **{"p_true": p, "agreement": round(10 * p) / 10, "model": "m", "answer": "x"},
            }
        )
    return write_lines(path, rows)


def test_metrics_and_comparisons_are_of_the_confidence(tmp_path, run):
    a = made_records(tmp_path / "a.jsonl")
    b = made_records(tmp_path / "b.jsonl", sharpness=3.0)
    found = summarize(a)["choices"]
    rows = read_lines(a)
    p = [row["p_true"] for row in rows]
    right = [row["label"] == 0 for row in rows]
    assert found["brier"].value == pytest.approx(
        sum((one - y) ** 2 for one, y in zip(p, right, strict=True)) / len(rows)
    )
    assert found["ece"].value < found["ece"].floor
    surest = sorted(zip(p, right, strict=True), reverse=True)[: len(rows) // 2]
    assert found["accuracy_at_50"].value == pytest.approx(sum(y for _, y in surest) / len(surest))
    points = [(1 if y else -3) if one > 0.75 else 0 for one, y in zip(p, right, strict=True)]
    assert found["penalized_75"].value == pytest.approx(sum(points) / len(points))
    assert found["penalized_50"].low < found["penalized_50"].value < found["penalized_50"].high
    # A wrong answer costs 9 points, and so few were given that intervals would not cover.
    assert sum(one > 0.9 and not y for one, y in zip(p, right, strict=True)) < 20
    assert found["penalized_90"].low is None
    assert compare(a, b)["choices"]["brier"]["better"] == "a"
    run("metrics", a, "--normalise", "agreement", "--subjects")
    run("compare", a, b, "--normalise", "p_true")


@pytest.mark.parametrize("confidence", ["p_true", "agreement"])
def test_records_may_say_by_which_confidence_they_are_read(tmp_path, refused, confidence):
    a = made_records(tmp_path / "a.jsonl")
    rows = [{**row, "normalise": confidence} for row in read_lines(a)]
    b = write_lines(tmp_path / "b.jsonl", rows)
    assert (records.read(b).logprobs == records.read(a, confidence).logprobs).all()
    said = refused("temperature", b, b, "--out", tmp_path / "out.jsonl")
    assert f"normalise {confidence!r}" in said


def test_a_temperature_of_the_likelihood(tmp_path, run):
    fit_on = made_records(tmp_path / "fit.jsonl", seed=1, sharpness=3.0)
    rows = read_lines(fit_on)
    for number, row in enumerate(rows):
        row.update(id=f"other{number}", prompt_sha256=f"other{number}")
    write_lines(fit_on, rows)
    test = made_records(tmp_path / "test.jsonl", sharpness=3.0)
    out = tmp_path / "out.jsonl"
    run("temperature", fit_on, test, "--out", out)
    tau = json.loads(records.sidecar(out).read_text())["temperature"]["temperature"]
    assert tau == pytest.approx(3, rel=0.15)
    before = summarize(test)["choices"]
    after = summarize(out)["choices"]
    assert after["accuracy"].value == before["accuracy"].value
    assert after["auroc"].value == pytest.approx(before["auroc"].value)
    assert after["nll"].value < before["nll"].value
    assert "p_true" not in read_lines(out)[0]


def test_a_temperature_of_the_whole_likelihood(tmp_path, run):
    """`--normalise sum` does what records that are read so by themselves get."""
    files = []
    for name, seed in (("fit", 1), ("test", 0)):
        path = made_records(tmp_path / f"{name}.jsonl", seed=seed, sharpness=3.0)
        rows = [
            {**row, "id": f"{name} {row['id']}", "prompt_sha256": None} for row in read_lines(path)
        ]
        write_lines(path, rows)
        by_sum = [{**row, "normalise": "sum"} for row in rows]
        files.append((path, write_lines(tmp_path / f"{name}-sum.jsonl", by_sum)))
    (fit_on, fit_on_sum), (test, test_sum) = files
    run("temperature", fit_on, test, "--normalise", "sum", "--out", tmp_path / "asked.jsonl")
    run("temperature", fit_on_sum, test_sum, "--out", tmp_path / "own.jsonl")
    run("temperature", fit_on, test, "--out", tmp_path / "mean.jsonl")
    assert read_lines(tmp_path / "asked.jsonl") == read_lines(tmp_path / "own.jsonl")
    assert records.read(tmp_path / "asked.jsonl").normalise == "sum"
    assert read_lines(tmp_path / "asked.jsonl") != read_lines(tmp_path / "mean.jsonl")


@pytest.mark.parametrize("shots_of_fit, answers", [(0, 400), (1, None)])
def test_two_files_of_answers_are_numbered_alike(tmp_path, run, refused, shots_of_fit, answers):
    """Prompts tell them apart: behind as many examples the same question has the same one."""
    files = []
    for name, shots in (("fit", shots_of_fit), ("test", 0)):
        path = made_records(tmp_path / f"{name}.jsonl", seed=shots, sharpness=3.0)
        rows = []
        for number, row in enumerate(read_lines(path)[:400]):
            prompt = {"id": f"answers/{number}", "prompt_sha256": f"{name}{number}", "shots": shots}
            rows.append({**row, **prompt})
        files.append(write_lines(path, rows))
    words = ("temperature", *files, "--out", tmp_path / "out.jsonl", "--json")
    if answers is None:
        assert "Give records of other questions" in refused(*words)
    else:
        assert f'"answers": {answers}, "left_out": 0' in run(*words).out


def test_check_tries_a_temperature_on_the_likelihood(tmp_path, run):
    """A softmax over the one answer made each certain, so the temperature seemed to harm."""
    a = made_records(tmp_path / "a.jsonl")
    b = made_records(tmp_path / "b.jsonl", sharpness=3.0)
    said = run("check", a, b).out
    before, after = re.search(r"would take the ECE .* from ([\d.]+) to ([\d.]+),", said).groups()
    assert float(after) < 0.4 * float(before)


def test_examples_that_are_not_shown_are_said(tmp_path, capsys):
    """`answers` shows none by default, and a file of them was read for nothing."""
    row = {"question": "Which is the largest deer?", "aliases": ["elk"]}
    asked = write_lines(tmp_path / "asked.jsonl", [row])
    solved = write_lines(tmp_path / "solved.jsonl", [{**row, "question": "And the smallest?"}])
    for shots, is_said in ((None, True), (1, False)):
        task = Task(task="answers", data=str(asked), examples=str(solved), shots=shots)
        (subject,) = tasks.load(task)
        assert len(subject.examples) == bool(shots)
        said = "solved.jsonl: none of its examples is shown" in capsys.readouterr().err
        assert said == is_said


def test_check_advises_no_temperature_of_what_is_no_likelihood(tmp_path, run):
    """`temperature` refused what `check` told to fit."""
    files = []
    for name, seed in (("a", 0), ("b", 1)):
        path = made_records(tmp_path / f"{name}.jsonl", seed=seed, sharpness=3.0)
        rows = [{**row, "normalise": "p_true"} for row in read_lines(path)]
        for row in rows:
            row["p_true"] = min(1.0, row["p_true"] + 0.3)
        files.append(write_lines(path, rows))
    said = run("check", *files).out
    assert "no temperature is tried" in said
    assert "calibeval temperature" not in said
