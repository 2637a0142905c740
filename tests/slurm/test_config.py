"""Sweep files: what is refused, and in which words; what decides a run's folder."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real import PROJECT

from sweeps import launch
from sweeps.cli import main
from sweeps.cluster import load_cluster
from sweeps.config import dump_yaml, override, parse_yaml
from sweeps.files import SweepError
from sweeps.plan import load_sweep
from sweeps.provenance import shown


def refusal(path, *assignments) -> str:
    with pytest.raises(SweepError) as caught:
        launch.plan(path, list(assignments))
    return str(caught.value)


@pytest.mark.parametrize("text", ["2e-5", "2.0e-5", ".00002", "0.00002"])
def test_floats_are_read_as_people_write_them(text):
    assert parse_yaml(text, "here") == 2e-5


@pytest.mark.parametrize("word", ["no", "yes", "on", "off", "12:00:00", "2026-11-22", "1_000"])
def test_words_stay_words(word):
    assert parse_yaml(word, "here") == word
    assert parse_yaml("[true, False, 7, -3, null]", "here") == [True, False, 7, -3, None]


@given(st.one_of(st.text("0123456789.:_eE+-noyftarux", max_size=6), st.floats(allow_nan=False)))
def test_what_is_written_is_read_back(value):
    assert parse_yaml(dump_yaml({"key": value}), "here") == {"key": value}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_survives_an_override(value):
    raw = {"train": {}}
    override(raw, [f"train.learning_rate={value!r}"])
    assert raw["train"]["learning_rate"] == value


def test_unknown_keys_come_with_the_nearest_known_one(sweep_file):
    path = sweep_file(train={"learning_rat": 1e-3})
    text = refusal(path)
    assert str(path) in text
    assert "'train.learning_rat'" in text
    assert "did you mean 'learning_rate'?" in text
    assert "did you mean 'workers'?" in refusal(sweep_file(worker=2))
    assert "did you mean 'shots'?" in refusal(
        sweep_file(score={"tasks": [{"task": "mmlu", "data": "x", "shot": 1}]})
    )


def test_a_misspelt_file_comes_with_the_nearest_one(sweep_file):
    path = sweep_file()
    assert refusal(path.with_name("tinny.yaml")).endswith(f"; did you mean {path}?")
    shipped = shown(PROJECT / "configs/sweeps/beta.yaml")
    assert f"did you mean {shipped}?" in refusal(path.with_name("betta.yaml"))
    assert "did you mean" not in refusal(path.with_name("config.yaml"))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["statsu", "tiny.yaml"], "'status'"),
        (["launch", "tiny.yaml", "--executer", "local"], "'--executor'"),
        (["logs", "--rum=beta", "tiny.yaml"], "'--run'"),
    ],
)
def test_a_misspelt_command_or_option_comes_with_the_nearest_one(typed, meant, capsys):
    with pytest.raises(SystemExit) as left:
        main(typed)
    assert left.value.code == 2 and f"did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("configs/cluster/cloud.yaml", "partition, time, score_time, cpus_per_process, …"),
        ("configs/deepspeed/zero3.json", "bf16, zero_optimization, "),
    ],
)
def test_another_kind_of_file_is_named(file, keys):
    text = refusal(PROJECT / file)
    assert f"{file}: none of its keys ({keys}" in text and "unknown key" not in text
    assert "is known; a sweep is expected, for example configs/sweeps/beta.yaml" in text


def test_a_sweep_is_no_cluster_profile(sweep_file):
    expected = r"none of its keys \(.*\) is known; a cluster profile is expected, for example"
    with pytest.raises(SweepError, match=expected):
        load_cluster(str(sweep_file()))


@pytest.mark.parametrize(
    ("grid", "parts"),
    [
        (
            {"label_smoothing": [0.0, 1.5]},
            ["grid.label_smoothing", "1.5", "less than or equal to 1"],
        ),
        ({"label_smoothing": [True]}, ["grid.label_smoothing", "True", "number"]),
        ({"learning_rate": [-1e-5]}, ["grid.learning_rate", "-1e-05", "greater than 0"]),
        ({"learning_rate": ["fast"]}, ["grid.learning_rate", "'fast'", "number"]),
        ({"learning_rate": [float("nan")]}, ["grid.learning_rate", "nan", "finite"]),
        ({"sed": [1]}, ["'grid.sed'", "did you mean 'seed'?"]),
        ({"seed": []}, ["grid.seed", "expected at least 1 item"]),
        ({"seed": 1}, ["grid.seed: found 1, expected a list: [1]"]),
        ({"seed": "1,2"}, ["grid.seed: found '1,2', expected a list: [1,2]"]),
        ({"seed": r"\d"}, [r"expected a list: [\d]"]),
        ({"seed": [1, 1]}, ["same run"]),
    ],
)
def test_a_bad_grid_value_is_named(sweep_file, grid, parts):
    text = refusal(sweep_file(grid=grid))
    for part in [*parts, "tiny.yaml"]:
        assert part in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("grid=[]", "grid: found [], expected keys with their values"),
        ("score.tasks=mmlu", "score.tasks: found 'mmlu', expected a list: [mmlu]"),
        ("score.tasks=[mmlu]", "score.tasks.0: found 'mmlu', expected keys with their values"),
        ("name=", "name: found None, expected text in quotes"),
    ],
)
def test_what_is_expected_is_said_in_yamls_words(sweep_file, override, expected):
    said = refusal(sweep_file(score={"tasks": [{"task": "mmlu", "data": "x"}]}), override)
    assert expected in said and "\n" not in said


def test_an_override_is_blamed_on_the_command_line(sweep_file):
    text = refusal(sweep_file(), "train.num_train_epochs=0")
    assert "command line (train.num_train_epochs=0)" in text
    assert "greater than or equal to 1" in text
    assert "expected key=value" in refusal(sweep_file(), "seed")
    quoted = "'grid.seed=[1,': a [ without its ]; what has spaces in it needs quotes"
    assert refusal(sweep_file(), "grid.seed=[1,", "2]").endswith(quoted)
    assert refusal(sweep_file(), "my.yaml").endswith("; a sweep file is --config FILE")
    profile = sweep_file(cluster="my.yaml")
    assert "cluster is the single value 'my.yaml'" in refusal(profile, "cluster.account=me")


def test_a_key_in_train_and_grid_is_refused(sweep_file):
    assert "both" in refusal(sweep_file(train={"label_smoothing": 0.1}))


def test_an_axis_that_is_typed_replaces_the_files_one_value(sweep_file):
    path = sweep_file(train={"weight_decay": 0.1})
    planned = launch.plan(path, ["grid.weight_decay=[0.0,0.2]"])
    assert [cell.values["weight_decay"] for cell in planned.cells] == [0.0, 0.2] * 2
    assert "both" in refusal(path, "grid.weight_decay=[0.2]", "train.weight_decay=0.3")


def test_logs_of_a_run_that_is_not_there_name_one_that_is(sweep_file, capsys):
    path = str(sweep_file())
    assert main(["logs", path, "--run", "nonsense"]) == 2
    assert "no run's name has 'nonsense' in it; one is" in capsys.readouterr().err
    assert main(["logs", path]) == 0
    assert "has not started" in capsys.readouterr().out


def test_not_yaml_names_line_and_column(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("name: a\ntrain: [1,\n")
    assert f"{path}:3:1" in refusal(path)
    path.write_bytes("name: Mädchen".encode("latin-1"))
    assert refusal(path) == f"{path}, line 1: not UTF-8 text (byte 0xe4)"


def test_a_key_written_twice_is_refused(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("name: a\ntrain:\n  learning_rate: 1\n  learning_rate: 2.0e-4\n")
    assert refusal(path) == f"{path}:4:3: not YAML: the key 'learning_rate' is given twice"
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}", "")["b"] == {"x": 3, "y": 2}


def test_unknown_backend_lists_the_known(sweep_file):
    assert "did you mean 'builtin'?" in refusal(sweep_file(backend="buildin"))


def test_paths_are_written_as_a_shell_reads_them(sweep_file, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("HOME", "/home/me")
    task = {"task": "mmlu", "data": "$SCRATCH/mmlu"}
    top = {"output_root": "${SCRATCH}/my runs", "score": {"tasks": [task]}}
    path = sweep_file(train={"train_file": "~/a.jsonl"}, **top)
    planned = launch.plan(path, [])
    assert planned.sweep.output_root == "/scratch/me/my runs"
    assert planned.cells[0].config.train["train_file"] == "/home/me/a.jsonl"
    assert planned.sweep.score.tasks[0].data == "/scratch/me/mmlu"
    for name in ("SCRATCH", "WORK"):
        monkeypatch.delenv(name, raising=False)
    said = refusal(path)
    assert f"{path}: output_root: ${{SCRATCH}}/my runs: $SCRATCH is not set in this shell" in said
    said = refusal(path, "output_root=$WORK/x")
    assert "command line (output_root=$WORK/x): output_root: $WORK/x: $WORK is not set" in said
    assert "no such user's home" in refusal(path, "output_root=~nobody-here/x")


def test_overrides_reach_into_lists(sweep_file):
    path = sweep_file(score={"tasks": [{"task": "mmlu", "data": "x"}]})
    sweep, _ = load_sweep(path, ["score.tasks.0.limit=7", "grid.seed=[1, 2]"])
    assert sweep.score.tasks[0].limit == 7
    assert sweep.grid["seed"] == (1, 2)


def test_the_folder_is_a_function_of_the_resolved_config(sweep_file):
    names = [cell.folder.name for cell in launch.plan(sweep_file(), []).cells]
    assert len(set(names)) == 2
    assert names[0].startswith("model-lr2e-05-beta0-seed42-")
    # Writing a default out, or asking through the other door, is the same run.
    again = launch.plan(sweep_file(), ["train.weight_decay=0.0", "train.learning_rate=0.00002"])
    assert [cell.folder.name for cell in again.cells] == names
    other = launch.plan(sweep_file(), ["train.num_train_epochs=3"])
    assert not {cell.folder.name for cell in other.cells} & set(names)


def test_bad_input_is_one_line_without_a_traceback(sweep_file, capsys):
    assert main(["plan", str(sweep_file(grid={"label_smoothing": [2]}))]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.out == ""


def test_missing_files_are_all_named_before_anything_starts(sweep_file, tmp_path, capsys):
    path = sweep_file(
        train={"model_name_or_path": "./nowhere", "train_file": "gone.jsonl"},
        score={"tasks": [{"task": "mmlu", "data": "no-such-folder"}]},
    )
    assert main(["launch", str(path), "--executor", "local"]) == 2
    text = capsys.readouterr().err
    for part in ("./nowhere", "gone.jsonl", "no-such-folder"):
        assert part in text
    assert not (tmp_path / "out").exists()


def test_overrides_may_follow_options(sweep_file, capsys):
    assert main(["launch", str(sweep_file()), "--dry-run", "grid.seed=[1,2,3]"]) == 0
    assert "6 runs, 0 done" in capsys.readouterr().out


def test_a_typed_profile_must_be_there(sweep_file, capsys):
    assert main(["plan", str(sweep_file()), "--cluster", "nowhere.yaml"]) == 2
    assert "nowhere.yaml: could not be read" in capsys.readouterr().err


def test_one_run_is_said_in_the_singular(sweep_file, capsys):
    assert main(["plan", str(sweep_file(grid={}))]) == 0
    assert "\n1 run, 0 done, 1 to do" in capsys.readouterr().out


def test_a_tasks_scoring_is_passed_on():
    from sweeps.config import Task
    from sweeps.questions import options

    task = Task(task="arc_easy", data="arc", scoring="letters")
    assert options(task) == ["--task", "arc_easy", "--data", "arc", "--scoring", "letters"]
    assert "--scoring" not in options(Task(task="arc_easy", data="arc"))
    with pytest.raises(ValueError, match="scoring"):
        Task(task="arc_easy", data="arc", scoring="letter")
