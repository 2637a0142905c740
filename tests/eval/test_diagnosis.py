"""`calibeval check`: models of known sharpness are told apart, and what to do follows from it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from made_records import read_lines, write_lines, write_records

import calibeval
from calibeval import records
from calibeval.__main__ import main
from calibeval.measures import evaluations
from calibeval.report import diagnosis
from calibeval.report.diagnosis import cross_fitted, readings


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with the answers of a calibrated model, and of it made sharper and blunter."""
    folder = tmp_path_factory.mktemp("models")
    write_records(folder / "calibrated.jsonl", 3000, 1.0, seed=3)
    write_records(folder / "sharp.jsonl", 3000, 2.0, seed=3)
    write_records(folder / "blunt.jsonl", 3000, 0.5, seed=3)
    return folder


def found(models, base, tuned):
    return calibeval.check(models / f"{base}.jsonl", models / f"{tuned}.jsonl")


def test_an_over_confident_model_is_told_to_take_a_temperature(models):
    check = found(models, "calibrated", "sharp")
    assert check.before["choices"].verdict == "calibrated"
    assert check.after["choices"].verdict == "over-confident"
    assert check.temperatures == pytest.approx((2, 2), rel=0.15)
    assert check.cooled_ece < 0.2 * check.after["choices"].ece.value
    assert check.change_by_temperature.high < 0
    assert check.change_by_tuning["choices"].low > 0
    assert "Among the choices: fit a temperature on validation questions" in check.sentences[-1]
    assert "Among all tokens: a temperature does not reach these." in check.sentences[-1]


def test_an_under_confident_model_is_told_not_to_smooth(models):
    check = found(models, "calibrated", "blunt")
    assert check.after["choices"].verdict == "under-confident"
    assert check.temperatures == pytest.approx((0.5, 0.5), rel=0.15)
    assert "do not smooth" in check.sentences[-1]
    assert diagnosis.TRIAL not in check.sentences[-1]


def test_a_calibrated_model_is_left_alone(models):
    check = found(models, "sharp", "calibrated")
    assert check.after["choices"].verdict == "calibrated"
    assert "Among the choices: no error is shown that would have" in check.sentences[-1]


@pytest.mark.parametrize(
    ("among_all_tokens", "is_tried"), [("over-confident", True), ("under-confident", False)]
)
def test_smoothing_is_a_trial_and_never_for_the_choices(models, among_all_tokens, is_tried):
    """Choices that are too sure, and that one temperature is not shown to mend.

    Such choices were sent to smoothing, which a study of five seeds does not show to mend them.
    """
    check = found(models, "calibrated", "sharp")
    reading = replace(check.after["choices"], verdict=among_all_tokens)
    unmended = replace(check.change_by_temperature, low=-1.0, high=1.0)
    words = diagnosis.advice(
        replace(check, change_by_temperature=unmended, after={**check.after, "vocabulary": reading})
    )
    assert (diagnosis.TRIAL in words) == is_tried
    assert ("do not smooth" in words) == (not is_tried)
    among_choices, _, _ = words.partition("Among all tokens:")
    assert "mooth" not in among_choices
    assert "score more questions, if the task has more, else leave it" in among_choices
    alone = {"choices": check.after["choices"]}  # of texts, and at a temperature without a sidecar
    assert diagnosis.TRIAL not in diagnosis.advice(
        replace(check, change_by_temperature=unmended, after=alone)
    )


def test_answers_that_are_all_right_at_80_percent_are_under_confident(tmp_path):
    """They were "miscalibrated, though not shown to be too high or too low"."""
    row = {"subject": "s", "label": 0, "logprobs": np.log([0.8, 0.2]).tolist(), "letter_mass": 1.0}
    rows = [{"id": f"q{i}", **row} for i in range(100)]
    evaluation = evaluations.load(write_lines(tmp_path / "low.jsonl", rows))
    assert readings(evaluation)["choices"].verdict == "under-confident"


