"""A folder into which other users can write: what they put there is neither run nor followed."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sweep_tools import PROJECT, command, prepare

from calibeval.io import InputError, atomic_write, open_to_write
from sweeps import cli
from sweeps.launch import preflight, worker
from sweeps.runs import grid
from sweeps.runs.events import EventKind, append_event
from sweeps.runs.files import locked, publish_folder, remove_folder, touch
from sweeps.runs.grid import plan_from_folder, plan_sweep, plan_to_look_at
from sweeps.runs.run import RunConfig
from sweeps.runs.slurm_queue import submitted_elements
from sweeps.runs.stages import TRAIN
from sweeps.runs.yaml_io import dump_yaml


def write_lock(path: Path) -> None:
    with locked(path, 0, "busy"):
        pass


def append_record(path: Path) -> None:
    with open_to_write(path, "a") as file:
        file.write("row")


@pytest.mark.parametrize(
    "write",
    [
        write_lock,
        append_record,
        touch,
        lambda path: append_event(path, EventKind.LAUNCHED, {}),
    ],
    ids=["lock", "records", "stop file", "events"],
)
def test_a_planted_link_is_not_written_through(tmp_path, write):
    for name in ("mine", "absent"):
        mine = tmp_path / name
        if name == "mine":
            mine.write_text("precious")
        planted = tmp_path / f"planted-{name}"
        planted.symlink_to(mine)
        with pytest.raises((InputError, OSError), match=f"a link to {mine}, which would be"):
            write(planted)
    assert (tmp_path / "mine").read_text() == "precious"
    assert not (tmp_path / "absent").exists()


def test_a_run_whose_log_is_a_link_is_not_started(toy_file, tmp_path):
    run = prepare(toy_file(grid={}))
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (run.path / f"{TRAIN}.log").symlink_to(mine)
    with pytest.raises(OSError, match="a link to"):
        worker.work(run, lambda: False)
    assert mine.read_text() == "precious"


def test_a_temporary_file_has_no_name_that_others_can_guess(tmp_path):
    """With a link for each process number, a launch overwrote a file of whoever typed it."""
    mine = tmp_path / "mine"
    mine.write_text("precious")
    written = tmp_path / "config.yaml"
    (tmp_path / f".{written.name}.{os.getpid()}.tmp").symlink_to(mine)
    with atomic_write(written) as file:
        file.write("new")
    assert mine.read_text() == "precious" and not written.is_symlink()


def test_a_folder_may_be_a_link_to_scratch(toy_file, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "out").symlink_to(scratch)
    run = prepare(toy_file(grid={}))
    append_event(run.attempts_file, EventKind.LAUNCHED, {})
    assert len(list(scratch.glob("toy/*/attempts.jsonl"))) == 1


def test_what_a_planted_folder_leads_to_is_not_deleted(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (tmp_path / "part").symlink_to(mine)
    remove_folder(tmp_path / "part")
    assert mine.exists() and not os.path.lexists(tmp_path / "part")


@pytest.mark.parametrize(
    "name", ["attempts.jsonl", "metrics.jsonl", "config.yaml", ".lock", "../jobs/abc123/names"]
)
@pytest.mark.parametrize("word", ["status", "collect"])
def test_nobody_waits_for_a_planted_pipe(toy_file, word, name):
    """Both hung for ever."""
    path = toy_file(grid={})
    run = prepare(path)
    (run.path / "metrics.jsonl").touch()
    planted = run.path / name
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.unlink(missing_ok=True)
    os.mkfifo(planted)
    done = command(word, path, timeout=60)
    assert done.returncode in (0, 1, 2) and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    "place", ["jobs", "jobs/abc123", "own-run", ".evil", "results", "RUN/scores"]
)
@pytest.mark.parametrize("word", ["status", "collect", "cancel"])
def test_no_look_goes_through_a_planted_link(toy_file, tmp_path, word, place):
    """`cancel` ended another sweep's job, and `collect` wrote beside other records."""
    run = prepare(toy_file(grid={}))
    mine = tmp_path / "mine"
    mine.mkdir()
    planted = run.path.parent / place.replace("RUN", run.name)
    planted.parent.mkdir(parents=True, exist_ok=True)
    if planted.is_dir():
        planted.rmdir()
    planted.symlink_to(mine)
    done = command(word, run.path.parent, timeout=60)
    assert done.returncode == 2 and f"{planted}: is a link to {mine}" in done.stderr
    assert not list(mine.iterdir())


