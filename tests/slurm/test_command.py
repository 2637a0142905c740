"""`backend: command`: sweeps of a script that knows nothing of sweeps, here `toy/script.py`."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sweep_tools
from sweep_tools import (
    TOY_COMMAND,
    command,
    kill,
    launch,
    programs,
    rows,
    runs_of,
    toy_weights,
    wait_for,
)

from calibeval.io import InputError
from sweeps.launch import preflight
from sweeps.runs.grid import plan_sweep
from sweeps.runs.run import Run

EXAMPLES = sweep_tools.PROJECT / "slurm" / "examples"
TEMPLATES = sweep_tools.PROJECT / "slurm" / "sweeps" / "training" / "chat_templates"


def weights(run: Run) -> str:
    return (run.model / "state").read_text()


def test_any_keys_are_swept_and_each_run_is_done(command_file):
    words = [*TOY_COMMAND[:-1], "--steps={steps}", TOY_COMMAND[-1]]
    grid = {"beta": [0.0, 0.1], "seed": [3]}
    path = command_file(words, grid, train={"steps": 5}, workers=2)
    launch(path, "--executor", "local")
    runs = runs_of(path)
    assert [weights(run) for run in runs] == [toy_weights(beta, 3, 5) for beta in (0.0, 0.1)]
    assert all(run.done and not run.unfinished_file.exists() for run in runs)
    assert runs[1].name.startswith("model-seed3-beta0.1-steps5-")
    log = (runs[0].path / "train.log").read_text()
    assert f"{TOY_COMMAND[1]} --beta=0.0 --seed 3 --steps=5 --out={runs[0].path}\n" in log
    assert "2 done" in command("status", path).stdout
    table = (runs[0].path.parent / "results" / "runs.csv").read_text()
    assert table.startswith("run,beta,seed,state,")


KEYS = {"beta": [0.1], "seed": [1]}
TABLES = {"model_name_or_path": ["m"], "label_smoothing": [0.1]}
SMOOTHING = "train.label_smoothing"
SCORE = {"tasks": [{"task": "mmlu", "data": "x"}]}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"words": [*TOY_COMMAND, "--lr={learning_rate}"]}, "train.command", "{learning_rate}"),
        ({"train": {"betta": 0.2}}, "train.betta", "{betta}"),
        ({"grid": {**KEYS, "lr": [1e-5]}}, "grid.lr", "{lr}"),
        ({"words": ["python", "{beta}", "{seed}"]}, "train.command", "{run_dir}/model"),
        ({"score": SCORE}, "train.model_name_or_path", "the model before fine-tuning"),
        ({"score": SCORE, "grid": {**KEYS, **TABLES, "label_smoothing": ["0"]}}, SMOOTHING, "to 1"),
        (
            {
                "words": [*TOY_COMMAND, "{dataset}"],
                "score": SCORE,
                "grid": {**KEYS, **TABLES, "dataset": [1]},
            },
            "train.dataset",
            "my_dataset",
        ),
    ],
)
def test_what_a_command_has_wrong_is_named_with_its_key(command_file, changes, key, words):
    path = command_file(**changes)
    with pytest.raises(InputError) as error:
        plan_sweep(path, [])
    assert str(path) in str(error.value) and f"{key}: " in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("words", "overrides", "key"),
    [
        (["no-such-program"], [], "train.command: no-such-program: no such program"),
        (["python", "no_script.py"], [], f"train.command: {Path('no_script.py').absolute()}: no s"),
        (["python", "-m", "x"], ["world.mixed_precision=bf16"], "world.mixed_precision: "),
    ],
)
def test_what_is_not_there_is_named_before_anything_is_queued(command_file, words, overrides, key):
    path = command_file(words=[*words, "{beta}", "{seed}", "{run_dir}"])
    (problem,) = preflight.problems(plan_sweep(path, overrides), "local")
    assert problem.startswith(key)


def test_runs_that_fail_are_named_with_their_logs(command_file):
    ends = {
        "3": "exit 3: ValueError: the data make no sense",
        "2": "exit 2: ValueError: the data make no sense",
        "nothing": "exit 2: error: the command has ended well, and left nothing in ",
    }
    path = command_file([*TOY_COMMAND, "--end={end}"], {**KEYS, "end": list(ends)}, workers=3)
    printed = launch(path, "--executor", "local", code=1)
    told = command("status", path).stdout
    assert "3 dead" in told
    for run, words in zip(runs_of(path), ends.values(), strict=True):
        assert f"failed: {run.name}: {words}" in printed and f"{run.path}/*.log" in printed
        assert words in told
        assert not run.trained  # although the script has made model/ at its start
        assert len(rows(run, "began")) == 1


@pytest.mark.parametrize(
    "way",
    [
        "the stop file",
        pytest.param("a kill", marks=pytest.mark.slow),
    ],
)
def test_a_disturbed_run_ends_with_the_weights_of_an_undisturbed_one(command_file, hold, way):
    path = command_file()
    (run,) = runs_of(path)
    process = start_launch(path)
    wait_for(run.model.is_dir)
    assert not run.trained
    if way == "a kill":  # it begins again by itself
        kill(programs(run))
        wait_for(lambda: len(rows(run, "began")) == 2)
        hold.unlink()
        assert process.wait(timeout=60) == 0
    else:
        run.stop_file.touch()
        assert process.wait(timeout=60) == 1
        assert run.last_saved_step() > 0 and not run.trained
        assert "1 stopped" in command("status", path).stdout
        hold.unlink()
        launch(path, "--executor", "local")
    assert weights(run) == toy_weights(0.1, 1)


def start_launch(*words: object) -> subprocess.Popen:
    """A launch on this machine that goes on in the background."""
    return subprocess.Popen(
        [sys.executable, "-m", "sweeps", "launch", *map(str, words), "--executor", "local"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def test_a_script_that_heeds_no_term_is_stopped_all_the_same(command_file, hold):
    path = command_file(words=[*TOY_COMMAND, "--end=deaf"])
    (run,) = runs_of(path)
    process = start_launch(path)
    wait_for(lambda: run.model.is_dir())
    run.stop_file.touch()
    assert process.wait(timeout=60) == 1
    assert rows(run, "ended")[-1]["exit"] == 75 and not run.trained


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_trains_with_trl_stops_goes_on_and_is_scored(tiny, tmp_path):
    pytest.importorskip("trl")
    model = shutil.copytree(tiny / "model", tmp_path / "model")
    shutil.copy(TEMPLATES / "tulu.jinja", model / "chat_template.jinja")
    overrides = [
        f"output_root={tmp_path}",
        f"train.model_name_or_path={model}",
        f"train.train_file={tiny / 'chat.jsonl'}",
        f"score.tasks.0.data={tiny / 'mmlu'}",
        "train.epochs=10",
        "grid.seed=[1]",
        "grid.label_smoothing=[0.1]",
    ]
    example = EXAMPLES / "trl_sft.yaml"
    runs = runs_of(example, *overrides)
    process = start_launch(example, *overrides)
    wait_for(lambda: runs[0].metrics.exists() or process.poll() is not None)
    kill(programs(runs[0]), signal.SIGTERM)
    assert process.wait(timeout=200) == 1
    assert rows(runs[0], "ended")[-1]["exit"] == 75 and runs[0].last_saved_step() > 0
    printed = launch(example, "--executor", "local", *overrides)
    assert all(run.done for run in runs) and "report: " in printed