def test_a_model_that_is_all_right_is_checked_without_a_temperature(tmp_path, capsys):
    """It was refused with the remedy of `calibeval temperature`."""
    row = {"subject": "s", "label": 0, "logprobs": np.log([0.7, 0.2]).tolist()}
    rows = [{"id": f"q{i}", **row} for i in range(40)]
    path = str(write_lines(tmp_path / "right.jsonl", rows))
    check = calibeval.check(path, path)
    assert check.after["choices"].ece.value == pytest.approx(1 - 7 / 9)
    assert check.temperatures is None
    assert check.change_by_temperature is None
    assert main(["check", path, path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cooled_ece"] is None


def test_no_question_is_read_at_a_temperature_that_it_helped_to_fit(models):
    """Labels that are changed in one half move the other half's answers alone."""
    answers = records.read(models / "sharp.jsonl")
    cooled, _ = cross_fitted(answers)
    order = np.random.default_rng(0).permutation(len(answers))
    first, second = order[:1500], order[1500:]
    answers.labels[first] = (answers.labels[first] + 1) % 4
    changed, _ = cross_fitted(answers)
    assert np.array_equal(changed.logprobs[first], cooled.logprobs[first])
    assert not np.allclose(changed.logprobs[second], cooled.logprobs[second])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["{base}", "model/"], "model/: a model to be scored needs --task, --data and --out"),
        (["{base}", "{few}"], "3,000 and 30 questions"),
        (["{few}", "{few}"], "30 questions; expected 40 or more"),
        (["{base}", "{base}", "--figure", "x.svg"], "expected a file's name such as check.png"),
    ],
)
def test_what_cannot_be_checked_is_refused(models, tmp_path, capsys, arguments, error):
    few = tmp_path / "few.jsonl"
    write_lines(few, read_lines(models / "calibrated.jsonl")[:30])
    names = {"base": models / "calibrated.jsonl", "few": few}
    assert main(["check", *(word.format(**names) for word in arguments)]) == 2
    assert error in capsys.readouterr().err


def test_models_are_scored_first(tiny_model, mmlu, tmp_path, capsys):
    folder = tmp_path / "records"
    words = ["check", str(tiny_model), str(tiny_model), "--task", "mmlu", "--data", str(mmlu)]
    words += ["--shots", "1", "--out", str(folder)]
    assert main(words) == 0
    assert evaluations.load(folder / "tuned.jsonl").questions == len(
        read_lines(folder / "base.jsonl")
    )
    assert "no difference" in capsys.readouterr().out


def test_a_loss_of_accuracy_and_calibration_is_told_to_train_less(models):
    check = found(models, "calibrated", "sharp")
    lost = replace(check.change_of_accuracy, value=-0.05, low=-0.06, high=-0.04)
    assert "first try to train less" in diagnosis.advice(replace(check, change_of_accuracy=lost))
    assert "train less" not in diagnosis.advice(check)
    better = {name: replace(lost) for name in check.change_by_tuning}
    improved = replace(check, change_of_accuracy=lost, change_by_tuning=better)
    assert "train less" not in diagnosis.advice(improved)


def test_after_a_temperature_it_is_said_when_to_stop(models):
    """It sent the scaled records to nine trainings, for 0.004 of ECE."""
    check = replace(found(models, "calibrated", "sharp"), temperature_applied=2.0)
    assert "stop here" in diagnosis.advice_among_choices(check)


@pytest.mark.parametrize(
    ("settings", "split"),
    [
        ({"task": "mmlu"}, "val"),
        ({"task": "arc_easy", "split": "dev"}, None),
        ({"task": "boolq", "data": __file__}, None),  # of one file, `--split` is refused
    ],
)
def test_where_to_fit_a_temperature_is_said_of_tasks_that_have_a_place(tmp_path, settings, split):
    """The page told every task to take MMLU's `val`, which HellaSwag is asked on."""
    file = tmp_path / "r.jsonl"
    records.sidecar(file).write_text(json.dumps({"settings": settings}))
    assert diagnosis.validation_split(file) == split