def test_no_log_is_shown_through_a_planted_link(toy_file, tmp_path):
    run = prepare(toy_file(grid={}))
    (tmp_path / "mine").write_text("secret")
    (run.path / "train.log").unlink(missing_ok=True)
    (run.path / "train.log").symlink_to(tmp_path / "mine")
    done = command("logs", run.path.parent, run.name, timeout=60)
    assert "secret" not in done.stdout + done.stderr and "Traceback" not in done.stderr


@pytest.fixture
def planted(toy_file, tmp_path) -> Path:
    """A folder that holds somebody's sweep, whose backend leaves a mark where it is imported.

    Modules that this package imports are planted beside it.
    """
    path = toy_file(grid={"seed": [1, 2]})
    run = prepare(path)
    for file in (run.path.parent / "launched.yaml", run.config_file):
        file.write_text(file.read_text().replace("toy.backend", "evil"))
    text = f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit('planted')\n"
    for module in ("evil", "yaml", "pydantic", "numpy"):
        (run.path.parent / f"{module}.py").write_text(text)
    return run.path.parent


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("python -m", ["status"]),
        ("python -m", ["collect"]),
        ("python -m", ["cancel"]),
        ("python -m", ["launch", "--dry-run"]),
        ("sweeps.sh", ["status"]),
    ],
)
def test_looking_at_a_folder_runs_nothing_that_it_names(planted, tmp_path, start, words):
    (tmp_path / "squeue").write_text("#!/bin/sh\n")
    (tmp_path / "squeue").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
    }
    typed = [sys.executable, "-m", "sweeps"]
    if start == "sweeps.sh":
        typed = ["bash", str(PROJECT / "slurm" / "sweeps.sh")]
        del environment["PYTHONPATH"]
    typed += [words[0], str(planted), *words[1:]]
    done = subprocess.run(
        typed, cwd=planted, env=environment, capture_output=True, text=True, check=False
    )
    assert not (tmp_path / "ran").exists(), done.stderr
    assert "Traceback" not in done.stderr
    if "--dry-run" in words:
        assert done.returncode == 2 and "backend: 'evil' would be imported" in done.stderr


