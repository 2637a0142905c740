"""Files that are somebody else's: they end in one line, in time, and read nothing beside them."""

import hashlib
import json
import os
import re
import resource
import signal
import sys
import time

import pytest

from calibeval.__main__ import main
from calibeval.ask import task_files
from calibeval.ask.request import Task
from calibeval.ask.tasks import load
from calibeval.imports import inspect_ai, lighteval, lm_eval
from calibeval.io import InputError, finish, json_lines, parse_json, printable, read_text
from calibeval.measures import evaluations
from calibeval.report.tables import csv_text

DEEP = "[" * 200_000
ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
LOOPS = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "x" + "{% endfor %}" * 3


@pytest.fixture
def task_file(tmp_path):
    """A factory of task files over two rows; `task_file(text)` → path."""
    rows = [{"question": "?", "choices": ["a", "b"], "answer": 0}] * 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(text: str) -> str:
        path = tmp_path / "task.yaml"
        path.write_text(text)
        return str(path)

    return make


def test_json_that_is_nested_without_end_is_no_json(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{DEEP}\n")
    with pytest.raises(InputError, match="line 1: not JSON"):
        list(json_lines(file))
    with pytest.raises(ValueError, match="nested too deep"):
        parse_json(DEEP)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ALIASES, "is used again by an alias"),
        (f"a: {DEEP}", "not YAML: .*(nest|deep)"),
        ("shots: 2026-02-30", "not YAML: day is out of range"),
        (f"shots: {'9' * 5000}", "not YAML: "),
        (f"topic: '{{{{ {'(' * 9999} }}}}'", "topic is .*: not Jinja"),
        ("#" * (1 << 20) + "\nshots: 1", "is larger than 1,048,576 bytes"),
    ],
    ids=["aliases", "deep", "a date", "a number", "brackets", "a large file"],
)
def test_a_task_file_without_end_is_refused_in_time(task_file, text, problem):
    path = task_file(text)
    with pytest.raises(InputError, match=f"{path}.*: {problem}"):
        task_files.read(path)


@pytest.mark.parametrize(
    "template",
    [LOOPS, "{{ 'x' * 99999999999 }}", "{{ 9 ** (9 ** 9) }}", "{{ '%099999999999d' % 1 }}"],
    ids=["loops", "repeated", "power", "padded"],
)
def test_a_template_that_takes_long_or_much_is_ended(task_file, monkeypatch, template):
    monkeypatch.setattr(task_files, "FILLING_SECONDS", 1)
    path = task_file(f'data: {{path: rows.jsonl}}\nrow:\n  question: "{template}"\n')
    began = time.monotonic()
    with pytest.raises(InputError, match=r"row\.question: "):
        load(Task(task=path, data=task_files.default_data(path)))
    assert time.monotonic() - began < 10


def test_a_template_leaves_the_timer_and_the_memory_as_they_were(task_file):
    limits = resource.getrlimit(resource.RLIMIT_AS)
    signal.setitimer(signal.ITIMER_REAL, 100)
    assert task_files.Template("{{ a }} b")({"a": 1}) == "1 b"
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    assert remaining > 90
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_a_template_writes_no_endless_text(task_file):
    path = task_file("data: {path: rows.jsonl}\nrow:\n  question: '{{ lipsum(n=99) }}'\n")
    with pytest.raises(InputError, match="lipsum"):
        load(Task(task=path, data=task_files.default_data(path)))


def test_texts_of_files_are_read_in_linear_time():
    brackets = "[" * 200_000
    assert task_files.clean_markers(f"a [b] {brackets}") == f"a {brackets}"
    assert inspect_ai._bare(f"{' :' * 100_000}A{' :' * 100_000}") == "A"
    assert lm_eval._common_white_space([" " * 300_000 + "a"] * 2) == " " * 300_000


@pytest.mark.parametrize("place", ["../rows.jsonl", "a/../../rows.jsonl", "/etc/passwd"])
def test_a_task_file_names_no_data_outside_its_folder(task_file, place):
    with pytest.raises(InputError, match=r"data\.path: .* lies outside .*, --data "):
        task_files.default_data(task_file(f"data: {{path: {place}}}\n"))


