"""Files that are somebody else's: they end in one line, in time, and read nothing beside them."""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import made_records
import pytest

from calibeval.__main__ import main
from calibeval.ask import engines, task_files
from calibeval.ask.request import Task
from calibeval.ask.tasks import load
from calibeval.imports import lighteval
from calibeval.io import InputError, finish, printable, read_text
from calibeval.measures import evaluations
from calibeval.report.tables import csv_text, markdown_text

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


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (ALIASES, "is used again by an alias"),
        (f"a: {DEEP}", "not YAML: .*(nest|deep)"),
        ("shots: 2026-02-30", "not YAML: day is out of range"),
        (f"topic: '{{{{ {'(' * 4999} }}}}'", "topic is .*: not Jinja"),
        (
            f"topic: '{{{{ 1{'+1' * 99_999} }}}}'",
            "topic is .*: has 200,005 characters, and may have 10,000",
        ),
        (f"a: {'[' * 900}{']' * 900}", "not YAML: nested too deep"),
        ("#" * (1 << 20) + "\nshots: 1", "is larger than 1,048,576 bytes"),
    ],
    ids=["aliases", "deep", "a date", "brackets", "a sum", "a list", "a large file"],
)
def test_a_task_file_without_end_is_refused_in_time(task_file, text, problem):
    path = task_file(text)
    with pytest.raises(InputError, match=f"{path}.*: {problem}"):
        task_files.read(path)


LONG = "a" * (1 << 19)  # characters of a column


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (LOOPS, "For: a task's template has no loops"),
        ("{% set a = long ~ long %}{{ a ~ a }}", "Assign: "),
        ("{{ 'x' * 99999999999 }}", "Mul: "),
        ("{{ 9 ** (9 ** 9) }}", "Pow: "),
        ("{{ '%099999999999d' % 1 }}", "Mod: "),
        ("{{ '{:99999999999}'.format(1) }}", r"format\(\) is not there; there are capitalize, "),
        ("{{ 'x'.ljust(99999999999) }}", r"ljust\(\) is not there"),
        ("{{ 1['to_bytes'](99999999999) }}", r"to_bytes\(\) is not there"),
        ("{{ long.rfind('b' ~ long) }}", r"rfind\(\) is not there"),
        ("{{ 'x' | center(99999999999) }}", "No filter named 'center'. There are .*capitalize"),
        ("{{ 1 | round(-99999999999) }}", "No filter named 'round'"),
        ("{{ range(99999999999) | list }}", "no column 'range'"),
        ("{{ lipsum(n=99) }}", "no column 'lipsum'"),
        ("{{ long is in long }}", "No test named 'in'"),
        ("{{ long | list | select('in', long) | list }}", "No test named 'in'"),
        ("{{ long | list | map('default', long, true) | list | string }}", "map_items"),
        ("{{ [long] | map(attribute='0.0.0') | first }}", "no attribute '0.0.0'"),
        ("{{ long | replace('', long) }}", "is of 274,[0-9,]* characters, and may be of"),
        ("{{ long | list | join(long) }}", "is of 274,[0-9,]* characters, and may be of"),
        ("{{ 'b'.strip(long) }}", r"strip\(\) takes up to 100 characters"),
        ("{{ long }}" * 64, "has more than 64 names, texts and operators"),
        ("{{ [long, longer] }}", "what it names has more than 1,048,576 characters"),
    ],
)
def test_a_template_that_takes_long_or_much_is_refused(task_file, tmp_path, template, problem):
    row = {"question": "?", "choices": ["a", "b"], "answer": 0, "long": LONG, "longer": LONG * 2}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    path = task_file(f'data: {{path: rows.jsonl}}\nrow:\n  question: "{template}"\n')
    began = time.monotonic()
    with pytest.raises(InputError, match=problem):
        load(Task(task=path, data=task_files.default_data(path), shots=0))
    assert time.monotonic() - began < 5


