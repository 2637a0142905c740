"""From an index to rows, tables, figures and the page."""

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as tree

import numpy as np
import pytest
from made_records import read_lines, write_lines, write_records
from matplotlib.image import imread

from calibeval import figures, index, report, stats
from calibeval.io import InputError

GRID = [  # (records, β, seed, sharpness): a model before fine-tuning and two β, two seeds each
    ("base", None, 0, 1.0),
    *(
        (f"b{beta:g}-{seed}", beta, seed, 3 - 15 * beta + seed)
        for beta in (0, 0.1)
        for seed in (0, 1)
    ),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two data sets' records with their figures kept, and the lines of their index."""
    folder, lines = tmp_path_factory.mktemp("made"), []
    for place, dataset in enumerate(("toy", "other")):
        for name, beta, seed, sharpness in GRID:
            records = f"{dataset}-{name}.jsonl"
            write_records(folder / records, 300 + place, sharpness, place)
            stats.load(folder / records)
            line = {"records": records, "dataset": dataset, "model": "m_1", "seed": seed}
            lines.append(line | {"label_smoothing": beta})
    return folder, lines


@pytest.fixture
def project(made, tmp_path):
    """project(change, dataset="toy") → an index of copies, each line as `change` returns it."""
    folder, lines = made
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)

    def write(change=lambda line: line, datasets=("toy",)):
        kept = [change(dict(line)) for line in lines if line["dataset"] in datasets]
        return write_lines(tmp_path / "index.jsonl", filter(None, kept))

    return write


def settings(results) -> list[tuple]:
    """What each row shows of itself, and its seeds."""
    return [(*map(row.text, results.shown), *map(list, row.runs.values())) for row in results.rows]


def seeds(row) -> list[stats.Run]:
    """A row's runs."""
    return [*row.runs["toy"].values()]


def test_seeds_are_a_row_and_training_data_are_rows(project):
    assert settings(index.read(project())) == [
        ("m_1", "base", [0]),
        ("m_1", "0", [0, 1]),
        ("m_1", "0.1", [0, 1]),
    ]

    def by_data(line):
        data = None if line["label_smoothing"] is None else f"sets/{'ab'[line['seed']]}.jsonl"
        return line | {"train_data": data}

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
    value = {"name": "run"}.get(key, 1)
    results = index.read(project(lambda line: line | {key: value * (line["seed"] + 1)}))
    assert results.shown == ("model", "label_smoothing", key)
    assert len(results.rows) == len(GRID)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"label_smoothing": ...}, "index.jsonl, line 1: no 'label_smoothing'"),
        ({"seed": 1}, "toy-b0-0.jsonl and .*toy-b0-1.jsonl: both are toy, .* with seeds 1 and 1"),
        ({"seed": {0: None, 1: 1}}, "with seeds None and 1; .* seed, train_data"),
        ({"dataset": "toy"}, "toy-base.* and .*other-base.*300 and 301 questions"),
        ({"note": [1]}, r"line 1: note is \[1\]: expected a valid"),
        ({"model": " "}, "line 1: model is ' ': "),
    ],
)
def test_an_index_that_cannot_be_averaged_is_refused(project, tmp_path, refused, change, expected):
    def changed(line):
        for key, value in change.items():
            value = value.get(line["seed"], line[key]) if isinstance(value, dict) else value
            line[key] = value
        return {key: value for key, value in line.items() if value is not ...}

    path, out = project(changed, ("toy", "other")), tmp_path / "out"
    assert re.search(expected, refused("collect", path, "--out", out)) and not out.exists()