def test_a_dry_run_starts_no_interpreter(toy_file, profile, tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch '{tmp_path}/ran'\n")
    python.chmod(0o755)
    path = toy_file(cluster=profile(python=str(python)))
    done = command("launch", path, "--executor", "slurm", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_folder_tells_its_plan_without_its_backend(toy_file):
    path = toy_file(grid={"seed": [1, 2], "label_smoothing": [0.0, 0.1]}, score=None)
    plan = plan_sweep(path, [])
    plan.create()
    seen = plan_to_look_at(plan.folder, [])
    assert [run.name for run in seen.runs] == [run.name for run in plan.runs]
    assert [run.grid_values for run in seen.runs] == [run.grid_values for run in plan.runs]
    seen = plan_to_look_at(plan.folder, ["grid.seed=[2]"])
    assert [run.name for run in seen.runs] == [run.name for run in plan.runs[2:]]


ESCAPE = "\x1b[2J\x9b31m"


def test_no_cell_of_a_sweeps_tables_is_a_formula(toy_file):
    run = prepare(toy_file(grid={}, train={"model_name_or_path": "=cmd"}))
    append_event(run.attempts_file, EventKind.BEGAN, {"stage": TRAIN})
    append_event(run.attempts_file, EventKind.ENDED, {"error": "=HYPERLINK(1)"})
    run.metrics.touch()
    command("collect", run.path.parent)
    table = (run.path.parent / "results" / "runs.csv").read_text()
    assert ",'=HYPERLINK(1)," in table


def planted_run(run, name: str, **train) -> None:
    """Put a run beside this one, whose config has the hash that it should."""
    config = RunConfig(backend="trainer", train=train)
    folder = run.path.parent / f"{name}-{config.digest[:8]}"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_yaml(config.model_dump(mode="json")))
    (folder / "metrics.jsonl").touch()


def planted_job(run, tag: str, **files: bytes) -> None:
    """Put a job into the folder; `names` are there unless they are given."""
    folder = run.path.parent / "jobs" / tag
    folder.mkdir(parents=True)
    for name, content in {"names": f"{run.name}\n".encode(), **files}.items():
        (folder / name.replace("_", ".")).write_bytes(content)


def planted_rows(file: Path, *rows: dict) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


FORGED = f"x\nforged: type this{ESCAPE}"
DIGITS = 10**400  # which no float can hold
ODD_FILES = {
    "errors": lambda run: planted_rows(
        run.attempts_file,
        {"ended": "t", "error": ["x"]},
        {"ended": "t", "refused": 5},
        {"began": 5},
        {"began": "t", "stage": {}, "files": [1]},
        {"ended": "t", "error": FORGED},
    ),
    "a refusal": lambda run: planted_rows(run.attempts_file, {"ended": "t", "refused": FORGED}),
    "metrics": lambda run: planted_rows(
        run.metrics, {"step": FORGED}, {"step": 1, "loss": "x"}, {"step": DIGITS, "loss": DIGITS}
    ),
    "the options of a run": lambda run: planted_run(run, "m", model_name_or_path=[1], seed="x"),
    "a run without a model": lambda run: planted_run(run, FORGED, learning_rate={}),
    "the profile of a job": lambda run: planted_job(run, "abc123", profile_yaml=b"- 1"),
    "the list of a job": lambda run: planted_job(run, "abc123", names=b"\xff\n"),
    "the name of a job": lambda run: planted_job(run, "(a+)+(", script_sh=b"a" * 99),
    "a grid": lambda run: (
        edit_launched(run, "  a: 1\n  b: 1\n  seed: 1\n", ""),
        edit_launched(run, "grid: {}", f"grid: {BILLIONS}"),
    ),
    "a key": lambda run: edit_launched(run, "grid: {}", "grid: {}\n? {a: {b: c}}\n: 1"),
    "the place of the launch": lambda run: (
        (run.path.parent / "launched_in").write_text(f"{run.path.parent}\n{ESCAPE}\n"),
        os.mkfifo(run.path.parent / "matplotlibrc"),
        planted_job(run, "abc123"),
    ),
    "an endless log": lambda run: (run.attempts_file.touch(), os.truncate(run.metrics, 1 << 40)),
}
BILLIONS = "{" + ", ".join(f"{key}: {list(range(2000))}" for key in ("seed", "a", "b")) + "}"


def edit_launched(run, old: str, new: str) -> None:
    file = run.path.parent / "launched.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize("plant", ODD_FILES.values(), ids=ODD_FILES)
def test_odd_files_of_a_folder_end_in_words_and_in_time(toy_file, tmp_path, plant):
    """They ended in tracebacks, in lines that the command had not said, or not at all."""
    words = ["true", "{run_dir}", "{a}", "{b}", "{seed}"]
    train = {"command": words, "a": 1, "b": 1, "seed": 1}
    run = prepare(toy_file(grid={}, backend="command", train=train))
    run.metrics.touch()
    plant(run)
    (tmp_path / "squeue").write_text("#!/bin/sh\n")
    (tmp_path / "squeue").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    folder = run.path.parent
    for words in (
        ["status", folder],
        ["collect", folder],
        ["logs", run.path],
        ["status", run.path],
    ):
        done = command(*words, timeout=60, env={**os.environ, "PATH": path})
        printed = done.stdout + done.stderr
        assert done.returncode in (0, 1, 2) and "Traceback" not in printed, printed
        assert "\x1b" not in printed and "\x9b" not in printed
        assert not any(line.startswith("forged") for line in printed.splitlines()), printed


@pytest.mark.parametrize("command_word", ["status", "logs", "collect", "cancel", "launch"])
def test_who_looks_enters_only_where_he_has_launched(
    toy_file, tmp_path, monkeypatch, capsys, command_word
):
    """A variable of the shell, as `LD_LIBRARY_PATH=:/usr/lib`, had a library of a colleague's
    folder loaded. Where it is one's own, relative paths of tasks begin there."""
    folder = prepare(toy_file(grid={})).path.parent
    place = tmp_path / "place"
    place.mkdir()
    (folder / "launched_in").write_text(f"{place}\n")
    typed = [command_word, str(folder)]
    if command_word == "launch":
        typed.append("--dry-run")

    def entered() -> bool:
        monkeypatch.chdir(tmp_path)
        cli.main(typed)
        return Path.cwd() == place

    assert entered()
    capsys.readouterr()
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert not entered()
    assert f"begin in {place}, which is not entered" in capsys.readouterr().err


def test_a_runs_folder_by_a_relative_path_is_entered_as_by_its_whole_one(
    toy_file, tmp_path, monkeypatch
):
    run = prepare(toy_file(grid={}))
    place = tmp_path / "place"
    place.mkdir()
    (run.path.parent / "launched_in").write_text(f"{place}\n")
    monkeypatch.chdir(run.path)
    cli.main(["status", "."])
    assert Path.cwd() == place


def test_a_run_in_a_runs_folder_is_none(toy_file, tmp_path):
    """Its scores could be a link, which was followed: only a sweep's own runs were looked at."""
    run = prepare(toy_file(grid={}))
    inner = run.path / run.name
    inner.mkdir()
    shutil.copy(run.config_file, inner)
    (inner / "scores").symlink_to(tmp_path)
    with pytest.raises(InputError, match=f"{run.path}/launched.yaml: could not be read"):
        plan_to_look_at(inner, [])


def test_a_folder_with_a_launch_of_its_own_is_a_sweeps(toy_file):
    """As a run's it made its parent's `results`, which were another sweep's, anew."""
    folder = prepare(toy_file(grid={})).path
    shutil.copy(folder.parent / "launched.yaml", folder)
    assert plan_to_look_at(folder, []).folder == folder


def test_a_log_by_the_name_of_an_option_is_no_job(toy_file):
    run = prepare(toy_file(grid={}))
    job = run.path.parent / "jobs" / "abc123"
    job.mkdir(parents=True)
    (job / "names").write_text(f"{run.name}\n")
    (job / "--yaml_0_log.out").touch()
    elements = submitted_elements(run.path.parent)
    assert [element.label for of_run in elements.values() for element in of_run] == [None]


def test_variables_of_the_shell_are_for_what_is_typed_and_not_for_a_folder(toy_file, monkeypatch):
    monkeypatch.setenv("NUMBER", "7")
    plan = plan_sweep(toy_file(grid={"seed": [1]}, model_labels={"a": "$$x"}), [])
    plan.create()
    assert plan_to_look_at(plan.folder, ["model_labels.a=$NUMBER"]).sweep.model_labels["a"] == "7"
    assert plan_to_look_at(plan.folder, []).sweep.model_labels["a"] == "$x"
    edit_launched(plan.runs[0], "$$x", "$NUMBER")
    with pytest.raises(InputError, match="takes no variables of your shell"):
        plan_to_look_at(plan.folder, [])


def test_what_is_checked_of_launched_yaml_is_what_is_used(planted, tmp_path, monkeypatch):
    """Between two reads somebody could put another backend there, which was imported."""
    file = planted / "launched.yaml"
    evil = file.read_text()
    file.write_text(evil.replace("backend: evil", "backend: trainer"))
    read_once = grid.read_yaml

    def read_and_swap(path):
        result = read_once(path)
        file.write_text(evil)
        return result

    monkeypatch.setattr(grid, "read_yaml", read_and_swap)
    monkeypatch.syspath_prepend(planted)
    with contextlib.suppress(InputError):
        plan_to_look_at(planted, [])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((".results.part", kind) for kind in ("link", "pipe", "file", "folder")),
        (".results.replaced", "link"),
        (".results.1.replaced", "link"),
    ],
)
def test_a_collect_writes_through_nothing_that_is_planted(toy_file, tmp_path, name, kind):
    run = prepare(toy_file(grid={}))
    run.metrics.touch()
    mine = tmp_path / "mine"
    mine.mkdir()
    place = run.path.parent / name
    if kind == "link":
        place.symlink_to(mine)
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "file":
        place.touch()
    else:
        place.mkdir()
        (place / "report.html").symlink_to(mine / "report.html")
    (run.path.parent / "results").mkdir()
    done = command("collect", run.path.parent.parent.parent / "toy.yaml", timeout=60)
    assert not list(mine.iterdir())
    if kind == "link":
        assert done.returncode == 2 and f"{place}: is a link to {mine}" in done.stderr
    else:
        assert done.returncode == 1 and "report: " in done.stdout, done.stderr
        assert (run.path.parent / "results" / "report.html").is_file()


