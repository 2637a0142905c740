"""Sweep files and profiles: what is refused, where, and in which words; what decides a folder."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sweep_tools import PROJECT, command, launch

from calibeval.io import InputError
from sweeps import cli
from sweeps.runs.grid import plan_sweep
from sweeps.runs.schema import load_cluster
from sweeps.runs.yaml_io import dump_yaml, parse

TASK = {"task": "mmlu", "data": "x"}


def refusal(path, *overrides) -> str:
    """The words with which a sweep file is refused."""
    with pytest.raises(InputError) as caught:
        plan_sweep(path, list(overrides))
    return str(caught.value)


def profile_refusal(path, text: str) -> str:
    """The words with which a cluster profile is refused."""
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_cluster(str(path))
    return str(caught.value)


def test_words_stay_words_and_floats_are_floats():
    words = ["no", "yes", "on", "off", "12:00:00", "2026-11-22", "1_000", "007"]
    values, _ = parse(f"[{', '.join(words)}, 2e-5, .5, true, 7, null]", "here")
    assert values == [*words, 2e-5, 0.5, True, 7, None]


@given(st.one_of(st.text("0123456789.:_eE+-noyftarux", max_size=6), st.floats(allow_nan=False)))
def test_what_is_written_is_read_back(value):
    assert parse(dump_yaml({"key": value}), "here")[0] == {"key": value}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"train": {"learning_rat": 1e-3}},
            "{path}:5: train.learning_rat: unknown key; all are printed by: "
            "bash /x/sweeps.sh keys toy.backend",
        ),
        ({"workers": 0}, "{path}:10: workers: found 0: Input should be greater than"),
        ({"grid": {"seed": [1, "two"]}}, ":6: grid.seed: found 'two': Input should be"),
        ({"grid": {"seed": [1, 1]}}, "{path}:5: grid: {'seed': 1} and {'seed': 1} are the same"),
        (
            {"train": {"train_file": "$NOT_SET/x"}},
            "{path}:5: train.train_file: $NOT_SET/x: $NOT_SET is not set here",
        ),
    ],
)
def test_what_a_file_has_wrong_comes_with_its_line(toy_file, monkeypatch, keys, message):
    monkeypatch.setenv("SWEEPS", "bash /x/sweeps.sh")  # as sweeps.sh does
    path = toy_file(**keys)
    assert message.replace("{path}", str(path)) in refusal(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=many", "command line (train.steps=many): train.steps: found 'many'"),
        ("train={}", "train.model_name_or_path: is missing"),
        ("grid.seed=[1,", "command line (grid.seed=[1,):2:1: not YAML"),
        ("score.tasks.1.shots=1", "which has no such place"),
        ("grid.label_smoothing=[]", "grid.label_smoothing: found []"),
        ("train.label_smoothing=0.1", "grid.label_smoothing: is given in `train` too"),
        ("backend=nothing", "'nothing' is none of trainer, open-instruct"),
        ("backend=json", "no module that trains: it has no `Train`"),
        ("score.select_on=other", "'other' is none of ['mmlu', 'held_out_loss']"),
        ("score.select_on=held_out_loss", "held_out_loss needs train.held_out"),
        ("score.select_on=mmlu", "asks the test split, which the tables show; name a task"),
        ("score.tasks=[{task: mmlu, shot: 1}]", "1}]): score.tasks.0.shot: unknown key"),
        ("output_root=/a$NOT_SET", "$NOT_SET is not set here: export NOT_SET=…, or write $$ for a"),
        ("output_root=/a${HOME:-x}", "/a${HOME:-x}: write $NAME or ${NAME}, or $$ for a dollar"),
        ("grid.held_out=[0] score.select_on=held_out_loss", "held_out_loss needs train.held_out"),
        ("score.tasks.0.task={own} score.select_on=own", "own asks the test split, which the"),
        ("backend=trainer grid.seed=[4294967296]", "Input should be less than 4294967296"),
        ("grid.train_file=[a, $NOT_SET]", "$NOT_SET]): grid.train_file.1: $NOT_SET: $NOT_SET is"),
    ],
)
def test_what_an_override_has_wrong_comes_with_it(toy_file, tmp_path, override, message):
    task_file = tmp_path / "own.yaml"
    task_file.write_text("data: {path: rows}\nother_split: dev\n")
    overrides = re.split(r" (?=[a-z]+\.\w+=)", override.replace("{own}", str(task_file)))
    words = refusal(toy_file(score={"tasks": [TASK]}), *overrides)
    assert message in words
    assert "{'task': 'mmlu', 'shot'" not in words  # of two mistakes of a task the other alone


@pytest.mark.parametrize("name", ["my#1: x.yaml", "[a].yaml", "p$1.yaml", "007", "a b.yaml"])
def test_a_profile_is_a_path_whatever_characters_it_has(toy_file, tmp_path, monkeypatch, name):
    """`--cluster` was read as YAML, with variables in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("{}")
    parsed = cli._parse(["status", str(toy_file()), "--cluster", name])
    plan = plan_sweep(parsed.sweep, parsed.overrides)
    assert plan.sweep.cluster == str(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", ":2: a: is given twice"),
        ("[1]", "expected `key: value` lines, found list"),
        ("", "expected `key: value` lines, found NoneType"),
    ],
)
def test_a_file_that_is_no_sweep_is_named(tmp_path, text, message):
    file = tmp_path / "odd.yaml"
    file.write_text(text)
    words = refusal(file)
    assert words.startswith(f"{file}:") and message in words
    assert "none.yaml: could not be read" in refusal(tmp_path / "none.yaml")
    assert "launched.yaml: could not be read" in refusal(tmp_path)