def test_a_task_file_names_no_split_outside_its_data(task_file, tmp_path):
    path = task_file("data: {path: ., files: '../{{ split }}.jsonl'}\n")
    with pytest.raises(InputError, match=r"data\.files: .* lies outside"):
        load(Task(task=path, data=str(tmp_path)))


def test_control_characters_are_written_out():
    assert printable("a\x1b[2J\x9b\r\x7fb\n\tü") == r"a\u001b[2J\u009b\u000d\u007fb" + "\n\tü"
    assert printable("\u202e\ud800\u2028") == r"\u202e\ud800\u2028"
    assert csv_text("=\x1b[2J") == r"'=\u001b[2J"


def test_a_line_within_a_message_is_indented(capsys):
    def work():
        raise InputError("a: 'x\nerror: forged\x1b[2J'")

    assert finish(work) == 2
    assert capsys.readouterr().err == "error: a: 'x\n       error: forged\\u001b[2J'\n"


def test_a_traceback_has_no_control_characters(capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def work():
        raise OddError("\x1b[2J")

    with pytest.raises(OddError) as caught:
        finish(work)
    sys.excepthook(OddError, caught.value, None)
    assert capsys.readouterr().err.endswith("OddError: \\u001b[2J\n")


class OddError(Exception):
    """An error that no command expects."""


RECORD = {"id": "1", "subject": "s", "label": 0, "logprobs": [-0.1, -3.0]}
CONTINUATION = {**RECORD, "scoring": "continuation"}
DIGITS = 10**400  # which no float can hold


@pytest.mark.parametrize(
    ("record", "sidecar", "problem"),
    [
        ({**CONTINUATION, "bytes": [DIGITS, 1], "normalise": "bytes"}, {}, "line 1: bytes.0"),
        (CONTINUATION, {"bytes": "x"}, "meta.json: bytes is 'x'"),
        (CONTINUATION, {"questions": "\x1b[2J\nerror: x"}, r"meta.json: questions is '\\x1b"),
        (CONTINUATION, {"settings": {"shots": [1]}}, r"meta.json: settings.shots is \[1\]"),
        (CONTINUATION, {"temperature": {"temperature": DIGITS}}, "meta.json: temperature"),
    ],
    ids=["lengths", "size", "number", "settings", "temperature"],
)
def test_odd_values_of_records_end_in_one_line(tmp_path, capsys, record, sidecar, problem):
    file = tmp_path / "r.jsonl"
    file.write_text(json.dumps(record) + "\n")
    (tmp_path / "r.jsonl.meta.json").write_text(json.dumps(sidecar))
    assert main(["metrics", str(file)]) == 2
    assert re.search(rf"^error: .*{problem}.*\n$", capsys.readouterr().err)


def test_names_of_an_index_reach_tables_and_figures_without_control_characters(tmp_path, capfd):
    """matplotlib warned of them in words that held them."""
    (tmp_path / "r.jsonl").write_text(
        "".join(json.dumps({**CONTINUATION, "id": f"{number}"}) + "\n" for number in range(3))
    )
    entry = {"records": "r.jsonl", "dataset": "d\x1b[2J", "model": "m\x9b\nforged"}
    index = tmp_path / "index.jsonl"
    index.write_text(json.dumps({**entry, "label_smoothing": 0.0, "a\x1b": "\x1b"}) + "\n")
    assert main(["collect", str(index), "--out", str(tmp_path / "out")]) == 0
    printed = capfd.readouterr()
    texts = [printed.out, printed.err]
    for file in (tmp_path / "out").iterdir():
        if file.suffix != ".png":
            texts.append(file.read_text())
    assert not any("\x1b" in text or "\x9b" in text or "\nforged" in text for text in texts)
    index.write_text(json.dumps({**entry, "label_smoothing": 0.0, "x": DIGITS}) + "\n")
    assert main(["collect", str(index), "--out", str(tmp_path / "out")]) == 2


def inspect_log(token="A", logprob=-0.1, epoch=1, packages=None):
    """An Inspect log of one sample."""
    top = [{"token": token, "logprob": logprob}, {"token": "B", "logprob": -3.0}]
    content = [{"token": token, "logprob": logprob, "top_logprobs": top}]
    sample = {
        "id": "1",
        "epoch": epoch,
        "input": "?",
        "choices": ["a", "b"],
        "target": "A",
        "scores": {"choice": {"answer": "A"}},
        "output": {"choices": [{"logprobs": {"content": content}}]},
    }
    about = {"task": "t", "model": "m", "packages": packages}
    return {"status": "success", "eval": about, "samples": [sample]}


@pytest.mark.parametrize(
    ("log", "problem"),
    [
        (inspect_log(token="A" + " " * 300_000 + "?"), None),
        (inspect_log(packages={"a": float("nan"), "b": "\ud800"}), None),
        (inspect_log(logprob=1e9), "sample 1: its letters sum to"),
        (inspect_log(epoch=[1]), "not a log"),
    ],
    ids=["quadratic", "versions", "overflow", "epoch"],
)
def test_logs_of_others_are_read_in_time_or_end_in_one_line(tmp_path, capsys, log, problem):
    (tmp_path / "log.json").write_text(json.dumps(log))
    status = main(["import", str(tmp_path / "log.json"), "--out", str(tmp_path / "r.jsonl")])
    if problem is None:
        assert status == 0
    else:
        assert status == 2
        assert re.search(rf"^error: .*{problem}.*\n$", capsys.readouterr().err)


def test_pipes_terminals_and_huge_files_are_not_read(tmp_path):
    pipe = tmp_path / "details.parquet"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to("/dev/tty")
    huge = tmp_path / "r.jsonl"
    huge.touch()
    os.truncate(huge, 1 << 40)
    terminal, other_end = os.openpty()
    pipes = ["/dev/../" + str(pipe), link, "/dev/zero", f"/dev/fd/{other_end}"]
    for path in pipes:
        with pytest.raises(InputError, match="could not be read"):
            read_text(path)
    with pytest.raises(InputError, match="pipe or a device"):
        lighteval.read_lighteval(pipe)
    for read in (evaluations.load, read_text):
        with pytest.raises(InputError, match="is larger than"):
            read(huge)
    os.close(terminal)
    os.close(other_end)


def test_a_pipe_that_the_user_names_is_read():
    reading_end, writing_end = os.pipe()
    os.write(writing_end, b"text")
    os.close(writing_end)
    assert read_text(f"/dev/fd/{reading_end}") == "text"
    os.close(reading_end)


def test_nothing_is_kept_beside_records_of_others_nor_believed(tmp_path, monkeypatch):
    file = tmp_path / "r.jsonl"
    file.write_text(json.dumps(CONTINUATION) + "\n")
    kept = tmp_path / "r.jsonl.stats.json"
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    evaluations.load(file, parts=[])
    assert not kept.exists()
    monkeypatch.setattr(os, "geteuid", lambda: own)
    evaluations.load(file, parts=[])
    key, _, content = json.loads(kept.read_text())
    forged = content.replace('"model":"?"', '"model":"forged"')
    kept.write_text(json.dumps([key, hashlib.sha256(forged.encode()).hexdigest(), forged]))
    assert evaluations.load(file, parts=[]).model == "forged"  # one's own is read
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert evaluations.load(file, parts=[]).model == "?"


@pytest.mark.parametrize("data", ["hub:pandas", "hub:../pandas", "pandas"])
def test_no_reader_of_datasets_is_called_by_the_name_of_data(tmp_path, monkeypatch, data):
    """`datasets` has readers of such names; pandas unpickled what lay in the current folder."""
    datasets = pytest.importorskip("datasets")
    names = []

    def load_dataset(name, *arguments, **options):
        names.append(name)
        raise ValueError("not read")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pandas").mkdir()
    (tmp_path / "pandas" / "README.md").touch()
    with pytest.raises(InputError, match=r"expected hub:owner/name|not read"):
        load(Task(task="piqa", data=data))
    assert names == ([] if data.startswith("hub:") else [str(tmp_path / "pandas")])
