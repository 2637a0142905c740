"""Files that are somebody else's: they end in one line, in time, and read nothing beside them."""

import json

import pytest

from calibeval.ask import task_files
from calibeval.ask.request import Task
from calibeval.ask.tasks import load
from calibeval.io import InputError, json_lines, parse_json, printable

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


@pytest.mark.parametrize("text", [ALIASES, f"a: {DEEP}"], ids=["aliases", "deep"])
def test_yaml_without_end_is_refused_in_time(task_file, text):
    path = task_file(text)
    with pytest.raises(InputError, match=f"{path}: nested too deep, or by aliases"):
        task_files.read(path)


def test_a_template_that_does_not_end_is_ended(task_file, monkeypatch):
    monkeypatch.setattr(task_files, "FILLING_SECONDS", 1)
    path = task_file(f"data: {{path: rows.jsonl}}\nrow:\n  question: '{LOOPS}'\n")
    with pytest.raises(InputError, match=r"row\.question: takes more than 1 s"):
        load(Task(task=path, data=task_files.default_data(path)))


def test_a_template_writes_no_endless_text(task_file):
    path = task_file("data: {path: rows.jsonl}\nrow:\n  question: '{{ lipsum(n=99) }}'\n")
    with pytest.raises(InputError, match="lipsum"):
        load(Task(task=path, data=task_files.default_data(path)))


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
