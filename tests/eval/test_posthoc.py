"""Post-hoc calibrators: what they fit, what they leave alone, what they refuse."""

import csv
import json
import math
import shutil

import numpy as np
import pytest
import torch
from made_records import scored, table, write_lines, write_rows

from calibeval import measures
from calibeval.__main__ import main
from calibeval.posthoc import (
    CONFIG,
    WEIGHTS,
    Answers,
    Calibrator,
    fit,
    selective_smoothing,
)


def drawn(n: int, sharpness: torch.Tensor, seed: int = 0) -> Answers:
    """N answers of four choices: right with the probabilities p, claimed as p^sharpness."""
    rng = torch.Generator().manual_seed(seed)
    honest = 1.5 * torch.randn(n, 4, generator=rng)
    labels = torch.multinomial(honest.softmax(-1), 1, generator=rng).squeeze(1)
    hidden = torch.stack([sharpness, torch.randn(n, generator=rng), honest[:, 0]], 1)
    return Answers(hidden, honest * sharpness[:, None], labels)


def ece(answers: Answers, calibrator: Calibrator | None = None) -> float:
    """ECE among the choices."""
    logits = answers.logits
    if calibrator is not None:
        with torch.no_grad():
            logits = logits / calibrator(answers.hidden)[:, None]
    of = measures.Scores(logits.double().log_softmax(-1).numpy(), answers.labels.numpy())
    return float(measures.ece(measures.Sample(of))[0])


def test_temperature_scaling_finds_the_temperature():
    answers = drawn(20_000, torch.full((20_000,), 3.0))
    calibrator, report = fit(answers, "constant")
    assert report["temperature"] == pytest.approx(3, rel=0.05)
    assert torch.allclose(calibrator(answers.hidden), torch.tensor(report["temperature"]))
    grid = [
        torch.nn.functional.cross_entropy(answers.logits / t, answers.labels).item()
        for t in np.linspace(1, 6, 101)
    ]
    before, after = report["nll"]
    assert after <= min(grid) + 1e-6 < before
    assert ece(answers, calibrator) < 0.02 < 0.1 < ece(answers)


def test_the_loss_is_its_formula():
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.0, 0.0]])
    labels = torch.tensor([0, 0])  # the first is right, the second wrong
    total = math.exp(2) + 1 + math.exp(-1)
    sure = math.log(total) - 2
    other = math.exp(0.5) + math.e + 1
    unsure = math.log(other) - (0.5 + 1.0 + 0.0) / 3
    for alpha in (0.0, 0.3, 1.0):
        found = selective_smoothing(logits, labels, alpha).item()
        assert found == pytest.approx(((1 - alpha) * sure + alpha * unsure) / 2, rel=1e-6)


def test_a_head_finds_where_the_model_overclaims():
    torch.manual_seed(0)
    sharpness = torch.where(torch.rand(4000) < 0.5, 1.0, 5.0)
    answers, fresh = drawn(4000, sharpness), drawn(4000, sharpness, seed=1)
    wide = torch.randn(3, 16)
    answers, fresh = (Answers(a.hidden @ wide, a.logits, a.labels) for a in (answers, fresh))
    adaptive, report = fit(answers, "linear")
    assert report["held_out_loss"][1] < report["held_out_loss"][0]
    tau = adaptive(fresh.hidden).detach()
    assert tau[sharpness == 5].median() > 2 * tau[sharpness == 1].median()
    constant, _ = fit(answers, "constant")

    def reached(calibrator):
        scaled = fresh.logits / calibrator(fresh.hidden)[:, None]
        return selective_smoothing(scaled, fresh.labels, 0.5)

    assert reached(adaptive) < reached(constant)
    assert ece(fresh, adaptive) < 0.7 * ece(fresh)


def test_fitting_is_a_function_of_its_input():
    answers = drawn(300, torch.full((300,), 2.0))
    one, two = (fit(answers, "linear")[0].state_dict() for _ in range(2))
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.fixture
def val(mmlu):
    """The two subjects with questions to fit on."""
    for subject in ("old_kings", "light"):
        write_rows(mmlu / "val" / f"{subject}_val.csv", table(25))
    return mmlu


