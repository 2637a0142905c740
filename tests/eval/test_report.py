"""From an index to rows, tables, figures and the page."""

import csv
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from made_records import read_lines, write_lines, write_records

from calibeval.measures import evaluations, stats
from calibeval.report import figures, index, tables

# (records, β, seed, sharpness): a model before fine-tuning and two β, two seeds each.
GRID = [
    ("base", None, 0, 1.0),
    ("b0-0", 0, 0, 3.0),
    ("b0-1", 0, 1, 4.0),
    ("b0.1-0", 0.1, 0, 1.5),
    ("b0.1-1", 0.1, 1, 2.5),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two data sets' records with their figures kept, and the lines of their index."""
    folder = tmp_path_factory.mktemp("made")
    lines = []
    for place, dataset in enumerate(("toy", "other")):
        for name, beta, seed, sharpness in GRID:
            records = f"{dataset}-{name}.jsonl"
            write_records(folder / records, 300 + place, sharpness, place)
            evaluations.load(folder / records)
            line = {"records": records, "dataset": dataset, "model": "m_1", "seed": seed}
            lines.append({**line, "label_smoothing": beta})
    return folder, lines


@pytest.fixture
def project(made, tmp_path):
    """project(change, datasets=("toy",)) → an index of copies, each line as `change` returns it."""
    folder, lines = made
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)

    def write(change=lambda line: line, datasets=("toy",)):
        chosen = [change(dict(line)) for line in lines if line["dataset"] in datasets]
        return write_lines(tmp_path / "index.jsonl", filter(None, chosen))

    return write


def settings(results: index.Results) -> list[tuple]:
    """Return what each row shows of itself, and its seeds on each data set."""
    return [
        (*map(row.text, results.shown), *(list(by_seed) for by_seed in row.evaluations.values()))
        for row in results.rows
    ]


def test_training_data_are_rows(project):
    def by_data(line):
        data = None if line["label_smoothing"] is None else f"sets/{'ab'[line['seed']]}.jsonl"
        return {**line, "train_data": data}

    results = index.read(project(by_data))
    assert results.shown == ("train_data", "model", "label_smoothing")
    assert settings(results) == [
        ("–", "m_1", "base", [0]),
        ("a.jsonl", "m_1", "0", [0]),
        ("a.jsonl", "m_1", "0.1", [0]),
        ("b.jsonl", "m_1", "0", [1]),
        ("b.jsonl", "m_1", "0.1", [1]),
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"label_smoothing": ...}, "index.jsonl, line 1: no 'label_smoothing'"),
        ({"seed": 1}, "toy-b0-0.jsonl and .*toy-b0-1.jsonl: both are toy, .* with seeds 1 and 1"),
        ({"seed": {0: None, 1: 1}}, "with seeds None and 1; .* seed, train_data"),
        ({"dataset": "toy"}, "toy-base.* and .*other-base.*300 and 301 questions"),
        ({"floor": 1}, "line 1: 'floor' is a column of figures in table.csv"),
    ],
)
def test_an_index_that_cannot_be_averaged_is_refused(project, tmp_path, refused, change, expected):
    """`...` takes a key away; a dictionary gives the value by seed."""

    def changed(line):
        for key, value in change.items():
            if isinstance(value, dict):
                value = value.get(line["seed"], line[key])
            line[key] = value
        return {key: value for key, value in line.items() if value is not ...}

    path = project(changed, ("toy", "other"))
    out = tmp_path / "out"
    assert re.search(expected, refused("collect", path, "--out", out))
    assert not out.exists()


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of a Markdown table's lines."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and "| --- |" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_bold_is_what_survives_among_all_comparisons(project, tmp_path):
    """Each cell by itself was bold: of twelve pairs of equals some one in eight tables of ten."""
    results = index.read(project(datasets=("toy", "other")))
    columns = tables.read_columns("accuracy,brier,auroc,ece@vocabulary,ece_signed")
    table = tables.difference_table(results, columns)
    cells = [cell for line in table.lines for cell in line.cells]
    p_values = []
    for line in table.lines:
        base = results.reference(line.row)
        for group in results.data_sets:
            pairing = tables.pair(base, line.row, group)
            for column in tables._difference_columns(columns):
                found = pairing.difference(column)
                # Neither sign of the signed error is better, so it is not compared.
                is_compared = column.metric != "ece_signed"
                p_values.append(found.p_no_difference if is_compared else None)
    assert [cell.bold for cell in cells] == stats.holm(p_values)
    assert sum(p is not None and p < 0.05 for p in p_values) >= sum(cell.bold for cell in cells) > 0
    comparisons = len([p for p in p_values if p is not None])
    assert f"for the {comparisons} comparisons of this table" in table.markdown()


NAMES = [
    "$\\nosuch$ | and\nforged <script>alert(1)</script> \x1b[2J\x9b",
    "=HYPERLINK(1)",
    "n" * 300,
]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_makes_whole_tables(project, tmp_path, run, name):
    """Of a data set and of a model: formulas, HTML, breaks, a terminal's control characters."""
    keep = ("toy-b0-0.jsonl", "toy-b0.1-0.jsonl")

    def renamed(line):
        return {**line, "dataset": name, "model": name} if line["records"] in keep else None

    out = tmp_path / "out"
    printed = run("collect", project(renamed), "--out", out)
    texts = [file.read_text() for file in out.iterdir() if file.suffix != ".png"]
    for text in (*printed, *texts):
        assert not re.search("\x1b|\x9b|\nforged", text)
    assert "<script" not in (out / "report.html").read_text()
    for file in ("table.md", "differences.md"):
        text = (out / file).read_text()
        assert "<script" not in text
        rows = [line for line in text.splitlines() if line.startswith("|")]
        columns = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
        assert len(columns) == 1, "a row with more columns than another"
        assert len(rows) == (4 if file == "table.md" else 3)
    with open(out / "table.csv", newline="") as file:
        for row in csv.reader(file):
            texts = [cell for cell in row if not re.fullmatch(r"-?[\d.]+(e-?\d+)?", cell)]
            assert not [text for text in texts if text.startswith(("=", "+", "-", "@"))]


