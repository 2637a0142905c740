"""Scoring goes on after kill -9, and never mixes two runs."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from made_records import LETTERS_RECORD, read_lines, write_lines

from calibeval.__main__ import main
from calibeval.ask import engines, scoring
from calibeval.ask.request import Task
from calibeval.io import InputError
from calibeval.records.store import Store

# The command line, which dies after so many records: its first argument.
DIES = """
import os, signal, sys
from calibeval import __main__
from calibeval.ask import scoring

records_left = int(sys.argv.pop(1))
make_record = scoring.make_record

def make_record_or_die(item, logprobs):
    global records_left
    if records_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    records_left -= 1
    return make_record(item, logprobs)

scoring.make_record = make_record_or_die
__main__.main()
"""


def test_kill_loses_seconds_and_changes_no_byte(command, tmp_path, run):
    """What was kept before the process died stays, and batches are what they were to be."""
    out = tmp_path / "r.jsonl"
    part = tmp_path / "r.jsonl.part"
    command = [*command, "--batch-size", "4"]
    run(*command, "--out", tmp_path / "whole.jsonl")
    dying = [sys.executable, "-c", DIES, "18", *map(str, command)]  # in the middle of a batch
    died = subprocess.run(dying, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not out.exists()
    assert len(read_lines(part)) == 18
    part.write_text(part.read_text() + part.read_text()[1:99])  # killed while it wrote
    # The bar starts where the dead run stopped.
    assert "18/60" in run(*command).err
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not list(tmp_path.glob("r.jsonl.part*"))


def test_finished_is_finished_by_other_options_too(command, tmp_path, run):
    """Options that choose the same questions are the same request."""
    run(*command)
    before = (tmp_path / "r.jsonl").stat().st_mtime_ns
    for options in ([], ["--limit", "30", "--split", "test", "--subjects", "light,old_kings"]):
        assert "complete already, 60 questions" in run(*command, *options).err
    assert (tmp_path / "r.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (
            ["--shots", "2"],
            "other questions or examples, or other words around them; delete it",
        ),
        (["--scoring", "continuation"], "scoring 'letters' (now 'continuation')"),
        (
            ["--dtype", "bfloat16"],
            "dtype 'auto' (now 'bfloat16'; --dtype auto goes on)",
        ),
    ],
)
def test_other_settings_are_refused(command, run, refused, options, changes):
    run(*command)
    assert f"was made with {changes}" in refused(*command, *options)


def test_a_file_of_nobody_is_refused(command, tmp_path, refused):
    out = tmp_path / "r.jsonl"
    out.write_text("{}\n")
    assert "no sidecar says how it was made; move it away" in refused(*command)
    assert out.read_text() == "{}\n"


# As scoring makes them: the model and the packages' versions are in every record.
SCORED = {**LETTERS_RECORD, "model": "a-model", "versions": {"calibeval": "0.1.0"}}
BFLOAT16 = {"engine": "transformers", "device": "H100", "dtype": "bfloat16", "batch_size": 16}


@pytest.fixture
def store(tmp_path):
    """A store that a bfloat16 engine has begun to fill."""
    first = Store(tmp_path / "r.jsonl", {"dtype": "auto"})
    first.keep_engine_settings(BFLOAT16)
    with first.appending() as append:
        append(SCORED)
    return Store(tmp_path / "r.jsonl", {"dtype": "auto"})


def test_another_precision_is_refused(store):
    """`dtype=auto` is bfloat16 on one machine and float32 on the next."""
    other = {**BFLOAT16, "device": "cpu", "dtype": "float32"}
    message = r"r\.jsonl\.part: was made with dtype 'bfloat16' \(now 'float32'; --dtype bf"
    with pytest.raises(InputError, match=message):
        store.keep_engine_settings(other)


def test_finished_parts_are_read_as_they_are(tiny_model, tmp_path, run, monkeypatch, capsys):
    """The process that writes the file may have had nothing left to score, and no engine; ids may
    hold what ends a line elsewhere."""
    ids = ["one\u2028two", "three\x85four", "five"]
    row = {"question": "which light?", "choices": ["a", "b"], "answer": 0}
    questions = write_lines(tmp_path / "q.jsonl", [{**row, "id": id_} for id_ in ids])
    command = ["score", "--task", "jsonl", "--model", tiny_model, "--data", questions]
    command += ["--shots", 0, "--out", tmp_path / "r.jsonl"]

    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(Store, "finish", interrupt)
        assert main([str(word) for word in command]) == 130
        assert "stopped; the same command continues" in capsys.readouterr().err
    monkeypatch.setattr(engines, "create_engine", None)
    run(*command)
    assert [row["id"] for row in read_lines(tmp_path / "r.jsonl")] == ids
    sidecar = json.loads((tmp_path / "r.jsonl.meta.json").read_text())
    assert sidecar["settings"]["engine_settings"]["dtype"] == "float32"


# --- What decides a record is the same when scoring goes on ---


@pytest.fixture
def interrupted(monkeypatch):
    """interrupted(n, command): a command that Ctrl-C stops after n records."""

    def interrupt(records_left, command):
        make_record = scoring.make_record

        def make_record_or_stop(item, logprobs):
            nonlocal records_left
            if records_left == 0:
                raise KeyboardInterrupt
            records_left -= 1
            return make_record(item, logprobs)

        with monkeypatch.context() as patched:
            patched.setattr(scoring, "make_record", make_record_or_stop)
            assert main([str(word) for word in command]) == 130

    return interrupt


def test_the_same_model_by_another_path_goes_on(command, tiny_model, tmp_path, run, interrupted):
    """The weights' digest says that it is the same; the records keep its first name."""
    run(*command, "--out", tmp_path / "whole.jsonl")
    interrupted(18, command)
    same = os.path.relpath(tiny_model)
    assert same != str(tiny_model)
    assert "18/60" in run(*command, "--model", same).err
    out = tmp_path / "r.jsonl"
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert json.loads((tmp_path / "r.jsonl.meta.json").read_text())["model"] == str(tiny_model)
    assert "complete already" in run(*command, "--model", same).err


