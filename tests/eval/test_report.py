"""From an index to rows, tables, figures and the page."""

import csv
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from made_records import read_lines, write_lines, write_records

from calibeval.io import InputError
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


@pytest.mark.parametrize("key", ["epochs", "learning_rate", "weight_decay", "name"])
def test_any_key_that_varies_is_a_column(project, key):
    value = "run" if key == "name" else 1
    results = index.read(project(lambda line: {**line, key: value * (line["seed"] + 1)}))
    assert results.shown == ("model", "label_smoothing", key)
    assert len(results.rows) == len(GRID)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"label_smoothing": ...}, "index.jsonl, line 1: no 'label_smoothing'"),
        ({"seed": 1}, "toy-b0-0.jsonl and .*toy-b0-1.jsonl: both are toy, .* with seeds 1 and 1"),
        ({"seed": {0: None, 1: 1}}, "with seeds None and 1; .* seed, train_data"),
        ({"dataset": "toy"}, "toy-base.* and .*other-base.*300 and 301 questions"),
        ({"note": [1]}, r"line 1: note is \[1\]: expected true or false or a whole"),
        ({"model": " "}, "line 1: model is ' ': "),
        ({"metric": "m"}, "line 1: 'metric' is a column of figures .* such as 'train_metric'"),
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


def test_half_a_surrogate_pair_in_an_index_is_refused(tmp_path, refused):
    line = {"records": "a.jsonl", "dataset": "d", "model": "m", "label_smoothing": 0}
    path = tmp_path / "index.jsonl"
    path.write_text(json.dumps({**line, "note": "\ud800"}))
    message = refused("collect", path, "--out", tmp_path / "out")
    assert r"line 1: note is '\ud800': half of a surrogate pair is no text" in message


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of a Markdown table's lines."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and "| --- |" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture
def two_tables(project, tmp_path, run):
    """What `collect` printed of two data sets, of which one has a run with little letter mass."""
    path = project(datasets=("toy", "other"))
    write_records(tmp_path / "other-b0-1.jsonl", 301, 2.0, 1, mass=0.4)
    return run("collect", path, "--out", tmp_path / "out").out


def test_a_table_has_a_row_a_setting_and_columns_a_data_set(two_tables, tmp_path):
    text = (tmp_path / "out" / "table.md").read_text()
    head, *body = rows_of(text)
    assert head[:3] == ["Model", "β", "Seeds"]
    assert head[3:6] == ["toy: Acc ↑", "toy: ECE ↓", "toy: RMS ↓"]
    assert head[-1] == "other: RMS ↓"
    assert [row[1:3] for row in body] == [["base", "1"], ["0", "2"], ["0.1", "2"]]
    plain = index.read(tmp_path / "index.jsonl").rows[1]
    found = plain.estimate("toy", "accuracy")
    assert f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]" in body[1][3]


def test_a_table_marks_what_is_consistent_with_calibration(two_tables):
    _, base, plain, *_ = rows_of(two_tables)
    assert "†" in base[4]  # the base model says what it knows
    assert "†" not in plain[4]
    assert "† ECE consistent with calibration" in two_tables


def test_a_table_warns_of_little_letter_mass(two_tables):
    warning = "other: letters hold as little as 0.400 of the probability, so read with care."
    assert warning in two_tables


def test_columns_are_read_from_text():
    chosen = tables.read_columns("nll, ece_signed,ece@vocabulary,auroc,nll")
    headings = [column.heading for column in chosen]
    assert headings == ["NLL ↓", "signed ECE", "ECE, all tokens ↓", "AUROC ↑"]


@pytest.mark.parametrize("wrong", ["eec", "ece@letters"])
def test_unknown_columns_are_refused(wrong):
    with pytest.raises(InputError, match=f"--columns: no {wrong!r}; expected accuracy"):
        tables.read_columns(f"nll,{wrong}")


@pytest.mark.parametrize(
    ("ends", "interval"),
    [
        ((-0.0009, -0.0001), "[-0.9, -0.1]"),
        ((-0.00034, -0.00001), "[-0.34, -0.01]"),
        ((-0.00034, 0.00001), "[-0.3, +0.0]"),
    ],
)
def test_a_printed_interval_shows_on_which_side_of_0_it_is(ends, interval):
    cell = tables.difference_cell(stats.Estimate(sum(ends) / 2, *ends), "rms_debiased")
    assert cell.interval == interval


def test_bold_is_what_survives_among_all_comparisons(project, tmp_path):
    """Each cell by itself was bold: of twelve pairs of equals some one in eight tables of ten."""
    results = index.read(project(datasets=("toy", "other")))
    columns = tables.read_columns("accuracy,brier,auroc,ece@vocabulary")
    table = tables.difference_table(results, columns)
    cells = [cell for line in table.lines for cell in line.cells]
    p_values = []
    for line in table.lines:
        base = results.reference(line.row)
        for group in results.data_sets:
            pairing = tables.pair(base, line.row, group)
            for column in tables._difference_columns(columns):
                p_values.append(pairing.difference(column).p_no_difference)
    assert [cell.bold for cell in cells] == stats.holm(p_values)
    assert sum(p is not None and p < 0.05 for p in p_values) >= sum(cell.bold for cell in cells) > 0
    assert f"for the {len(p_values)} comparisons of this table" in table.markdown()