def test_a_template_calls_methods_of_texts_and_lists_alone():
    """A row of `datasets` held pictures, whose `save` writes where it is told."""
    template = task_files.Template("{{ picture.strip('/home/me/.bashrc') }}")
    with pytest.raises(ValueError, match=r"strip\(\) is not there"):
        template({"picture": Picture()})


class Picture:
    """An object with a method of a text's method's name."""

    def strip(self, path: str) -> str:
        raise AssertionError(f"{path} was written")


@pytest.mark.parametrize("place", ["../rows.jsonl", "a/../../rows.jsonl", "/etc/passwd"])
def test_a_task_file_names_no_data_outside_its_folder(task_file, place):
    with pytest.raises(InputError, match=r"data\.path: .* lies outside .*, --data "):
        task_files.default_data(task_file(f"data: {{path: {place}}}\n"))


def test_a_task_file_names_no_split_outside_its_data(task_file, tmp_path):
    path = task_file("data: {path: ., files: '../{{ split }}.jsonl'}\n")
    with pytest.raises(InputError, match=r"data\.files: .* lies outside"):
        load(Task(task=path, data=str(tmp_path)))


def test_a_task_file_names_no_link_that_leads_outside_its_folder(task_file, tmp_path_factory):
    private = tmp_path_factory.mktemp("home") / "private.csv"
    private.write_text("a secret,\n")
    path = task_file("data: {path: rows.csv}\n")
    (Path(path).parent / "rows.csv").symlink_to(private)
    with pytest.raises(InputError, match=rf"data\.path: .* lies outside .*, --data {private}"):
        task_files.default_data(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a link away needs root")
def test_another_users_link_to_a_file_of_ones_own_is_not_followed(tmp_path):
    """An error of a file that is only looked for showed a line of any other."""
    (tmp_path / "private").write_text("a secret")
    link = tmp_path / "launched.yaml"
    link.symlink_to("private")
    assert read_text(link) == "a secret"
    os.lchown(link, 1, 1)
    with pytest.raises(
        InputError, match=r"launched\.yaml: could not be read \(another user's link"
    ):
        read_text(link)


def test_control_characters_are_written_out():
    assert printable("a\x1b[2J\x9b\r\x7fb\n\tü") == r"a\u001b[2J\u009b\u000d\u007fb" + "\n\tü"
    assert printable("\u202e\ud800\u2028") == r"\u202e\ud800\u2028"
    assert printable("\u061c\u200b\u206a\u206f\ufeff") == r"\u061c\u200b\u206a\u206f\ufeff"
    assert csv_text("=\x1b[2J") == r"'=\u001b[2J"
    assert csv_text("\n=1+1") == "'\n=1+1"


def test_a_line_within_a_message_is_indented(capsys):
    def work():
        raise InputError("a: 'x\nerror: forged\x1b[2J'")

    assert finish(work) == 2
    assert capsys.readouterr().err == "error: a: 'x\n       error: forged\\u001b[2J'\n"


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


@pytest.mark.parametrize(
    "words", [["metrics", "FILE"], ["compare", "FILE", "FILE"], ["conformal", "FILE"]]
)
def test_a_files_name_makes_no_line_of_its_own(tmp_path, capsys, words):
    file = tmp_path / "r\nforged\x1b.jsonl"
    rows = [{**CONTINUATION, "id": f"{number}"} for number in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([str(file) if word == "FILE" else word for word in words]) == 0
    printed = capsys.readouterr().out
    assert "\n       forged\\u001b.jsonl" in printed and "\nforged" not in printed


def test_texts_of_an_index_are_no_links_in_markdown():
    text = r"![a](http://b) \[c](d) $e$ <f> | [0.1, 0.2]"
    shown = r"![a\](http://b) \\[c\](d) \$e\$ &lt;f> \| [0.1, 0.2]"
    assert markdown_text(text) == shown


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


@pytest.mark.parametrize("values", ["told", "shared"])
def test_a_packed_log_fills_no_memory(tmp_path, values):
    """Of equal values a file holds one, and of itself it may say anything."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    text = "x" * 10_000
    column = pyarrow.array([text] * 100)
    if values == "shared":
        column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 100), [text])
    file = tmp_path / "details.parquet"
    parquet.write_table(
        pyarrow.table({"doc": column}), file, use_dictionary=values == "shared", compression="zstd"
    )
    assert file.stat().st_size < 50_000
    with pytest.raises(InputError, match=r"details\.parquet: is larger than 500,000 bytes"):
        lighteval._unpacked(file, parquet.ParquetFile(file), most=500_000)
    assert len(lighteval._unpacked(file, parquet.ParquetFile(file))) == 100


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


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a link away needs root")
def test_nothing_is_kept_where_another_users_link_leads(tmp_path):
    file = tmp_path / "mine" / "r.jsonl"
    file.parent.mkdir()
    file.write_text(json.dumps(CONTINUATION) + "\n")
    link = tmp_path / "shared"
    link.symlink_to(file.parent)
    os.lchown(link, 1, 1)
    evaluations.load(link / "r.jsonl", parts=[])
    assert list(file.parent.iterdir()) == [file]
    os.lchown(link, 0, 0)
    evaluations.load(link / "r.jsonl", parts=[])
    assert len(list(file.parent.iterdir())) == 2


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


@pytest.fixture
def data_folder(tmp_path, monkeypatch):
    """A factory of folders that `datasets` reads; `data_folder(card, rows)` → path."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()

    def make(configs: str = "", card: str = "README.md") -> str:
        text = f"configs:\n- {{config_name: all, data_files: {configs}}}\n" if configs else ""
        (folder / card).write_text(f"---\n{text}---\n" if card == "README.md" else text)
        return str(folder)

    return make


@pytest.mark.parametrize("card", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "place",
    [
        *("ftp://127.0.0.1:9/a.csv", "zip://a.csv::https://127.0.0.1:9/a", "/etc/passwd"),
        *("../a.csv", "file:/etc/passwd", "local:/etc/passwd"),
    ],
)
def test_a_folder_of_data_names_no_address_and_no_file_elsewhere(data_folder, card, place):
    """`datasets` asked the address, in a dry run too."""
    for configs in (f'"{place}"', f'[{{split: test, path: ["{place}"]}}]'):
        folder = data_folder(configs, card)
        (Path(folder) / "a.parquet").touch()
        with pytest.raises(InputError, match=f"{card}: configs: .* lies outside the folder"):
            load(Task(task="mmlu", data=folder, shots=0))


def test_no_picture_of_a_folder_of_data_is_opened(data_folder):
    """Its row may hold an address instead, or a file's name."""
    datasets = pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = data_folder()
    row = {"goal": "?", "sol1": "a", "sol2": "b", "label": 0}
    table = pyarrow.Table.from_pylist([row])
    pictures = [{"bytes": None, "path": "https://127.0.0.1:9/a.png"}]
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    table = table.append_column("picture", pyarrow.array(pictures, kind))
    features = datasets.Features.from_arrow_schema(table.schema)
    features["picture"] = datasets.Image()
    schema = json.dumps({"info": {"features": features.to_dict()}})
    table = table.replace_schema_metadata({"huggingface": schema})
    parquet.write_table(table, f"{folder}/validation.parquet")
    (subject,) = load(Task(task="piqa", data=folder, shots=0))
    assert [question.text for question in subject.questions] == ["?"]


def test_a_folder_of_data_prints_nothing_by_itself(data_folder, capfd):
    folder = data_folder()
    (Path(folder) / "test\x1b[2J.json").write_text("[")
    with pytest.raises(InputError, match="it cannot be loaded"):
        load(Task(task="piqa", data=folder, shots=0))
    assert "\x1b[2J" not in capfd.readouterr().err


CARDS_AS_PAIRS = (
    '- - configs\n  - - {data_files: "https://127.0.0.1:9/a.csv"}\n',
    '!!pairs [configs: [{data_files: "https://127.0.0.1:9/a.csv"}]]\n',
    'configs: !!pairs [data_files: "https://127.0.0.1:9/a.csv"]\n',
    'configs: !!set {"https://127.0.0.1:9/a.csv"}\n',
    "configs: [{version: !!binary Ly4uLy4uL3RtcC9wbGFudGVk}]\n",
)


@pytest.mark.parametrize("text", CARDS_AS_PAIRS)
def test_a_card_of_other_kinds_hides_no_address_and_no_path(data_folder, text):
    """`datasets` updates a dictionary by pairs, so it asked the address; and it made folders where
    a version in base 64 led."""
    folder = data_folder()
    Path(folder, ".huggingface.yaml").write_text(text)
    with pytest.raises(InputError, match=r"expected keys with values|is of the kind tag:"):
        load(Task(task="mmlu", data=folder, shots=0))


@pytest.mark.parametrize("kind", ["tar", "gztar", "zip"])
def test_no_archive_of_a_folder_of_data_is_unpacked(data_folder, tmp_path, kind):
    """A tar by the name of test.json wrote over files outside the cache, by links in it."""
    pytest.importorskip("datasets")
    folder = data_folder()
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "a.json").write_text('{"goal": "?", "sol1": "a", "sol2": "b", "label": 0}\n')
    archive = shutil.make_archive(str(tmp_path / "packed"), kind, inside)
    shutil.move(archive, Path(folder, "validation.json"))
    with pytest.raises(InputError, match=r"validation\.json: an archive.*, or move it out of"):
        load(Task(task="piqa", data=folder, shots=0))


@pytest.mark.parametrize("name", ["q[1]", "s::d/data", "all*"])
def test_no_pattern_in_a_folders_name_leads_elsewhere(tmp_path, name):
    """`datasets` read the data of `q1` where `q[1]` was given."""
    pytest.importorskip("datasets")
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "README.md").touch()
    with pytest.raises(InputError, match="reads a pattern in its name: rename it"):
        load(Task(task="piqa", data=str(folder), shots=0))