def rows_of(text: str) -> list[list[str]]:
    """The cells of a Markdown table's lines."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and "| --- |" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_table_over_data_sets(project, tmp_path, run):
    out, path = tmp_path / "out", project(datasets=("toy", "other"))
    write_records(tmp_path / "other-b0-1.jsonl", 301, 2.0, 1, mass=0.4)
    shown = run("collect", path, "--out", out).out
    text = (out / "table.md").read_text()
    assert shown == text + "\n" + (out / "differences.md").read_text()
    head, *body = rows_of(text)
    assert head[:3] == ["Model", "β", "Seeds"]
    assert head[3:6] == ["toy: Acc ↑", "toy: ECE ↓", "toy: RMS ↓"] and head[-1] == "other: RMS ↓"
    assert [row[1:3] for row in body] == [["base", "1"], ["0", "2"], ["0.1", "2"]]
    results = index.read(tmp_path / "index.jsonl")
    plain = results.rows[1]
    found = plain.estimate("toy", "accuracy")
    assert f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]" in body[1][3]
    assert "†" in body[0][4] and "†" not in body[1][4]  # the base model says what it knows
    assert "† ECE consistent with calibration" in text
    assert "other: letters hold as little as 0.400 of the probability, so read with care." in text


def test_columns():
    chosen = report.read_columns("nll, ece_signed,ece@vocabulary,auroc,nll")
    assert [c.heading for c in chosen] == ["NLL ↓", "signed ECE", "ECE, all tokens ↓", "AUROC ↑"]
    for wrong in ("eec", "ece@letters"):
        with pytest.raises(InputError, match=f"--columns: no {wrong!r}; expected accuracy"):
            report.read_columns(f"nll,{wrong}")


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((-0.0009, -0.0001), "[-0.9, -0.1]"),
        ((-0.00034, -0.00001), "[-0.34, -0.01]"),
        ((-0.00034, 0.00001), "[-0.3, +0.0]"),
    ],
)
def test_a_printed_interval_agrees_with_its_mark(ends, said):
    cell = report.difference_cell(stats.Estimate(sum(ends) / 2, *ends), "rms_debiased")
    assert cell.interval == said and cell.bold == ("+" not in said)


def test_texts_by_length_say_whose_calibration_it_is(project, tmp_path):
    path = project(datasets=("toy", "other"))
    for file in tmp_path.glob("other-*.jsonl"):
        more = {"scoring": "continuation", "normalise": "characters", "characters": [3, 4, 5, 6]}
        write_lines(file, [row | more for row in read_lines(file)])
    notes = report.main_table(index.read(path), report.read_columns("accuracy,ece")).notes
    assert any("other: texts are compared by log-probability by characters" in n for n in notes)


@pytest.mark.parametrize(
    ("beta", "of_a", "of_b", "expected"),
    [
        (0.1, (0, 1), (0, 1), ((0, 1), (0, 1), True, "2")),
        (0.1, (0, 1, 2), (1, 2, 3), ((1, 2), (1, 2), True, "2")),  # not (0, 1), (1, 2), …
        # One seed in common would hide what seeds differ by.
        (0.1, (0, 1, 2), (2, 3, 4), ((0, 1, 2), (2, 3, 4), False, "3 − 3")),
        (0.1, (0,), (3,), ((0,), (3,), True, "1")),
        (None, (0, 1), (0,), ((0, 1), (0,), False, "1 − 2")),
        (0.1, (0, 1), (), ((0, 1), (), False, "")),
    ],
)
def test_a_difference_is_paired_by_the_seeds_that_both_rows_have(beta, of_a, of_b, expected):
    """A failed run left no trace in the table."""
    a, b = (
        index.Row({"label_smoothing": beta}, (), {}, {"toy": {seed: seed for seed in seeds}})
        for beta, seeds in ((0, of_a), (beta, of_b))
    )
    one, other, paired, said = report.compared(a, b, "toy")
    assert (tuple(one), tuple(other), paired, said) == expected


def test_differences_are_those_of_the_runs(project):
    results = index.read(project())
    base, plain, smoothed = map(seeds, results.rows)
    table = report.difference_table(results, report.read_columns("accuracy,ece"))
    assert table.keys == ["Model", "β", "Seeds"]
    assert table.heads == ["Acc ↑", "NLL ↓", "MSCE × 1000 ↓"]
    assert [line.keys[1:] for line in table.lines] == [["base", "1 − 2"], ["0.1", "2"]]
    for line, of, paired in zip(table.lines, (base, smoothed), (False, True), strict=True):
        _, nll, msce = line.cells
        found = stats.difference(plain, of, "nll", "choices", paired)
        assert nll.value == f"{found.value:+.3f}" and nll.bold == found.told_apart
        assert nll.interval == f"[{found.low:+.3f}, {found.high:+.3f}]"
        found = stats.difference(plain, of, "rms_debiased", "choices", paired)
        assert msce.interval == f"[{1000 * found.low:+.1f}, {1000 * found.high:+.1f}]"
    assert not nll.bold  # seeds that differ so much tell nothing apart


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (({}, {"shots": 5}), ({}, {"shots": 0}), "shots 5 and 0"),
        (({"prompt_sha256": "a"}, {}), ({"prompt_sha256": "b"}, {}), "prompts '"),
        (({}, {}), ({"scoring": "continuation"}, {}), "scoring 'letters' and 'continuation'"),
    ],
)
def test_what_was_asked_otherwise_is_not_compared(project, tmp_path, run, refused, a, b, expected):
    """Letters beside texts, 5 examples beside none, other words under the same ids: the difference
    would be the prompt's. Of another model examples may be dropped, to fit."""
    names = ["toy-b0-0.jsonl", "toy-b0.1-0.jsonl"]
    path = project(lambda line: line if line["records"] in names else None)
    files = [tmp_path / name for name in names]
    for file, (more, settings) in zip(files, (a, b), strict=True):
        write_lines(file, [row | more for row in read_lines(file)])
        file.with_name(f"{file.name}.meta.json").write_text(json.dumps({"settings": settings}))
    err = refused("collect", path, "--out", tmp_path / "out")
    assert f"{files[0]} and {files[1]}: " in err and f"asked with {expected}" in err
    assert "another 'dataset' in the index" in err
    assert "--different-prompts" in refused("compare", *files)
    run("compare", "--different-prompts", *files)
    path.write_text(path.read_text().replace('"m_1"', '"m_2"', 1))
    if "prompts" in expected:
        index.read(path)
    else:
        refused("collect", path, "--out", tmp_path / "out")