NAMES = [
    r"$\nosuch$",
    r"price $\frac{1$ and $5",
    "pipe | and\nline",
    "<script>alert(1)</script>",
    "=HYPERLINK(1)",
    "@SUM(1+1)",
    "-2+3",
    "n" * 300,
]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_makes_whole_tables(project, tmp_path, run, name):
    """Of a data set and of a model: formulas of figures, tables and spreadsheets, HTML, breaks."""
    keep = ("toy-b0-0.jsonl", "toy-b0.1-0.jsonl")

    def renamed(line):
        return {**line, "dataset": name, "model": name} if line["records"] in keep else None

    out = tmp_path / "out"
    run("collect", project(renamed), "--out", out)
    assert (out / "report.html").is_file()
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


def test_collect_reads_the_index_once(project, tmp_path, run, monkeypatch):
    """With --json it was read, and all its files checked, a second time."""
    reads = []

    def read(path, *options):
        reads.append(path)
        return original(path, *options)

    original = index.read
    monkeypatch.setattr(index, "read", read)
    printed = run("collect", project(), "--out", tmp_path / "out", "--json").out
    assert len(reads) == 1
    heading, *rows = (tmp_path / "out" / "table.csv").read_text().splitlines()
    assert "floor_95" in heading
    # A key of the index could have another column's name (`Entry` refuses those that are listed).
    made_columns = {*heading.split(","), "floor"} - {"dataset", *read_lines(project())[0]}
    assert made_columns == set(index.RESERVED_COLUMNS)
    assert len(printed.splitlines()) == len(rows) > 0


def with_subjects(path, count):
    """Give a file's questions so many subjects, a share of each."""
    rows = read_lines(path)
    write_lines(path, [{**row, "subject": f"s{i % count}"} for i, row in enumerate(rows)])


def test_tables_say_what_was_resampled(project, tmp_path, run):
    path = project(datasets=("toy", "other"))
    for file in tmp_path.glob("toy-*.jsonl"):
        with_subjects(file, 12)
    for name, options, expected in (
        ("questions", [], "toy: intervals over resamples of the questions: they hold for these 12"),
        ("subjects", ["--cluster", "subject"], "toy: intervals over resamples of all 12 subjects"),
    ):
        run("collect", path, "--out", tmp_path / name, *options)
        for table in ("table.md", "differences.md", "report.html"):
            text = (tmp_path / name / table).read_text()
            assert expected in text
            assert "other: intervals" not in text  # one subject
        resampled = "questions" if name == "questions" else "questions or subjects"
        notes = (tmp_path / name / "table.md").read_text()
        assert f"95 % interval over {resampled} and seeds" in notes
        differences = (tmp_path / name / "differences.md").read_text()
        assert f"same resamples of the {resampled} for both" in differences
    both = [(tmp_path / name / "table.csv").read_text() for name in ("questions", "subjects")]
    assert both[0] != both[1]


def test_a_metric_without_a_better_direction_is_not_compared(project):
    """`compare` leaves the signed ECE out of Holm's family, and the table counted it."""
    results = index.read(project())
    without = tables.difference_table(results, tables.read_columns("accuracy"))
    table = tables.difference_table(results, tables.read_columns("accuracy,ece_signed"))
    (place,) = [i for i, head in enumerate(table.heads) if head.startswith("signed ECE")]
    assert not any(line.cells[place].bold for line in table.lines)
    assert any(line.cells[place].interval for line in table.lines)
    (family,) = [note for note in without.notes if note.startswith("Bold: ")]
    assert family in table.notes


@pytest.mark.parametrize(
    ("beta", "of_a", "of_b", "expected"),
    [
        (0.1, (0, 1), (0, 1), ([0, 1], [0, 1], True, "2")),
        (0.1, (0, 1, 2), (1, 2, 3), ([1, 2], [1, 2], True, "2")),  # not (0, 1), (1, 2), …
        # One seed in common would hide what seeds differ by.
        (0.1, (0, 1, 2), (2, 3, 4), ([0, 1, 2], [2, 3, 4], False, "3 − 3")),
        (0.1, (0,), (3,), ([0], [3], True, "1")),
        (None, (0, 1), (0,), ([0, 1], [0], False, "1 − 2")),
        (0.1, (0, 1), (), ([0, 1], [], False, "")),
    ],
)
def test_a_difference_is_paired_by_the_seeds_that_both_rows_have(beta, of_a, of_b, expected):
    """A failed run left no trace in the table."""
    a = index.TableRow({"label_smoothing": 0}, (), {}, {"toy": {seed: seed for seed in of_a}})
    b = index.TableRow({"label_smoothing": beta}, (), {}, {"toy": {seed: seed for seed in of_b}})
    assert tables.pair(a, b, "toy") == tables.Pairing(*expected)


