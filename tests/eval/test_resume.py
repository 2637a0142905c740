"""Scoring goes on after kill -9, and never mixes two runs."""

import json
import signal
import subprocess
import sys

import pytest
from made_records import LETTERS, read_lines, table, write_lines, write_rows

from calibeval import engines, scoring
from calibeval.__main__ import main
from calibeval.io import InputError
from calibeval.store import Store

# The command line, which dies after so many records: its first argument.
DIES = """
import os, signal, sys
from calibeval import __main__, scoring

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
    for records_kept in (18, 25):  # in the middle of a batch
        dying = [sys.executable, "-c", DIES, str(records_kept), *map(str, command)]
        died = subprocess.run(dying, capture_output=True, text=True)
        assert died.returncode == -signal.SIGKILL, died.stderr
    assert not out.exists()
    assert len(read_lines(part)) == 18 + 25
    part.write_text(part.read_text() + part.read_text()[1:99])  # killed while it wrote
    # The bar starts where the dead run stopped.
    assert "43/60" in run(*command).err
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not list(tmp_path.glob("r.jsonl.part*"))


def test_finished_is_finished_by_other_options_too(command, tmp_path, run):
    """Options that choose the same questions are the same request."""
    run(*command)
    before = (tmp_path / "r.jsonl").stat().st_mtime_ns
    for options in ([], ["--limit", "30", "--split", "test", "--subjects", "light,old_kings"]):
        assert "complete already, 60 questions" in run(*command, *options).err
    assert (tmp_path / "r.jsonl").stat().st_mtime_ns == before


def test_files_that_another_process_takes_away_are_written(command, tmp_path, run, monkeypatch):
    make_record = scoring.make_record

    def take_files_away(*arguments):
        for file in tmp_path.glob("r.jsonl*"):
            file.unlink()
        return make_record(*arguments)

    monkeypatch.setattr(scoring, "make_record", take_files_away)
    run(*command)
    assert len(read_lines(tmp_path / "r.jsonl")) == 60


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (["--shots", "2"], "other questions or examples; delete it, or give another --out"),
        (["--scoring", "continuation"], "scoring 'letters' (now 'continuation')"),
        (["--dtype", "bfloat16"], "dtype 'auto' (now 'bfloat16')"),
    ],
)
def test_other_settings_are_refused(command, run, refused, options, changes):
    run(*command)
    assert f"was made with {changes}" in refused(*command, *options)


def test_other_data_by_the_same_options_are_refused(command, mmlu, run, refused):
    run(*command)
    write_rows(mmlu / "test" / "light_test.csv", table(29))
    assert "was made with other questions or examples" in refused(*command)


def test_a_file_of_nobody_is_refused(command, tmp_path, refused):
    out = tmp_path / "r.jsonl"
    out.write_text("{}\n")
    assert "no sidecar says how it was made; move it away" in refused(*command)
    assert out.read_text() == "{}\n"


def test_a_damaged_file_is_refused(command, tmp_path, run, refused):
    out = tmp_path / "r.jsonl"
    run(*command)
    out.write_text(out.read_text()[:-9])
    assert f"error: {out}, line 60: not JSON" in refused(*command)


BFLOAT16 = {"engine": "transformers", "device": "H100", "dtype": "bfloat16", "batch_size": 16}
DECISIVE = ("engine", "dtype", "head_dtype")


@pytest.fixture
def store(tmp_path):
    """A store that a bfloat16 engine has begun to fill."""
    first = Store(tmp_path / "r.jsonl", {"dtype": "auto"})
    first.keep_engine_settings(BFLOAT16, DECISIVE)
    with first.appending() as append:
        append(LETTERS)
    return Store(tmp_path / "r.jsonl", {"dtype": "auto"})


def test_another_precision_is_refused(store):
    """`dtype=auto` is bfloat16 on one machine and float32 on the next."""
    other = {**BFLOAT16, "device": "cpu", "dtype": "float32"}
    message = r"r\.jsonl\.part: was made with dtype 'bfloat16' \(now 'float32'\)"
    with pytest.raises(InputError, match=message):
        store.keep_engine_settings(other, DECISIVE)


def test_another_engine_is_refused(store):
    with pytest.raises(InputError, match=r"engine 'transformers' \(now 'vllm'\)"):
        store.keep_engine_settings({**BFLOAT16, "engine": "vllm"}, DECISIVE)


def test_another_batch_size_is_not(store):
    store.keep_engine_settings({**BFLOAT16, "batch_size": 64}, DECISIVE)
    assert list(store.finished()) == ["a/0"]


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