def test_another_model_by_the_same_path_is_refused(
    command, tiny_model, tmp_path, interrupted, refused
):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    command += ["--model", model]
    interrupted(18, command)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    assert "r.jsonl.part: was made with model_digest '" in refused(*command)


def test_records_that_do_not_belong_together_never_replace_anything(tmp_path):
    """The only copy to go on from stays where the whole cannot be read."""
    store = Store(tmp_path / "r.jsonl", {"dtype": "auto"})
    store.keep_engine_settings(BFLOAT16)
    other = {**SCORED, "id": "a/1", "chat_template": "f00"}
    with store.appending() as append:
        append(SCORED)
        append(other)
    kept = (tmp_path / "r.jsonl.part").read_bytes()
    message = r"part, question a/1: chat_template 'f00' after None; .*; delete .*r\.jsonl\.part, or"
    with pytest.raises(InputError, match=message):
        store.finish([SCORED, other], {})
    with pytest.raises(InputError, match=message):
        Store(tmp_path / "r.jsonl", {"dtype": "auto"}).finished()
    assert (tmp_path / "r.jsonl.part").read_bytes() == kept
    assert not (tmp_path / "r.jsonl").exists()


# --- Settings that say the same, and those that do not ---


def test_a_precision_that_auto_has_come_to_is_the_same(command, run, interrupted):
    """On a CPU auto is float32."""
    interrupted(18, command)
    assert "18/60" in run(*command, "--dtype", "float32").err
    assert "complete already" in run(*command, "--dtype", "float32").err


COMMIT = {"model_digest": "0123abcd", "engine": "transformers", "dtype": "auto"}


def test_a_revision_of_the_same_commit_is_the_same(tmp_path):
    """`main` and none are, until the hub has another commit of it."""
    first = Store(tmp_path / "r.jsonl", {**COMMIT, "revision": None})
    first.keep_engine_settings(BFLOAT16)
    with first.appending() as append:
        append(SCORED)
    again = Store(tmp_path / "r.jsonl", {**COMMIT, "revision": "main"})
    assert list(again.finished()) == ["a/0"]
    with pytest.raises(InputError, match=r"model_digest '0123abcd' \(now '4567'\)"):
        Store(tmp_path / "r.jsonl", {**COMMIT, "model_digest": "4567", "revision": "main"})
    unknown = {**COMMIT, "model_digest": None}
    first = Store(tmp_path / "s.jsonl", {**unknown, "revision": None})
    first.keep_engine_settings(BFLOAT16)
    with first.appending() as append:
        append(SCORED)
    with pytest.raises(InputError, match=r"revision None \(now 'main'\)"):
        Store(tmp_path / "s.jsonl", {**unknown, "revision": "main"})