def run(*command) -> int:
    return main([str(part) for part in command])


@pytest.mark.parametrize("head", ["constant", "linear"])
def test_accuracy_is_the_same_to_the_last_question(val, tiny_model, tmp_path, head):
    kind = "fit-temperature" if head == "constant" else "fit-ats"
    common = ["--model", tiny_model, "--task", "mmlu", "--data", val]
    weights = (tiny_model / "model.safetensors").read_bytes()
    assert run(kind, *common, "--out", tmp_path / "c") == 0
    assert (tiny_model / "model.safetensors").read_bytes() == weights
    plain = scored(tmp_path / "plain.jsonl", *common)
    with_it = scored(tmp_path / "with.jsonl", *common, "--calibrator", tmp_path / "c")
    for before, after in zip(plain, with_it, strict=True):
        assert np.argsort(before["logprobs"]).tolist() == np.argsort(after["logprobs"]).tolist()
        # Dividing all logits by τ divides every difference between two of them by τ.
        ratios = np.diff(before["logprobs"]) / np.diff(after["logprobs"])
        assert ratios == pytest.approx(np.full(3, ratios[0]), rel=1e-6) and ratios[0] > 0
        assert sum(map(math.exp, after["logprobs"])) == pytest.approx(after["letter_mass"])
        if head == "constant":
            fitted = json.loads((tmp_path / "c" / CONFIG).read_text())["fitted"]
            assert ratios[0] == pytest.approx(fitted["temperature"], rel=1e-5)
    assert any(b["logprobs"] != a["logprobs"] for b, a in zip(plain, with_it, strict=True))


@pytest.fixture
def refused(capsys):
    """refused(*command) → the error of a command that must fail."""

    def check(*command) -> str:
        capsys.readouterr()
        assert run(*command) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert lines[-1].startswith("error: ")
        return lines[-1]

    return check


def fitted(folder) -> dict:
    return json.loads((folder / CONFIG).read_text())["fitted"]


def test_a_calibrator_never_meets_what_it_was_fitted_on(val, tiny_model, tmp_path, refused):
    """Whatever the shots and the style: the question is the same."""
    common = ["--model", tiny_model, "--task", "mmlu", "--data", val]
    assert run("fit-temperature", *common, "--out", tmp_path / "c", "--subjects", "light") == 0
    assert fitted(tmp_path / "c")["split"] == "val"
    score = ["score", *common, "--out", tmp_path / "r.jsonl", "--calibrator", tmp_path / "c"]
    message = "was fitted on 25 of these 25 questions, light/0 for one"
    light = [*score, "--split", "val", "--subjects", "light"]
    assert message in refused(*light)
    assert message in refused(*light, "--shots", 0)
    # The same rows are old_kings' as well, under other ids.
    assert "light" not in (err := refused(*score, "--split", "val", "--subjects", "old_kings"))
    assert "was fitted on 25 of these 25 questions, old_kings/0 for one" in err
    assert not (tmp_path / "r.jsonl").exists()
    assert run(*score) == 0
    assert "calibrator_sha256" in refused(*score[:-2])  # its records are not another's


def test_questions_that_test_the_model_or_stand_in_prompts_are_left_out(
    val, tiny_model, tmp_path, capsys
):
    """MMLU has 27 of its validation questions in its test split too."""
    path = val / "val" / "light_val.csv"
    first = [(val / split / f"old_kings_{split}.csv").read_text() for split in ("test", "dev")]
    twins = [next(csv.reader(text.splitlines())) for text in first]
    question, *choices, answer = twins[0]
    shuffled = [f"{question} ", *reversed(choices), "DCBA"["ABCD".index(answer)]]
    write_rows(path, [*table(25), shuffled, twins[1]])
    common = ["--model", tiny_model, "--task", "mmlu", "--data", val]
    assert run("fit-temperature", *common, "--out", tmp_path / "c", "--subjects", "light") == 0
    assert fitted(tmp_path / "c")["answers"] == 26 and fitted(tmp_path / "c")["left_out"] == 1
    assert run("fit-temperature", *common, "--out", tmp_path / "c") == 0
    assert fitted(tmp_path / "c")["left_out"] == 2  # old_kings' prompts show its example
    assert run("score", *common, "--out", tmp_path / "r.jsonl", "--calibrator", tmp_path / "c") == 0