ONE_LINE = "must be one line"
OWN_OPTIONS = {  # of sbatch, which sweeps sets itself, and what is named instead
    "--export=ALL": "pass_environment",
    "--array=0-9": "throttle",
    "--signal=USR1@9": "signal_seconds",
    "--output=/dev/null": "jobs/",
    "--no-requeue": "requeue themselves",
    "--dependency=singleton": "wait for each other",
    "--wait": "would not return",
    "--test-only": "--dry-run",
    "--nodes=2": "world.nodes",
    "--ntasks=2": "world.processes_per_node",
    "--tasks-per-node=2": "world.processes_per_node",  # sbatch takes it, and does not list it
    "--job-name=x": "name of the sweep",
    "--clusters=a": "name the cluster in clusters",
    # sbatch takes beginnings.
    "--cluster=a": "name the cluster in clusters",
    "--tasks=2": "world.processes_per_node",
    "--depend=afterok:1": "wait for each other",
    "-C gpu": "should match pattern",
    "--time=soon": "write 12:00:00 (hours)",
}
TOKENS = [  # which each job's script would hold, where others can read it
    "export HF_TOKEN=hf_5ecret",
    "A=b MY_PASSWORD=5ecret true",
    "wandb login 5ecret",
    "hf auth login --token 5ecret",
    "huggingface-cli login --token='5ecret'",
    "git clone https://ann:5ecret@example.org/data",
]
BAD_PROFILES = [  # a profile's keys, the key that is named, and what is said of it
    ({"partitoin": "gpu"}, "partitoin", "unknown key"),
    ({"environment": {"HF_TOKEN": "hf_5ecret"}}, "environment", "unknown key"),
    ({"time": 12}, "time", "write it as text: '12'"),
    ({"memory_per_node": 4}, "memory_per_node", "write the unit: 4G"),
    ({"clusters": "a,b"}, "clusters", "found 'a,b'"),
    ({"score_time": "12 hours"}, "score_time", "write 12:00:00 (hours) or 1-00:00 (days-hours"),
    ({"partition": "gpu\nother"}, "partition", ONE_LINE),
    ({"python": "apptainer exec --env HF_TOKEN=hf_5ecret x python"}, "python", "secrets_file"),
    ({"time": "5:00"}, "signal_seconds", "300 s before the end of time, 5:00, is"),
    ({"time": "2", "signal_seconds": 121}, "signal_seconds", "121 s before the end of time"),
    ({"score_time": "4"}, "signal_seconds", "300 s before the end of score_time, 4, is"),
    ({"extra": ["--time=5"]}, "signal_seconds", "before the end of extra's --time, 5, is"),
    *(
        ({"pass_environment": [name]}, "pass_environment.0", "")
        for name in ("ALL", "NONE", "HF_TOKEN=hf_5ecret", "A,B")
    ),
    *(({"extra": [option]}, "extra.0", named) for option, named in OWN_OPTIONS.items()),
    *(({"setup": ["module list", line]}, "setup.1", "secrets_file") for line in TOKENS),
]
GOOD_PROFILES = [
    *({"time": time} for time in ("INFINITE", "0", "1-00:00:01", "1:00:00", "6:00", "6")),
    {"extra": ["--time=1:00:00"], "time": "4", "score_time": "4"},
    {"extra": ["--exclusive", "--mail-type=FAIL", "--mem-per-cpu=2G", "--nodelist=n1"]},
    {"extra": ["--ntasks-per-core=1", "--time-min=1"]},
    {"setup": ["export HF_TOKEN=$(cat ~/.token)", 'export HF_TOKEN="$MINE"']},
    {"setup": ['wandb login "$KEY"', "hf auth login --token $HF_TOKEN", "TOKENIZERS_THREADS=4"]},
]