def test_a_record_that_nothing_could_read_is_not_kept(tmp_path):
    store = Store(tmp_path / "r.jsonl", {"dtype": "auto"})
    with store.appending() as append, pytest.raises(InputError, match="question a/0: label is 7, "):
        append({**SCORED, "label": 7})
    assert not read_lines(tmp_path / "r.jsonl.part")


TASK_FILE = """data: {path: rows.jsonl}
row: {id: "{{ id }}"}
scoring: continuation
normalise: bytes
"""

NORMALISE = "was made with normalise 'bytes' (now 'sum'); delete it"
IDS = "was made with other ids or subjects of the same questions"


@pytest.fixture
def own_task(tmp_path, tiny_model):
    """The file of a task of one's own, and the command that scores it."""
    rows = [
        {"id": i, "question": f"which light {i}?", "choices": ["mass", "cells"], "answer": 0}
        for i in range(4)
    ]
    write_lines(tmp_path / "rows.jsonl", rows)
    file = tmp_path / "own.yaml"
    file.write_text(TASK_FILE)
    out = tmp_path / "r.jsonl"
    return file, ["score", "--task", file, "--model", tiny_model, "--out", out]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("bytes", "sum", NORMALISE),
        ("{{ id }}", "q{{ id }}", IDS),
        ("row: {", "row: {subject: light, ", IDS),
    ],
)
def test_a_changed_task_file_is_refused(
    own_task, tmp_path, run, refused, interrupted, old, new, expected
):
    file, command = own_task
    interrupted(2, command)
    part = tmp_path / "r.jsonl.part"
    kept = part.read_bytes()
    file.write_text(TASK_FILE.replace(old, new))
    assert f"r.jsonl.part: {expected}" in refused(*command)
    assert part.read_bytes() == kept
    file.write_text(TASK_FILE)
    run(*command)
    assert "complete already" in run(*command).err


CHAT = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)


def test_a_changed_chat_template_is_refused(command, tmp_path, run, refused, interrupted):
    """The prompts are the same, but the records say by which template they were made."""
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT)
    command += ["--chat-template", template]
    interrupted(2, command)
    template.write_text(CHAT + "{# tuned #}")
    expected = f"r.jsonl.part: was made with another text of chat_template '{template}'; delete it"
    assert expected in refused(*command)
    # The same text from another place is the same template.
    (tmp_path / "same.jinja").write_text(CHAT)
    run(*command, "--chat-template", tmp_path / "same.jinja")


def test_another_tokenizer_from_python_is_refused(mmlu, tiny_model, tmp_path):
    """The model's digest is of its folder, and the prompts' of their text."""
    from transformers import AutoTokenizer

    task = Task(task="mmlu", data=str(mmlu), shots=0)
    options = {"tasks": [task], "out": tmp_path, "progress": False}
    scoring.score(tiny_model, **options)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    scoring.score(tiny_model, tokenizer, **options)  # the same ids are the same tokenizer
    tokenizer.add_tokens([" light"])
    with pytest.raises(InputError, match=r"mmlu.jsonl: was made with other token ids of the same"):
        scoring.score(tiny_model, tokenizer, **options)


@pytest.mark.parametrize("key", ["model", "versions"])
def test_a_record_that_scoring_did_not_write_is_refused(store, tmp_path, key):
    """It ended in a traceback: KeyError."""
    rows = read_lines(tmp_path / "r.jsonl.part")
    del rows[-1][key]
    write_lines(tmp_path / "r.jsonl.part", rows)
    with pytest.raises(InputError, match=f"question a/0: no '{key}'"):
        store.finished()


def test_another_engine_is_refused(store):
    with pytest.raises(InputError, match=r"engine 'transformers' \(now 'vllm'\)"):
        store.keep_engine_settings({**BFLOAT16, "engine": "vllm"})


def test_examples_are_turns_unless_said_otherwise(command, tmp_path, run, interrupted):
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT)
    command += ["--chat-template", template]
    interrupted(18, command)
    assert "18/60" in run(*command, "--few-shot", "turns").err


def test_files_that_another_process_takes_away_are_written(command, tmp_path, run, monkeypatch):
    make_record = scoring.make_record

    def take_files_away(*arguments):
        for file in tmp_path.glob("r.jsonl*"):
            file.unlink()
        return make_record(*arguments)

    monkeypatch.setattr(scoring, "make_record", take_files_away)
    run(*command)
    assert len(read_lines(tmp_path / "r.jsonl")) == 60
