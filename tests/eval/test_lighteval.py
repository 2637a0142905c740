"""lighteval's details become records.

lighteval_details/ is what lighteval 0.13.0 wrote for the random model of `tiny_model`, under names
without `:` and `|`: `lighteval accelerate … --save-details` with its own prompts and metrics of
MMLU, ARC and WinoGrande, on local files of MMLU's and HellaSwag's questions (both MIT) and four
sentences made for it. `generated` is a task whose answers are written.
"""

import math
import shutil
from pathlib import Path

import pytest
from made_records import read_lines, write_lines

from calibeval import records
from calibeval.ask import prompts, tasks
from calibeval.ask.request import Task

parquet = pytest.importorskip("pyarrow.parquet")

DETAILS = Path(__file__).parent / "lighteval_details"
TASKS = {
    "mmlu": "mmlu:abstract_algebra|0",
    "hellaswag": "hellaswag|1",
    "winogrande": "winogrande|0",
    "generated": "generated|0",
}
TIME = "2026-11-28T14-00-44.136994"


def rows_of(name):
    return parquet.read_table(DETAILS / f"{name}.parquet").to_pylist()


@pytest.fixture
def run_folder(tmp_path):
    """The details as lighteval lays them out."""
    folder = tmp_path / "details" / "org" / "model" / TIME
    folder.mkdir(parents=True)
    for name, task in TASKS.items():
        shutil.copy(DETAILS / f"{name}.parquet", folder / f"details_{task}_{TIME}.parquet")
    return folder


@pytest.fixture
def imported(run_folder, tmp_path, run):
    """imported(name) → the records of a task's details."""

    def read(name):
        (file,) = run_folder.glob(f"details_{name}*")
        run("import", file, "--out", tmp_path / "r.jsonl")
        return records.read(tmp_path / "r.jsonl")

    return read


def test_letters_have_the_details_scores(imported, run):
    found = imported("mmlu")
    rows = rows_of("mmlu")
    assert (found.scoring, found.model, found.shots) == ("letters", "org/model", 0)
    assert found.ids == [f"abstract_algebra/{row['doc']['id']}" for row in rows]
    assert found.logprobs.tolist() == [row["model_response"]["logprobs"] for row in rows]
    masses = [sum(map(math.exp, row["model_response"]["logprobs"])) for row in rows]
    assert found.letter_mass == pytest.approx(masses)
    right = found.logprobs.argmax(1) == found.labels
    assert right.tolist() == [row["metric"]["acc"] == 1 for row in rows]
    assert "6 questions, letter mass 0.0" in run("metrics", found.path).out


def test_texts_are_as_right_as_each_metric_says(imported):
    by_characters = imported("hellaswag")
    by_sum = records.read(by_characters.path, "sum")
    assert (by_characters.normalise, by_characters.shots) == ("characters", 1)
    for found, metric in ((by_sum, "acc"), (by_characters, "acc_norm")):
        right = found.logprobs.argmax(1) == found.labels
        assert right.tolist() == [row["metric"][metric] == 1 for row in rows_of("hellaswag")]


def test_winogrande_is_of_texts_after_one_prompt(imported):
    found = imported("winogrande")
    assert (found.scoring, found.normalise, len(found)) == ("continuation", "sum", 4)


def test_the_example_asks_winogrande_as_lighteval_does(tmp_path):
    """The task file in eval/examples, on the sentences that lighteval was asked."""
    file = Path(__file__).parents[2] / "eval" / "examples" / "winogrande.yaml"
    sentences = []
    for number in range(4):
        sentence = f"The cup {number} did not fit the case because the _ was too large."
        answer = str(1 + number % 2)
        sentences.append(
            {"sentence": sentence, "option1": "cup", "option2": "case", "answer": answer}
        )
    data = write_lines(tmp_path / "validation.jsonl", sentences)
    (subject,) = tasks.load(Task(task=str(file), data=str(data)))
    expected = {row["doc"]["id"]: row["doc"] for row in rows_of("winogrande")}
    for number, question in enumerate(subject.questions):
        document = expected[str(number)]
        prompt = prompts.ContinuationScoring.build(subject, question, 0)
        whole = [prompt.text + prompt.separator + ending for ending in prompt.endings]
        assert whole == [document["query"] + choice for choice in document["choices"]]
        assert question.label == document["gold_index"]


def test_a_run_becomes_a_file_a_data_set(run_folder, tmp_path, run):
    files = [file for file in run_folder.iterdir() if "generated" not in file.name]
    run("import", *files, "--out", tmp_path / "out")
    names = sorted(file.stem for file in (tmp_path / "out").glob("*.jsonl"))
    assert names == ["local_hellaswag", "local_mmlu", "local_winogrande"]
    (subject,) = {row["subject"] for row in read_lines(tmp_path / "out" / "local_mmlu.jsonl")}
    assert subject == "abstract_algebra"


def changed(**keys):
    """Rows of MMLU, the first with other values of its answer or of its metric."""
    rows = rows_of("mmlu")
    for part in ("model_response", "metric", "doc"):
        rows[0][part].update({key: keys[key] for key in keys if key in rows[0][part]})
    return rows


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (rows_of("generated"), "0 log-probabilities of 4 choices.*the metric loglikelihood_acc"),
        (changed(acc=0), "acc is 0, but 1.0 by log-probabilities and gold_index"),
        (changed(id="1"), "id 'abstract_algebra/1' is on"),
        ([{"question": "?"}], "not lighteval's details"),
    ],
)
def test_what_is_no_multiple_choice_is_refused(rows, error, tmp_path, refused):
    import re

    import pyarrow

    file = tmp_path / "details_x_2026.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    message = refused("import", file, "--out", tmp_path / "out")
    assert re.search(error, message)
    assert str(file) in message
    assert not (tmp_path / "out").exists()


def test_whether_a_chat_was_asked_is_not_known(run_folder, tmp_path, run, refused):
    """The log does not say, so it may be compared with records of a chat and with others."""
    (file,) = run_folder.glob("details_mmlu*")
    imported_file = tmp_path / "r.jsonl"
    run("import", file, "--out", imported_file)
    # As `calibeval score` would write them, were the prompts the same.
    plain = write_lines(tmp_path / "plain.jsonl", read_lines(imported_file))
    of_chat = [{**row, "chat_template": "ab12"} for row in read_lines(imported_file)]
    in_chat = write_lines(tmp_path / "chat.jsonl", of_chat)
    assert "asked with chat template 'none' and 'ab12'" in refused("compare", plain, in_chat)
    run("compare", imported_file, in_chat)
    run("compare", imported_file, plain)


def test_a_pyarrow_that_runs_what_a_file_holds_is_refused(run_folder, refused, monkeypatch):
    monkeypatch.setattr("pyarrow.__version__", "14.0.0")
    (file,) = run_folder.glob("details_mmlu*")
    message = refused("import", file, "--out", run_folder / "r.jsonl")
    assert "pyarrow 14.0.0" in message and "pip install --upgrade pyarrow" in message
