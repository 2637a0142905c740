"""The learning rate is chosen on validation, whatever the test says."""

import json
import math

from sweeps import launch, results, score
from sweeps.cli import main
from sweeps.files import make_folder, write_json
from sweeps.rundir import RunDir


def answer(cell, task, sweep, right: int, confidence: float) -> None:
    """Records of ten questions, the first `right` of them answered rightly."""
    subject = score.of_cell(cell)
    make_folder(subject.scores)
    other = math.log((1 - confidence) / 3)
    rows = []
    for number in range(10):
        logprobs = [other] * 4
        logprobs[0 if number < right else 1] = math.log(confidence)
        rows.append(
            {"id": f"q{number}", "subject": "s", "label": 0, "logprobs": logprobs,
             "letter_mass": 1.0, "prompt_sha256": "0", "shots": 0, "model": "m", "versions": {}}
        )  # fmt: skip
    subject.records(task).write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json(subject.scores / f"{task.key}.request.json", score.request(task, sweep.score))


def choose(path, right, confidence=lambda cell, task: 0.7) -> list[dict]:
    """The choice when `right(values, task)` answers are right."""
    planned = launch.plan(path, [])
    for cell in planned.cells:
        for task in planned.sweep.score.tasks:
            count = right(cell.values, task.key)
            if count is not None:
                answer(cell, task, planned.sweep, count, confidence(cell.values, task.key))
    return results.best_learning_rates(planned.sweep, planned.cells)


def graded(sweep_file, tiny, **grid):
    tasks = [
        {"task": "mmlu", "data": str(tiny / "mmlu")},
        {"task": "mmlu", "name": "val", "data": str(tiny / "mmlu"), "split": "val"},
    ]
    grid = {"learning_rate": [1e-5, 1e-4, 1e-3], "label_smoothing": [0.0, 0.1]} | grid
    return sweep_file(grid=grid, score={"tasks": tasks, "select_on": "val"})


def test_validation_chooses_and_the_test_does_not(sweep_file, tiny):
    """On the test set the largest rate wins everywhere; on validation another one for each β."""
    val = {0.0: {1e-5: 5, 1e-4: 8, 1e-3: 2}, 0.1: {1e-5: 9, 1e-4: 8, 1e-3: 2}}
    test = {1e-5: 1, 1e-4: 2, 1e-3: 10}

    def right(values, task):
        rate = values["learning_rate"]
        return test[rate] if task == "mmlu" else val[values["label_smoothing"]][rate]

    rows = choose(graded(sweep_file, tiny), right)
    assert [(r["label_smoothing"], r["best_learning_rate"]) for r in rows] == [
        (0.0, 1e-4),
        (0.1, 1e-5),
    ]
    assert [r["accuracy on val"] for r in rows] == [0.8, 0.9]
    assert all(r["of"] == 3 and r["seeds"] == 1 for r in rows)


def test_seeds_are_averaged_and_ties_go_to_the_lower_nll(sweep_file, tiny):
    """1e-5 has the best single seed; 1e-4 and 1e-3 tie in the mean."""
    seeds = {1e-5: {1: 10, 2: 2}, 1e-4: {1: 7, 2: 7}, 1e-3: {1: 8, 2: 6}}
    path = graded(sweep_file, tiny, label_smoothing=[0.0], seed=[1, 2])
    (row,) = choose(
        path,
        lambda values, task: seeds[values["learning_rate"]][values["seed"]],
        lambda values, task: 0.7 if values["learning_rate"] == 1e-3 else 0.9,
    )
    assert (row["best_learning_rate"], row["seeds"]) == (1e-3, 2)


def test_each_data_set_and_model_has_its_own_choice(sweep_file, tiny):
    files = [str(tiny / "chat.jsonl"), str(tiny / "other.jsonl")]
    path = graded(sweep_file, tiny, label_smoothing=[0.0])
    text = path.read_text().replace(f"  train_file: {files[0]}\n", "")
    path.write_text(text.replace("grid:\n", f"grid:\n  train_file: {json.dumps(files)}\n"))
    best = {files[0]: 1e-5, files[1]: 1e-3}
    rows = choose(path, lambda v, task: 9 if best[v["train_file"]] == v["learning_rate"] else 4)
    assert {row["trained_on"]: row["best_learning_rate"] for row in rows} == best


def test_runs_that_are_not_scored_do_not_count(sweep_file, tiny):
    path = graded(sweep_file, tiny, label_smoothing=[0.0])
    (row,) = choose(path, lambda v, task: None if v["learning_rate"] == 1e-3 else 5)
    assert row["of"] == 2


def test_the_held_out_loss_chooses_where_it_is_asked_to(sweep_file, capsys):
    """Mean over seeds; runs that are not finished do not count."""
    losses = {1e-5: (2.5, 2.1), 1e-4: (2.2, 2.2), 1e-3: (2.0, None)}
    score = {"tasks": [{"task": "mmlu", "data": "x"}], "select_on": "held_out_loss"}
    grid = {"learning_rate": list(losses), "seed": [1, 2]}
    assert main(["plan", str(sweep_file(grid=grid, score=score))]) == 2
    assert "score.select_on: held_out_loss needs train.held_out" in capsys.readouterr().err
    planned = launch.plan(sweep_file(grid=grid, train={"held_out": 4}, score=score), [])
    for cell in planned.cells:
        loss = losses[cell.values["learning_rate"]][cell.values["seed"] - 1]
        run = RunDir(cell.folder)
        run.create(cell.config)
        run.write_manifest(run.manifest() | {"held_out_loss": loss or 1.0})
        if loss:
            (run.path / "DONE").touch()
    (row,) = results.best_learning_rates(planned.sweep, planned.cells)
    assert (row["best_learning_rate"], row["held_out_loss"], row["seeds"]) == (1e-3, 2.0, 1)
    (cell.folder / "DONE").touch()
    run.write_manifest(run.manifest() | {"held_out_loss": 2.5})
    (row,) = results.best_learning_rates(planned.sweep, planned.cells)
    assert (row["best_learning_rate"], row["held_out_loss"], row["seeds"]) == (1e-4, 2.2, 2)


def test_the_test_split_chooses_nothing(sweep_file, capsys):
    """Its own figures in the table would be those of the rate that suits it best."""
    tasks = [{"task": "arc_easy", "data": "x"}, {"task": "arc_easy", "name": "v", "data": "x"}]
    tasks[1]["split"] = "dev"
    path = sweep_file(score={"tasks": tasks, "select_on": "arc_easy"})
    assert main(["plan", str(path)]) == 2
    asks = "score.select_on: arc_easy asks the test split, whose figures the tables show; expected"
    assert f"{asks} a task with split: dev, or null" in capsys.readouterr().err
    assert main(["plan", str(path), "score.select_on=v"]) == 0


def test_nothing_is_chosen_without_a_validation_task(sweep_file, tiny):
    tasks = [{"task": "mmlu", "data": str(tiny / "mmlu")}]
    path = sweep_file(grid={"learning_rate": [1e-5, 1e-4]}, score={"tasks": tasks})
    assert choose(path, lambda values, task: 5) == []
