"""Scoring goes on after kill -9, and never mixes two runs."""

import json
import signal
import subprocess
import sys

import pytest
from made_records import LETTERS, read_lines, table, write_lines, write_rows

from calibeval import scoring, store
from calibeval.__main__ import main
from calibeval.io import InputError

DIES = """
import os, signal, sys
from calibeval import __main__, scoring

kept, record = int(sys.argv.pop(1)), scoring.record

def record_or_die(*given):
    global kept
    if kept == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    kept -= 1
    return record(*given)

scoring.record = record_or_die
__main__.main()
"""


def test_kill_loses_seconds_and_changes_no_byte(command, tmp_path, run):
    """What was kept before the process died stays, and batches are what they were to be."""
    out, part = tmp_path / "r.jsonl", tmp_path / "r.jsonl.part"
    run(*command, "--out", tmp_path / "whole.jsonl", "--batch-size", "4")
    for kept in (18, 25):  # in the middle of a batch
        dies = [sys.executable, "-c", DIES, str(kept), *map(str, command), "--batch-size", "4"]
        died = subprocess.run(dies, capture_output=True, text=True)
        assert died.returncode == -signal.SIGKILL, died.stderr
    assert not out.exists()
    assert len(read_lines(part)) == 43
    part.write_text(part.read_text() + part.read_text()[1:99])  # killed while it wrote
    # The bar starts where the dead run stopped.
    assert "43/60" in run(*command, "--batch-size", "4").err
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not [*tmp_path.glob("r.jsonl.part*")]


def test_finished_is_finished(command, tmp_path, run, monkeypatch):
    """Also by another process meanwhile, and by other options that choose the same questions."""
    kept = scoring.record

    def record(*given):
        for file in tmp_path.glob("r.jsonl*"):
            file.unlink()
        return kept(*given)

    monkeypatch.setattr(scoring, "record", record)
    run(*command)
    before = (tmp_path / "r.jsonl").stat()
    for options in ([], ["--limit", "30", "--split", "test", "--subjects", "light,old_kings"]):
        assert "complete already, 60 questions" in run(*command, *options).err
    assert (tmp_path / "r.jsonl").stat().st_mtime_ns == before.st_mtime_ns


def test_other_settings_are_refused(command, mmlu, run, refused):
    run(*command)
    for options, changes in (
        (["--shots", "2"], "other questions or examples; delete it, or give another --out"),
        (["--scoring", "continuation"], "scoring 'letters' (now 'continuation')"),
        (["--dtype", "bfloat16"], "dtype 'auto' (now 'bfloat16')"),
    ):
        assert f"was made with {changes}" in refused(*command, *options)
    write_rows(mmlu / "test" / "light_test.csv", table(29))  # other data by the same options
    assert "was made with other questions or examples" in refused(*command)


def test_files_that_are_damaged_or_of_nobody_are_refused(command, tmp_path, run, refused):
    out = tmp_path / "r.jsonl"
    out.write_text("{}\n")
    assert "no sidecar says how it was made; move it away" in refused(*command)
    assert out.read_text() == "{}\n"
    out.unlink()
    run(*command)
    out.write_text(out.read_text()[:-9])
    assert f"error: {out}, line 60: not JSON" in refused(*command)


BF16 = {"engine": "transformers", "device": "H100", "dtype": "bfloat16", "batch_size": 16}
FP32 = BF16 | {"device": "cpu", "dtype": "float32"}


def test_another_precision_or_engine_is_refused(tmp_path):
    """`dtype=auto` is bfloat16 on one machine and float32 on the next."""
    out = tmp_path / "r.jsonl"
    one = store.Store(out, {"dtype": "auto"})
    one.engine(BF16)
    with one.adding() as add:
        add(LETTERS)
    again = store.Store(out, {"dtype": "auto"})
    with pytest.raises(InputError, match=r"dtype 'bfloat16' \(now 'float32'\)"):
        again.engine(FP32)
    with pytest.raises(InputError, match=r"engine 'transformers' \(now 'vllm'\)"):
        again.engine(BF16 | {"engine": "vllm"})
    again.engine(BF16 | {"batch_size": 64})


def test_finished_parts_are_read_as_they_are(tiny_model, tmp_path, run, monkeypatch):
    """The process that writes the file may have had nothing left to score, and no engine; ids may
    hold what ends a line elsewhere."""
    row = {"question": "which light?", "choices": ["a", "b"], "answer": 0}
    ids = ["one\u2028two", "three\x85four", "five"]
    questions = write_lines(tmp_path / "q.jsonl", [row | {"id": i} for i in ids])
    command = ["score", "--task", "jsonl", "--model", tiny_model, "--data", questions]
    command += ["--shots", 0, "--out", tmp_path / "r.jsonl"]
    monkeypatch.setattr(store.Store, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main([*map(str, command)]) == 130
    monkeypatch.undo()
    monkeypatch.setattr(scoring, "_engine", None)
    run(*command)
    assert [row["id"] for row in read_lines(tmp_path / "r.jsonl")] == ids
    meta = json.loads((tmp_path / "r.jsonl.meta.json").read_text())
    assert meta["settings"]["engine_settings"]["dtype"] == "float32"