def test_a_folder_that_is_swapped_for_a_link_while_it_is_filled_is_not_followed(
    tmp_path, monkeypatch
):
    mine = tmp_path / "mine"
    mine.mkdir()
    source = tmp_path / "source"
    source.mkdir()
    (source / "report.html").write_text("new")
    make = Path.mkdir

    def make_and_swap(path, *arguments, **options):
        make(path, *arguments, **options)
        path.rmdir()
        path.symlink_to(mine)

    monkeypatch.setattr(Path, "mkdir", make_and_swap)
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        publish_folder(source, tmp_path / "results")
    assert not list(mine.iterdir())


def test_a_dry_run_looks_into_no_cache_that_only_another_users_profile_names(
    toy_file, profile, monkeypatch, tmp_path
):
    monkeypatch.setenv("HF_HOME", "mine")
    cache = tmp_path / "theirs"
    file = profile(cache=str(cache))
    plan = plan_sweep(toy_file(grid={}, cluster=file), [])
    plan.create()
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    found = preflight.problems(plan_sweep(plan.folder, []), "local", runs_programs=False)
    assert any("cache: is not looked into" in problem for problem in found), found
    assert os.environ["HF_HOME"] == "mine"
    typed = plan_sweep(plan.folder, [f"cluster={file}"])
    preflight.problems(typed, "local", runs_programs=False)
    assert os.environ["HF_HOME"] == str(cache)


def test_a_dry_run_reads_no_data_that_only_another_users_folder_names(
    toy_file, monkeypatch, tmp_path
):
    """An error showed the names of the columns, which are a file's first line."""
    private = tmp_path / "private.csv"
    private.write_text("a secret,b\n1,2\n")
    score = {"tasks": [{"task": "jsonl", "data": str(private), "shots": 0}]}
    plan = plan_sweep(toy_file(grid={}, score=score), [])
    plan.create()

    def found(*, is_foreign: bool) -> str:
        own = os.geteuid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: own + is_foreign)
            planned = plan_sweep(plan.folder, [])
            return "\n".join(preflight.problems(planned, "local", runs_programs=False))

    assert "a secret" in found(is_foreign=False)
    printed = found(is_foreign=True)
    assert "launched.yaml: is another user's" in printed and "a secret" not in printed


def test_a_folder_that_cannot_be_listed_hides_no_links(toy_file, monkeypatch):
    """`cancel` ended another folder's job through a link that it had not seen."""
    folder = prepare(toy_file(grid={})).path.parent

    def listed(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", listed)
    with pytest.raises(InputError, match=r"cannot be listed .*, so nobody knows what links"):
        plan_from_folder(folder, [])