def test_a_part_of_a_data_folder_that_cannot_be_listed_is_not_read(data_folder, monkeypatch):
    """Nobody saw the link to a private file in it, and `datasets` read that."""
    folder = data_folder()
    Path(folder, "closed").mkdir()
    scandir = os.scandir

    def listed(path):
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", listed)
    with pytest.raises(InputError, match="closed: cannot be listed"):
        load(Task(task="piqa", data=folder, shots=0))


def test_nobody_waits_for_a_pipe_of_a_data_folder_or_a_model(data_folder, tmp_path):
    folder = data_folder()
    os.mkfifo(Path(folder, "instruction.md"))
    with pytest.raises(InputError, match=r"instruction.md: a pipe or a device"):
        load(Task(task="piqa", data=folder, shots=0))
    os.mkfifo(tmp_path / "adapter_config.json")
    with pytest.raises(InputError, match=r"adapter_config.json: a pipe or a device"):
        engines.load_config(str(tmp_path))


def test_a_folder_here_does_not_stand_in_for_data_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil" / "data").mkdir(parents=True)
    with pytest.raises(InputError, match=r"./evil/data would be read instead"):
        load(Task(task="piqa", data="hub:evil/data", shots=0))


def test_what_a_shell_puts_for_a_star_is_printed_without_control_characters(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "a.jsonl", "b.jsonl", "z\x1b[2J.jsonl"])
    assert r"z\u001b[2J.jsonl" in capsys.readouterr().err


def test_collect_reads_no_matplotlibrc_of_the_current_folder(tmp_path):
    """pandas imported matplotlib for a table in LaTeX, before `figures.style` did."""
    made_records.write_records(tmp_path / "r.jsonl", 60, 1.0)
    row = {"records": "r.jsonl", "dataset": "mmlu", "model": "m", "label_smoothing": 0, "seed": 1}
    made_records.write_lines(tmp_path / "index.jsonl", [row])
    os.mkfifo(tmp_path / "matplotlibrc")
    words = [sys.executable, "-m", "calibeval", "collect", "index.jsonl", "--out", "out"]
    done = subprocess.run(words, cwd=tmp_path, timeout=120)
    assert done.returncode == 0