@pytest.mark.parametrize(
    ("beta", "of_a", "of_b", "expected"),
    [
        (0.1, (0, 1, 2), (1, 2, 3), ([1, 2], [1, 2], True, "2")),  # not (0, 1), (1, 2), …
        # One seed in common would hide what seeds differ by.
        (0.1, (0, 1, 2), (2, 3, 4), ([0, 1, 2], [2, 3, 4], False, "3 − 3")),
        (None, (0, 1), (0,), ([0, 1], [0], False, "1 − 2")),
        (0.1, (0, 1), (), ([0, 1], [], False, "")),
    ],
)
def test_a_difference_is_paired_by_the_seeds_that_both_rows_have(beta, of_a, of_b, expected):
    """A failed run left no trace in the table."""
    a = index.TableRow({"label_smoothing": 0}, (), {}, {"toy": {seed: seed for seed in of_a}})
    b = index.TableRow({"label_smoothing": beta}, (), {}, {"toy": {seed: seed for seed in of_b}})
    assert tables.pair(a, b, "toy") == tables.Pairing(*expected)


def test_latex_compiles(project, tmp_path):
    model = "a_1 & 50 % {Übung} “C:\\x” [a]"
    results = index.read(project(lambda line: {**line, "model": model}))
    columns = tables.read_columns("accuracy,ece@vocabulary")
    made = tables.difference_table(results, columns).latex()
    assert r"a\_1 \& 50 \% \{Übung\}" in made
    if not shutil.which("xelatex"):
        pytest.skip("needs: apt-get install texlive-xetex")
    text = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{made}"
    (tmp_path / "t.tex").write_text(text + r"\end{document}")
    command = ["xelatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)


@pytest.fixture
def without_mass(project, tmp_path):
    """Results where the model before fine-tuning and one seed have no reading among all tokens.

    It is so after a temperature.
    """
    for row in index.read(project()).rows[:2]:
        path = row.evaluations_of("toy")[-1].path
        write_lines(path, [{**line, "letter_mass": None} for line in read_lines(path)])
    return index.read(tmp_path / "index.jsonl")


def test_a_table_leaves_out_what_has_no_reading_among_all_tokens(without_mass):
    table = tables.main_table(without_mass, tables.read_columns("ece@vocabulary")).markdown()
    _, *body = rows_of(table)
    assert [row[3] == "–" for row in body] == [True, True, False]


def test_figures_leave_out_what_has_no_reading_among_all_tokens(without_mass, tmp_path):
    made = figures.draw(without_mass, tmp_path / "out")
    text = {path.stem: path.read_text() for path, _ in made}
    assert text["reliability_toy_choices"].count("ECE 0.") == 3
    assert text["reliability_toy_vocabulary"].count("ECE 0.") == 1
    assert "ece-against-beta_toy" in text


def test_a_difference_is_to_beta_0_without_a_calibrator(project):
    def with_calibrator(line):
        return {**line, "calibrator": "temperature"} if line["seed"] else line

    results = index.read(project(with_calibrator))
    base, plain, _, plain_calibrated, smoothed_calibrated = results.rows
    assert results.reference(smoothed_calibrated) is plain
    assert results.reference(base) is plain
    assert results.reference(plain_calibrated) is plain
    assert results.reference(plain) is None


def test_curves_of_seeds_are_averaged(project):
    row = index.read(project()).rows[1]
    curves = [run.reliability["choices"] for run in row.evaluations_of("toy")]
    means = figures.mean_curves(row, "toy", "choices")
    assert means["count"].sum() == 600
    assert means["at"][0] == max(curve["at"][0] for curve in curves)
    expected = np.mean([np.interp(0.6, curve["at"], curve["smooth"]) for curve in curves])
    assert np.interp(0.6, means["at"], means["smooth"]) == pytest.approx(expected, abs=1e-3)
    assert (np.diff(means["isotonic"]) >= -1e-12).all()


def test_head_may_stop_reading(tmp_path):
    file = write_records(tmp_path / "r.jsonl", 20, 1.0, seed=0)
    line = f"env -u PYTHONUNBUFFERED '{sys.executable}' -m calibeval metrics '{file}' | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_collect_needs_no_model_library(project, tmp_path):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from calibeval.__main__ import main\n"
        f"assert main(['collect', {str(project())!r}, '--out', {str(tmp_path / 'o')!r}]) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_data_sets_have_figures_of_their_own(project, tmp_path):
    def renamed(line):
        return {**line, "dataset": ("toy 5", "toy_5")[line["seed"]]}

    made = figures.draw(index.read(project(renamed)), tmp_path / "out")
    paths = [path for path, _ in made]
    assert len(set(paths)) == len(paths) > 3


def test_a_table_may_be_over_subjects(project, tmp_path):
    path = project()
    for file in tmp_path.glob("toy-*.jsonl"):
        rows = read_lines(file)
        write_lines(file, [{**row, "subject": f"s{i % 12}"} for i, row in enumerate(rows)])
    for row in index.read(path, cluster="subject").rows:
        assert {run.cluster for run in row.evaluations_of("toy")} == {"subject"}


def test_a_printed_interval_shows_on_which_side_of_0_it_is():
    cell = tables.difference_cell(stats.Estimate(-0.0002, -0.00034, -0.00001), "rms_debiased")
    assert cell.interval == "[-0.34, -0.01]"