def test_latex_compiles(project, tmp_path):
    results = index.read(project(lambda line: line | {"model": "a_1 & 50 % {Übung} “C:\\x” [a]"}))
    made = report.difference_table(results, report.read_columns("accuracy,ece@vocabulary")).latex()
    assert r"a\_1 \& 50 \% \{Übung\}" in made and r"\toprule" in made and "**" not in made
    if not shutil.which("xelatex"):
        pytest.skip("needs: apt-get install texlive-xetex")
    text = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{made}"
    (tmp_path / "t.tex").write_text(text + r"\end{document}")
    command = ["xelatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)


def test_figures(project, tmp_path):
    results = index.read(project(lambda line: line | {"model": "ab"[line["seed"]]}))
    drawn = figures.draw(results, tmp_path / "out")
    assert {path.name for path, _ in drawn} == {
        "ece-against-beta_toy.svg",
        *(f"reliability_toy_{c}.svg" for c in ("choices", "vocabulary")),
    }
    for path, caption in drawn:
        svg = tree.fromstring(path.read_text())
        width = float(svg.get("width").removesuffix("pt")) / 72 * 2.54
        assert width == pytest.approx(figures.WIDTH, abs=0.01)
        pixels = imread(path.with_suffix(".png"))[:, :, :3]
        assert (pixels[:, -pixels.shape[1] // 5 :] < 1).any(), "laid out for another resolution"
        assert caption.endswith(".")
    before = {p: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    figures.draw(results, tmp_path / "out")
    assert {p: p.read_bytes() for p in before} == before


def test_data_sets_have_figures_of_their_own(project, tmp_path):
    results = index.read(project(lambda line: line | {"dataset": ("toy 5", "toy_5")[line["seed"]]}))
    drawn = [path for path, _ in figures.draw(results, tmp_path / "out")]
    assert len({*drawn}) == len(drawn) > 3


def test_what_has_no_reading_among_all_tokens_stays_out_of_its_figures(project, tmp_path):
    """As after a temperature, of the model before fine-tuning and of one seed."""
    results = index.read(project())
    for run in (seeds(row)[-1] for row in results.rows[:2]):
        write_lines(run.path, [row | {"letter_mass": None} for row in read_lines(run.path)])
    results = index.read(tmp_path / "index.jsonl")
    table = report.main_table(results, report.read_columns("ece@vocabulary")).markdown()
    assert [row[3] == "–" for row in rows_of(table)[1:]] == [True, True, False]
    drawn = figures.draw(results, tmp_path / "out")
    text = {path.stem: path.read_text() for path, _ in drawn}
    titles = [text[f"reliability_toy_{c}"].count("ECE 0.") for c in ("choices", "vocabulary")]
    assert titles == [3, 1] and "ece-against-beta_toy" in text


def test_a_difference_is_to_beta_0_without_a_calibrator(project):
    results = index.read(
        project(lambda x: x | ({"calibrator": "temperature"} if x["seed"] else {}))
    )
    base, plain, _, plain_too, smoothed_too = results.rows
    assert results.reference(smoothed_too) is plain and results.reference(base) is plain
    assert results.reference(plain_too) is plain and results.reference(plain) is None
    assert figures.colour(0.1) != figures.colour(0.0) != figures.colour(None)


def test_curves_of_seeds_are_averaged(project):
    row = index.read(project()).rows[1]
    runs = [run.reliability["choices"] for run in seeds(row)]
    found = figures.mean_curves(row, "toy", "choices")
    assert found["count"].sum() == 600
    assert found["at"][0] == max(run["at"][0] for run in runs)
    expected = np.mean([np.interp(0.6, run["at"], run["smooth"]) for run in runs])
    assert np.interp(0.6, found["at"], found["smooth"]) == pytest.approx(expected, abs=1e-3)
    assert (np.diff(found["isotonic"]) >= -1e-12).all()


def test_the_page_opens_without_a_network_and_by_keyboard(project, tmp_path):
    report.collect(project(), tmp_path / "out", title="A < B", sections=["<h2>Runs</h2>"])
    page = (tmp_path / "out" / "report.html").read_text()
    parts = ("Differences", "Accuracy and calibration", "Figures", "<h2>Runs</h2>")
    order = [page.index(part) for part in parts]
    assert order == sorted(order)
    assert "<title>A &lt; B</title>" in page
    links = re.findall(r'\b(?:src|href)="([^"]*)', page)
    assert links and all(link.startswith("data:image/svg+xml;base64,") for link in links)
    assert page.count("<main>") == 1 and page.count("<caption>") == 2
    heads = re.findall(r"<th[ >][^>]*", page.partition("<figure>")[0])
    assert heads and all(' scope="' in head for head in heads)
    boxes = re.findall(r'<div class="box[^>]*', page)
    assert boxes and all(re.search(' tabindex="0" aria-label="[^"]', box) for box in boxes)


def test_head_may_stop_reading(tmp_path):
    write_records(file := tmp_path / "r.jsonl", 20, 1.0, seed=0)
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