@pytest.fixture
def differences(project):
    """The index's results and their table of differences."""
    results = index.read(project())
    table = tables.difference_table(results, tables.read_columns("accuracy,ece"))
    return results, table


def test_differences_have_their_columns(differences):
    _, table = differences
    assert table.shown == ("model", "label_smoothing")
    assert table.heads == ["Acc ↑", "NLL ↓", "MSCE × 1000 ↓"]
    assert [line.row.text("label_smoothing") for line in table.lines] == ["base", "0.1"]
    assert [line.seeds for line in table.lines] == ["1 − 2", "2"]


@pytest.mark.parametrize(("place", "paired"), [(0, False), (1, True)])
def test_differences_are_those_of_the_runs(differences, place, paired):
    results, table = differences
    base, plain, smoothed = (row.evaluations_of("toy") for row in results.rows)
    other = (base, smoothed)[place]
    _, nll, msce = table.lines[place].cells
    found = stats.difference(plain, other, "nll", "choices", paired)
    assert nll.value == f"{found.value:+.3f}"
    assert nll.bold == found.significant
    assert nll.interval == f"[{found.low:+.3f}, {found.high:+.3f}]"
    found = stats.difference(plain, other, "rms_debiased", "choices", paired)
    assert msce.interval == f"[{1000 * found.low:+.1f}, {1000 * found.high:+.1f}]"


def test_latex_keeps_the_asterisks_of_a_name(project):
    """Whatever looked like Markdown's bold was taken out, in labels too."""
    results = index.read(project(lambda line: {**line, "model": "a**b"}))
    assert "a**b" in tables.main_table(results, tables.read_columns("accuracy")).latex()


def test_latex_compiles(project, tmp_path):
    model = "a_1 & 50 % {Übung} “C:\\x” [a]"
    results = index.read(project(lambda line: {**line, "model": model}))
    columns = tables.read_columns("accuracy,ece@vocabulary")
    made = tables.difference_table(results, columns).latex()
    assert r"a\_1 \& 50 \% \{Übung\}" in made
    assert r"\toprule" in made
    assert "**" not in made
    if not shutil.which("xelatex"):
        pytest.skip("needs: apt-get install texlive-xetex")
    text = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{made}"
    (tmp_path / "t.tex").write_text(text + r"\end{document}")
    command = ["xelatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)


@pytest.fixture
def drawn(project, tmp_path):
    """The results of an index with two models, and each figure of theirs with its caption."""
    results = index.read(project(lambda line: {**line, "model": "ab"[line["seed"]]}))
    return results, figures.draw(results, tmp_path / "out")


def test_figures_are_drawn_for_what_there_is(drawn):
    _, made = drawn
    assert {path.name for path, _ in made} == {
        "ece-against-beta_toy.svg",
        "reliability_toy_choices.svg",
        "reliability_toy_vocabulary.svg",
    }
    assert all(caption.endswith(".") for _, caption in made)


def test_figures_are_the_same_every_time(drawn, tmp_path):
    results, _ = drawn
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    figures.draw(results, tmp_path / "out")
    assert {path: path.read_bytes() for path in before} == before


def test_data_sets_have_figures_of_their_own(project, tmp_path):
    def renamed(line):
        return {**line, "dataset": ("toy 5", "toy_5")[line["seed"]]}

    made = figures.draw(index.read(project(renamed)), tmp_path / "out")
    paths = [path for path, _ in made]
    assert len(set(paths)) == len(paths) > 3


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


@pytest.fixture
def page(project, tmp_path):
    """The text of a page with tables, figures and a section of its own."""
    tables.collect(project(), tmp_path / "out", title="A < B", sections=["<h2>Runs</h2>"])
    return (tmp_path / "out" / "report.html").read_text()


def test_the_page_has_its_parts_in_their_order(page):
    parts = ("Differences", "Accuracy and calibration", "Figures", "<h2>Runs</h2>")
    order = [page.index(part) for part in parts]
    assert order == sorted(order)
    assert "<title>A &lt; B</title>" in page
    assert page.count("<main>") == 1
    assert page.count("<caption>") == 2


def test_the_page_opens_without_a_network(page):
    links = re.findall(r'\b(?:src|href)="([^"]*)', page)
    assert links
    assert all(link.startswith("data:image/svg+xml;base64,") for link in links)


def test_the_page_is_read_by_keyboard_and_screen_reader(page):
    heads = re.findall(r"<th[ >][^>]*", page.partition("<figure>")[0])
    assert heads
    assert all(' scope="' in head for head in heads)
    boxes = re.findall(r'<div class="box[^>]*', page)
    assert boxes
    assert all(re.search(' tabindex="0" aria-label="[^"]', box) for box in boxes)


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
