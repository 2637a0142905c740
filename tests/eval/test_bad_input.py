"""Every bad input gets one message that names the file, the row, what was found and expected."""

import json
import math
import resource
import shutil
import subprocess
import sys

import pytest
from made_records import LETTERS, table, write_rows


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda r: r[3].pop(2), "line 4: 5 columns, expected 6 (question, A, B, C, D, answer)"),
        (lambda r: r[2].__setitem__(5, "E"), "line 3: answer is 'E', expected 0 to 3, A"),
        (lambda r: r[0].__setitem__(3, " "), "line 1: choices.2 is ' ': "),
        (lambda r: r.clear(), "no questions"),
    ],
)
def test_malformed_csv(mmlu, command, refused, change, expected):
    rows = table(5)
    change(rows)
    path = mmlu / "test" / "light_test.csv"
    write_rows(path, rows)
    err = refused(*command)
    assert f"{path}" in err and expected in err


def test_not_csv_and_not_utf8(mmlu, command, refused):
    path = mmlu / "test" / "light_test.csv"
    path.write_text('"a question that never ends,A,B')
    assert "line 1: not CSV" in refused(*command)
    path.write_bytes("a\né".encode("latin-1"))
    assert f"{path}: not UTF-8 text (byte 0xe9)" in refused(*command)


def test_layout(mmlu, command, tmp_path, refused):
    assert "light: 5 examples, but --shots 6" in refused(*command, "--shots", "6")
    (mmlu / "dev" / "light_dev.csv").unlink()
    assert "light: 0 examples, but --shots 5" in refused(*command)
    err = refused(*command, "--subjects", "light,heavy")
    assert "no subject 'heavy'; there are light, old_kings" in err
    err = refused(*command, "--out", tmp_path)
    assert f"--out {tmp_path}: expected a file's name such as" in err
    err = refused(*command, "--data", tmp_path)
    assert "no folder test/ with files <subject>_test.csv" in err


def test_model_folder(command, tiny_model, tmp_path, refused, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    for name in (tmp_path / "empty", tiny_model / "model.safetensors"):
        assert f"{name}: cannot be loaded as " in refused(*command, "--model", name)
    for name in (tmp_path / "absent", "tiny-modle"):
        err = refused(*command, "--model", name)
        assert f"no folder {name} here, so taken for a hub name" in err


def test_checkpoints_that_are_not_whole(command, tiny_model, tmp_path, refused):
    """A parameter that no file has would be a random number, and the score one of chance."""
    from safetensors.torch import load_file, save_file

    given = load_file(tiny_model / "model.safetensors")

    def broken(name: str, weights: dict | bytes | None = None) -> str:
        folder = tmp_path / name
        shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
        if isinstance(weights, bytes):
            (folder / "model.safetensors").write_bytes(weights)
        elif weights:
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        err = refused(*command, "--model", folder)
        assert str(folder) in err and not (tmp_path / "r.jsonl").exists()
        return err

    wrapped = broken("wrapped", {f"module.{name}": of for name, of in given.items()})
    assert f"no weights for {len(given)} of its parameters, such as lm_head.weight" in wrapped
    lacking = {name: of for name, of in given.items() if ".layers.1." not in name}
    assert "model.layers.1.input_layernorm.weight" in broken("lacking", lacking)
    name = "model.embed_tokens.weight"
    small = broken("small", given | {name: given[name][:9].clone()})
    assert f"no weights for 1 of its parameters, such as {name}" in small
    whole = (tiny_model / "model.safetensors").read_bytes()
    for content in (whole[:5000], b""):
        assert "cannot be loaded as a causal language model: " in broken("cut", content)


def test_a_disk_that_fills_leaves_nothing_half_written(tmp_path):
    code = "import sys; from calibeval.io import write_text; write_text(sys.argv[1], 'x' * 9999)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "r.jsonl")],
        capture_output=True,
        text=True,
        # A limit on file size fails a write part-way, as a full disk does.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert "InputError" in done.stderr and "could not be written (File too large)" in done.stderr
    assert not list(tmp_path.iterdir())


TEXTS = {"scoring": "continuation", "normalise": "bytes"}


def changed(**values) -> str:
    """A line of a good record but for these."""
    return json.dumps(LETTERS | {"id": "a/1"} | values)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: expected a JSON object, found list"),
        (json.dumps(LETTERS), "line 2: id 'a/0' is on line 1 already"),
        (changed(label=True), "line 2: label is True: expected a valid integer"),
        (changed(label=2), "line 2: label is 2, expected 0 to 1"),
        (changed(logprobs=[-1.0]), "logprobs is [-1.0]: List should have at least 2 items"),
        (changed(logprobs=[-1, -math.inf]), "logprobs.1 is -inf: expected a finite"),
        (changed().replace("-2.0", "-" + "9" * 5000), "line 2: "),
        (changed(logprobs=[-0.1, -0.1]), "probabilities of logprobs sum to 1.81, more than 1"),
        (changed(**TEXTS, bytes=[3]), "line 2: bytes: found 1, expected 2, one a choice"),
        (changed(**TEXTS), "line 2: no 'bytes' by which to normalise"),
        (changed(**TEXTS, bytes=[3, 4]), "line 2: scoring 'continuation' after 'letters'"),
        (json.dumps({"id": "b"}), "line 2: no 'subject'; found id"),
        (changed(model="other"), "line 2: model 'other' after '?'; expected"),
        ("[" * 100_000, "line 2: not JSON (maximum recursion depth"),
    ],
)
def test_malformed_records(tmp_path, refused, second, expected):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(LETTERS) + "\n" + second + "\n")
    assert expected in refused("metrics", path)


def test_absent_and_empty_records(tmp_path, refused):
    path = tmp_path / "r.jsonl"
    for asked in (["metrics", path], ["compare", path, path]):
        assert f"{path}: could not be read (No such file or directory)" in refused(*asked)
    path.touch()
    assert f"{path}: no records" in refused("metrics", path)
    path.write_text(json.dumps(LETTERS))
    assert "line 1: no 'bytes' by which" in refused("metrics", path, "--normalise", "bytes")


def test_records_cut_at_the_end_of_a_line(tmp_path, refused):
    """The sidecar says how many there were."""
    path = tmp_path / "r.jsonl"
    path.with_name("r.jsonl.meta.json").write_text('{"questions": 3}')
    path.write_text(changed(id="a/0") + "\n" + changed(id="a/1") + "\n")
    err = refused("metrics", path)
    assert f"{path}: 2 records, but r.jsonl.meta.json says 3" in err
    path.with_name("r.jsonl.meta.json").write_text("[1")
    assert "r.jsonl.meta.json: not a JSON object" in refused("metrics", path)


def test_records_of_other_prompts_than_the_sidecars(command, tmp_path, run, refused):
    """Half of a run with five examples and half of one without, or two runs' questions in turns."""
    outs = [tmp_path / f"{shots}.jsonl" for shots in (5, 0)]
    for shots, out in zip((5, 0), outs, strict=True):
        run(*command, "--out", out, "--shots", shots)
    five, none = (out.read_text().splitlines(keepends=True) for out in outs)
    outs[0].write_text("".join(five[:30] + none[30:]))
    assert "its prompts are not those that 5.jsonl.meta.json was" in refused("metrics", outs[0])
    (tmp_path / "5.jsonl.meta.json").unlink()
    assert "line 31: shots 0 after 5; expected the same" in refused("metrics", outs[0])