@pytest.mark.parametrize(("task", "split"), [("mmlu", "test"), ("arc_easy", "Test")])
def test_the_split_that_is_scored_is_not_fitted_on(tiny_model, tmp_path, refused, task, split):
    command = ["--task", task, "--model", tiny_model, "--data", tmp_path, "--out", tmp_path / "c"]
    message = f"--split {split}: {task} is scored on it"
    assert message in refused("fit-temperature", *command, "--split", split)


def test_arc_is_fitted_on_dev_where_most_questions_have_as_many_choices(
    tiny_model, tmp_path, capsys
):
    rows = []
    for i, (text, *choices, answer) in enumerate(table(60)):
        texts = [{"text": c, "label": n} for c, n in zip(choices, "1234", strict=True)]
        texts, answer = (texts[:3], "1") if i == 29 else (texts, "1234"["ABCD".index(answer)])
        rows.append({"id": f"q{i}", "question": {"stem": text, "choices": texts}})
        rows[-1]["answerKey"] = answer
    for name, part in (("Train", rows[:5]), ("Dev", rows[5:30]), ("Test", rows[30:])):
        write_lines(tmp_path / f"ARC-Easy-{name}.jsonl", part)
    common = ["--task", "arc_easy", "--model", tiny_model, "--data", tmp_path]
    assert run("fit-temperature", *common, "--out", tmp_path / "c") == 0
    found = fitted(tmp_path / "c")
    assert found["split"] == "dev" and found["answers"] == 24
    out = tmp_path / "r.jsonl"
    assert run("score", *common, "--out", out, "--calibrator", tmp_path / "c") == 0


def test_a_calibrator_of_another_checkpoint_is_refused(val, tiny_model, tmp_path, refused):
    """Of the same architecture: nothing but its digest tells."""
    common = ["--task", "mmlu", "--data", val]
    assert run("fit-temperature", *common, "--model", tiny_model, "--out", tmp_path / "c") == 0
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    score = ["score", *common, "--out", tmp_path / "r.jsonl", "--calibrator", tmp_path / "c"]
    err = refused(*score, "--model", other)
    assert f"was fitted to {tiny_model} (digest " in err and f"not to {other} (digest " in err
    shutil.move(tiny_model, tmp_path / "moved")
    try:
        assert run(*score, "--model", tmp_path / "moved") == 0
    finally:
        shutil.move(tmp_path / "moved", tiny_model)


def test_a_model_that_diverged_is_refused(val, tiny_model, tmp_path, refused):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.lm_head.weight.data.fill_(math.nan)
    for part in (model, AutoTokenizer.from_pretrained(tiny_model)):
        part.save_pretrained(tmp_path / "m")
    common = ["--model", tmp_path / "m", "--task", "mmlu", "--data", val]
    for command in ("fit-temperature", "fit-ats", "score"):
        out = tmp_path / "r.jsonl"
        assert "output is not finite" in refused(command, *common, "--out", out)
        assert not out.exists()


def test_bad_input_is_one_message(val, tiny_model, tmp_path, refused):
    common = ["--model", tiny_model, "--task", "mmlu", "--data", val]
    fit_it = ["fit-temperature", *common, "--out", tmp_path / "c"]
    assert "expected 20 or more" in refused(*fit_it, "--limit", "5")
    with pytest.raises(SystemExit, match="2"):
        run("fit-ats", *common, "--out", tmp_path / "c", "--alpha", "2")
    score = ["score", *common, "--out", tmp_path / "r.jsonl", "--calibrator"]
    assert f"no {CONFIG}" in refused(*score, tmp_path / "nothing")
    assert "needs --engine transformers" in refused(*score, tmp_path / "c", "--engine", "vllm")
    Calibrator("linear", 8).save_pretrained(tmp_path / "other")
    whole = (tmp_path / "other" / WEIGHTS).read_bytes()
    (tmp_path / "other" / WEIGHTS).write_bytes(whole[:-5])
    assert "not a whole calibrator" in refused(*score, tmp_path / "other")
