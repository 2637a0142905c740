"""Sweep files and profiles: what is refused, where, and in which words; what decides a folder."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real import PROJECT, command

from calibeval.io import InputError
from sweeps.config import Cluster, Sweep, dump_yaml, load_cluster, override, parse
from sweeps.plan import plan


def refusal(path, *assignments) -> str:
    with pytest.raises(InputError) as caught:
        plan(path, list(assignments))
    return str(caught.value)


@pytest.mark.parametrize("text", ["2e-5", "2.0e-5", ".00002", "0.00002"])
def test_floats_are_read_as_people_write_them(text):
    assert parse(text, "here")[0] == 2e-5


@pytest.mark.parametrize("word", ["no", "yes", "on", "off", "12:00:00", "2026-11-22", "1_000"])
def test_words_stay_words(word):
    assert parse(word, "here")[0] == word
    assert parse("[true, False, 7, -3, null]", "here")[0] == [True, False, 7, -3, None]


@given(st.one_of(st.text("0123456789.:_eE+-noyftarux", max_size=6), st.floats(allow_nan=False)))
def test_what_is_written_is_read_back(value):
    assert parse(dump_yaml({"key": value}), "here")[0] == {"key": value}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_survives_an_override(value):
    raw = {"train": {}}
    override(raw, [f"train.learning_rate={value!r}"])
    assert raw["train"]["learning_rate"] == value


def test_an_unknown_key_comes_with_its_line(toy_file):
    path = toy_file(train={"learning_rat": 1e-3})
    assert f"{path}:5: train.learning_rat: unknown key; `python -m sweeps keys`" in refusal(path)
    task = {"task": "mmlu", "data": "x", "shot": 1}
    assert "score.tasks.0.shot: unknown key" in refusal(toy_file(score={"tasks": [task]}))


def test_a_wrong_value_comes_with_its_line_what_was_found_and_what_is_expected(toy_file):
    path = toy_file(workers=0)
    assert f"{path}:10: workers: found 0: Input should be greater than" in refusal(path)
    path = toy_file(grid={"seed": [1, "two"]})
    assert ":6: grid.seed: found 'two': Input should be a valid integer" in refusal(path)
    said = refusal(toy_file(), "train.steps=many")
    assert "command line (train.steps=many): train.steps: found 'many'" in said
    assert "train.model_name_or_path: is missing" in refusal(toy_file(), "train={}")


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("grid.seed=[1,", "command line (grid.seed=[1,):2:1: not YAML"),
        ("name.x=1", "command line (name.x=1): found 'toy', which has no such place"),
        ("score.tasks.1.shots=1", "which has no such place"),
        ("train.steps={", "command line (train.steps={):2:1: not YAML"),
        ("grid.label_smoothing=[]", "grid.label_smoothing: found []"),
        ("train.label_smoothing=0.1", "grid.label_smoothing: is given in `train` too"),
        ("grid.seed=[1, 1]", "are the same run; drop one"),
        ("backend=nothing", "'nothing' is none of trainer, open-instruct"),
        ("score.select_on=other", "score.select_on: 'other' is none of ['mmlu', 'held_out_loss']"),
        ("score.select_on=held_out_loss", "score.select_on: held_out_loss needs train.held_out"),
        ("score.select_on=mmlu", "asks the test split, which the tables show; name a task with"),
        ("output_root=$NOT_SET/x", "$NOT_SET is not set here: export NOT_SET=…"),
    ],
)  # fmt: skip
def test_bad_overrides(toy_file, assignment, said):
    path = toy_file(score={"tasks": [{"task": "mmlu", "data": "x"}]})
    assert said in refusal(path, assignment)


def test_a_file_that_is_none_is_named(tmp_path):
    for text, said in (
        ("a: 1\na: 2\n", ":2:1: not YAML: the key 'a' is given twice"),
        ("[1]", "expected `key: value` lines, found list"),
        ("", "expected `key: value` lines, found NoneType"),
    ):
        (tmp_path / "odd.yaml").write_text(text)
        assert said in refusal(tmp_path / "odd.yaml")
    assert "none.yaml: could not be read" in refusal(tmp_path / "none.yaml")
    done = command("launch", tmp_path / "none.yaml")
    assert done.returncode == 2 and done.stderr.startswith("error: "), done


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("partitoin", "gpu", "unknown key"),
        ("time", 12, "Input should be a valid string"),
        ("extra", "[-C gpu]", "String should match pattern"),
    ],
)
def test_a_bad_profile_is_refused(tmp_path, key, value, expected):
    path = tmp_path / "mine.yaml"
    path.write_text(f"partition: gpu\n{key}: {value}\n")
    with pytest.raises(InputError) as caught:
        load_cluster(str(path))
    assert str(caught.value).startswith(f"{path}:") and key in str(caught.value)
    assert expected in str(caught.value)


def test_every_key_is_documented_and_printed():
    done = command("keys", "open-instruct")
    assert done.returncode == 0, done.stderr
    from sweeps.open_instruct import Train

    for model in (Sweep, Cluster, Train):
        schema = model.model_json_schema()
        for kind in (schema, *schema.get("$defs", {}).values()):
            for name, field in kind.get("properties", {}).items():
                lines = [x for x in done.stdout.splitlines() if x.strip().startswith(f"{name}:")]
                said = field.get("description", name).rstrip(".")
                assert any(" ".join(said.split()) in line for line in lines), name
    assert "is ΣS / Σn; takes mean, sum, token_mean\n" in done.stdout


@pytest.mark.parametrize("file", sorted(PROJECT.glob("configs/*/*.yaml")), ids=lambda p: p.stem)
def test_the_shipped_files_are_whole(file):
    if file.parent.name == "cluster":
        load_cluster(str(file))
    else:
        assert plan(file, []).cells


def test_the_same_run_however_its_paths_are_spelt(toy_file):
    path = toy_file(grid={})
    one = plan(path, ["train.model_name_or_path=models/x"]).cells[0].run.name
    for other in ("./models/x", "models/x/", "models//x", "models/y/../x"):
        assert plan(path, [f"train.model_name_or_path={other}"]).cells[0].run.name == one


def test_a_folder_is_a_sweep_wherever_it_lies(toy_file, tmp_path):
    path = toy_file(grid={"seed": [1, 2]})
    first = plan(path, [])
    first.create()
    assert plan(first.folder, []).cells[0].run.path == first.cells[0].run.path
    moved = first.folder.rename(tmp_path / "elsewhere")
    again = plan(moved, [])
    assert [cell.run.path for cell in again.cells] == [moved / c.run.name for c in first.cells]
    assert all(cell.run.config_file.exists() for cell in again.cells)
    assert "no sweep.yaml in this folder" in refusal(tmp_path / "out")
    other = plan(path, ["grid.seed=[3]"])  # more of the same sweep: one folder, another run
    assert other.folder == first.folder and other.cells[0].run.name != first.cells[0].run.name


def test_paths_start_where_they_are_typed_else_at_the_project(toy_file, tmp_path):
    path = toy_file()
    here = command("status", path.name, cwd=tmp_path)
    assert f"{tmp_path}/out/toy: 2 runs: 2 to do" in here.stdout, here.stderr
    shipped = command("status", "configs/sweeps/beta.yaml", cwd=tmp_path)
    assert f"{PROJECT}/runs/paper/beta: 6 runs" in shipped.stdout, shipped.stderr


WRONG = ["lunch"], ["status"], ["status", "x", "--delete"], ["keys", "a=b"]


@pytest.mark.parametrize("typed", WRONG)
def test_what_is_typed_wrong_ends_in_two(typed):
    done = command(*typed)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_head_may_stop_reading():
    line = f"bash {PROJECT}/slurm/sweep_grid.sh --dry-run | head -n 1"
    call = ["bash", "-o", "pipefail", "-c", f"PYTHON={sys.executable} {line}"]
    done = subprocess.run(call, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_imports_are_no_ring():
    """Whatever is imported first, all of it can be."""
    names = "config run plan score element slurm local status collect preflight"
    for name in names.split():
        call = [sys.executable, "-c", f"import sweeps.{name}, sys; print('torch' in sys.modules)"]
        done = subprocess.run(call, text=True, capture_output=True)
        assert done.stdout == "False\n", (name, done.stderr)