@pytest.mark.parametrize(("keys", "key", "said"), BAD_PROFILES, ids=str)
def test_what_a_profile_has_wrong_is_named_and_no_token_repeated(tmp_path, keys, key, said):
    file = tmp_path / "odd.yaml"
    words = profile_refusal(file, yaml.safe_dump(keys))
    assert words.startswith(f"{file}:") and f"{key}: " in words and said in words
    assert "5ecret" not in words


@pytest.mark.parametrize("keys", GOOD_PROFILES, ids=str)
def test_a_profile_that_says_what_slurm_takes_is_taken(tmp_path, keys):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(keys))
    cluster = load_cluster(str(file))
    for key, value in keys.items():
        assert getattr(cluster, key) == (tuple(value) if isinstance(value, list) else value)


def test_two_dollars_are_a_literal_one(toy_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HALF", "$HALF")  # what a variable holds is not read again
    path = toy_file(grid={}, output_root=f"{tmp_path}/a$$b")
    plan = plan_sweep(path, ["train.train_file=$HALF/$$x/${HALF}"])
    assert plan.folder == tmp_path / "a$b" / "toy"
    assert plan.runs[0].config().train["train_file"] == "$HALF/$x/$HALF"
    plan.create()  # launched.yaml is read in the same way
    again = plan_sweep(plan.folder, [])
    assert again.sweep == plan.sweep and again.runs[0].name == plan.runs[0].name


@pytest.mark.parametrize("file", sorted(PROJECT.glob("configs/*/*.yaml")), ids=lambda p: p.stem)
def test_the_shipped_files_are_whole(file):
    if file.parent.name == "cluster":
        load_cluster(str(file))
    else:
        assert plan_sweep(file, []).runs


@pytest.mark.parametrize("other", ["./models/x", "models/x/", "models//x", "models/y/../x"])
def test_the_same_run_however_its_paths_are_spelt(toy_file, other):
    path = toy_file(grid={})
    run = plan_sweep(path, ["train.model_name_or_path=models/x"]).runs[0]
    assert plan_sweep(path, [f"train.model_name_or_path={other}"]).runs[0].name == run.name


@pytest.mark.parametrize(
    "typed",
    [
        "status configs/sweeps/lr.yaml --delete",
        "status configs/sweeps/lr.yaml score",  # once, it took the questions from the sweep
        "status configs/sweeps/lr.yaml --cluster configs/cluster/generic.yaml ''",
        "keys trainer a=b",
        f"status {'long' * 99}",
    ],
)
def test_what_is_typed_wrong_ends_in_two(typed):
    done = command(*shlex.split(typed))
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_command_begins_without_torch():
    """And whatever of the package is imported first, all of it can be."""
    code = (
        "import sweeps.results.status, sweeps.launch.preflight, sys; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False)
    assert done.stdout == "False\n", done.stderr


def test_relative_paths_begin_where_a_launch_is_typed_and_its_folder_remembers_that(
    toy_file, tmp_path, monkeypatch
):
    path = toy_file(grid={"seed": [1]}, train={"train_file": "chats.jsonl"}, output_root="out")
    places = [tmp_path / "here", tmp_path / "there"]
    for place in places:
        place.mkdir()
        (place / "chats.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    here, there = places
    printed = launch(path, "--executor", "local", cwd=here)
    folder = here / "out" / "toy"
    assert printed.startswith(f"folder: {folder}\n"), printed
    log = (plan_sweep(folder, []).runs[0].path / "train.log").read_text()
    assert f"device: none in {here}, from" in log
    # A folder's paths begin where it was launched, wherever it is named.
    relative = os.path.relpath(folder, there)
    assert "report: " in launch(relative, "--executor", "local", cwd=there)
    printed = launch(path, "--dry-run", f"output_root={here / 'out'}", cwd=there)
    remedy = f"was launched from {here}, where its relative paths begin: cd {here}, or give"
    assert f"chats.jsonl: {folder} {remedy}" in printed, printed


def test_an_empty_name_of_a_tokenizer_is_no_folder(sweep_file):
    """It became `.`, and the trainer looked for a tokenizer in the project's folder."""
    (run,) = plan_sweep(sweep_file(grid={}), ["train.tokenizer_name=''"]).runs
    assert run.config().train["tokenizer_name"] == ""
