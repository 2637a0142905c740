"""Every bad input gets one message that names the file, the row, what was found and expected."""

import json
import math
import resource
import shutil
import subprocess
import sys

import pytest
from made_records import LETTERS_RECORD, mmlu_rows, write_csv


def drop_a_choice(rows):
    del rows[3][2]


def answer_beyond_the_choices(rows):
    rows[2][5] = "E"


def blank_choice(rows):
    rows[0][3] = " "


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (drop_a_choice, "line 4: 5 columns, expected 6 (question, A, B, C, D, answer)"),
        (answer_beyond_the_choices, "line 3: answer is 'E', expected 0 to 3, A"),
        (blank_choice, "line 1: choices.2 is ' ': "),
        (list.clear, "no questions"),
    ],
)
def test_malformed_csv(mmlu, command, refused, spoil, expected):
    rows = mmlu_rows(5)
    spoil(rows)
    path = mmlu / "test" / "light_test.csv"
    write_csv(path, rows)
    message = refused(*command)
    assert str(path) in message
    assert expected in message


def test_too_few_examples(mmlu, command, refused):
    assert "light: 5 examples, but --shots 6" in refused(*command, "--shots", "6")
    (mmlu / "dev" / "light_dev.csv").unlink()
    assert "light: 0 examples, but --shots 5" in refused(*command)


def test_a_subject_that_is_not_there(command, refused):
    message = refused(*command, "--subjects", "light,heavy")
    assert "no subject 'heavy'; there are light, old_kings" in message


def test_a_model_that_is_none(command, tiny_model, tmp_path, refused):
    (tmp_path / "empty").mkdir()
    for name in (tmp_path / "empty", tiny_model / "model.safetensors"):
        assert f"{name}: cannot be loaded as " in refused(*command, "--model", name)


@pytest.fixture
def weights(tiny_model):
    """The tiny model's parameters by name."""
    from safetensors.torch import load_file

    return load_file(tiny_model / "model.safetensors")


@pytest.fixture
def refused_weights(command, tiny_model, tmp_path, refused):
    """refused_weights(weights) → what the command says of the tiny model with these, or with these
    bytes in place of the file of weights."""
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    file = folder / "model.safetensors"

    def refuse(weights: dict | bytes) -> str:
        shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
        if isinstance(weights, bytes):
            file.write_bytes(weights)
        else:
            save_file(weights, file, metadata={"format": "pt"})
        message = refused(*command, "--model", folder)
        assert str(folder) in message
        assert not (tmp_path / "r.jsonl").exists()
        return message

    return refuse


# A parameter that no file has would be a random number, and the score one of chance.


def test_parameters_under_other_names(weights, refused_weights):
    wrapped = {f"module.{name}": parameter for name, parameter in weights.items()}
    message = refused_weights(wrapped)
    assert f"no weights for {len(weights)} of its parameters, such as lm_head.weight" in message


def test_a_parameter_of_another_shape(weights, refused_weights):
    name = "model.embed_tokens.weight"
    message = refused_weights({**weights, name: weights[name][:9].clone()})
    assert f"no weights for 1 of its parameters, such as {name}" in message


def test_a_file_of_weights_that_is_cut(tiny_model, refused_weights):
    whole = (tiny_model / "model.safetensors").read_bytes()
    for content in (whole[:5000], b""):
        assert "cannot be loaded as a causal language model: " in refused_weights(content)


def test_a_disk_that_fills_leaves_nothing_half_written(tmp_path):
    code = "import sys; from calibeval.io import write_text; write_text(sys.argv[1], 'x' * 9999)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "r.jsonl")],
        capture_output=True,
        text=True,
        # A limit on file size fails a write part-way, as a full disk does.
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert "InputError" in done.stderr
    assert "could not be written (File too large)" in done.stderr
    assert not list(tmp_path.iterdir())


TEXTS = {"scoring": "continuation", "normalise": "bytes"}


def second_record(**changes) -> str:
    """A line of a good record but for these keys."""
    return json.dumps({**LETTERS_RECORD, "id": "a/1", **changes})


HUGE_NUMBER = "-" + "9" * 5000


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ("{", "line 2: not JSON (Expecting property name enclosed in double quotes, column "),
        (json.dumps(LETTERS_RECORD), "line 2: id 'a/0' is on line 1 already"),
        (second_record(label=2), "line 2: label is 2, expected 0 to 1"),
        (second_record(logprobs=[-1, -math.inf]), "logprobs.1 is -inf: expected a finite"),
        (second_record().replace("-2.0", HUGE_NUMBER), "line 2: "),
        (second_record(logprobs=[-0.1] * 2), "probabilities of logprobs sum to 1.81, more than 1"),
        (second_record(**TEXTS), "line 2: no 'bytes' by which to normalise"),
        (second_record(**TEXTS, bytes=[3, 4]), "line 2: scoring 'continuation' after 'letters'"),
        (json.dumps({"id": "b"}), "line 2: no 'subject'; found id"),
        ("[" * 100_000, "line 2: not JSON (nested too deep"),
    ],
)
def test_malformed_records(tmp_path, refused, second, expected):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(LETTERS_RECORD) + "\n" + second + "\n")
    assert expected in refused("metrics", path)


def test_records_cut_at_the_end_of_a_line(tmp_path, refused):
    """The sidecar says how many there were."""
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(LETTERS_RECORD) + "\n" + second_record() + "\n")
    sidecar = tmp_path / "r.jsonl.meta.json"
    sidecar.write_text('{"questions": 3}')
    assert f"{path}: 2 records, but r.jsonl.meta.json says 3" in refused("metrics", path)
    path.write_text("")
    assert f"{path}: no records" in refused("metrics", path)
    sidecar.write_text("[1")
    assert "r.jsonl.meta.json: not a JSON object" in refused("metrics", path)


def test_records_of_other_prompts_than_the_sidecars(command, tmp_path, run, refused):
    """Half of a run with five examples and half of one without, or two runs' questions in turns."""
    five = tmp_path / "5.jsonl"
    none = tmp_path / "0.jsonl"
    run(*command, "--out", five, "--shots", 5)
    run(*command, "--out", none, "--shots", 0)
    lines_with_five = five.read_text().splitlines(keepends=True)
    lines_with_none = none.read_text().splitlines(keepends=True)
    five.write_text("".join(lines_with_five[:30] + lines_with_none[30:]))
    assert "its prompts are not those that 5.jsonl.meta.json was" in refused("metrics", five)
    (tmp_path / "5.jsonl.meta.json").unlink()
    assert "line 31: shots 0 after 5; expected the same" in refused("metrics", five)


def test_not_csv_and_not_utf8(mmlu, command, refused):
    path = mmlu / "test" / "light_test.csv"
    path.write_text('"a question that never ends,A,B')
    assert "line 1: not CSV" in refused(*command)
    path.write_bytes("a\né".encode("latin-1"))
    assert f"{path}: not UTF-8 text (byte 0xe9)" in refused(*command)
