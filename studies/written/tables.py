"""The tables of README.md, from the published records."""

from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

import calibeval
from calibeval.io import read_text, write_rows, write_text
from calibeval.measures import COMPARED_BY_SQUARE
from calibeval.measures.scaling import NoTemperature
from calibeval.report import index
from calibeval.report.index import Results
from calibeval.report.tables import Column, difference_table, printed
from studies.written.training import HERE, LEARNING_RATES, RECORDS

OUT = Path("runs/written/published")
PAGE = HERE / "README.md"
MADE = "<!-- made by python -m studies.written -->"
UNTIL_HERE = "<!-- until here -->"
TITLES = {
    "trivia_qa": "TriviaQA",
    "nq_open": "NQ-open",
    "mmlu": "MMLU",
    "truthfulqa_mc1": "TruthfulQA",
}
LIKELIHOODS = ("tokens", "sum")
CONFIDENCES = {
    "tokens": "mean likelihood",
    "sum": "whole likelihood",
    "p_true": "p(True)",
    "agreement": "agreement",
}
COLUMNS = {
    "accuracy": "accuracy",
    "ece": "ECE",
    "ece_signed": "confidence − accuracy",
    "auroc": "AUROC",
    "brier": "Brier",
    "accuracy_at_50": "accuracy of the surest half",
}
# A difference of ECE is told by that of the squared error, which has an interval.
(SQUARED_ERROR,) = COMPARED_BY_SQUARE
TOLD_BY = {"ece": SQUARED_ERROR}
CURES = {
    None: "",
    "temperature": "one temperature",
    "transformer": "head",
    "transformer, temperature": "head, then one temperature",
    "linear": "linear head",
}


def write_tables() -> None:
    """Write the tables of all models into README.md."""
    questions = pd.read_parquet(RECORDS / "questions.parquet")
    lines: list[str] = []
    for model in LEARNING_RATES:
        answers = pd.read_parquet(RECORDS / f"{model}.parquet")
        lines += tables_of(model, answers.merge(questions, on=["task", "question"]))
    before, _, rest = read_text(PAGE).partition(MADE)
    _, _, after = rest.partition(UNTIL_HERE)
    text = "\n".join([before + MADE, "", *lines, UNTIL_HERE + after])
    write_text(PAGE, text)


def tables_of(model: str, answers: pd.DataFrame) -> list[str]:
    """Return the lines of a model's two tables: of the answers that it writes, and of choices."""
    folder = OUT / model
    of_answers: list[dict[str, Any]] = []
    of_choices: list[dict[str, Any]] = []
    keys = ["label_smoothing", "seed", "calibrator", "task"]
    values: Any  # NaN where there is none
    for values, of_file in answers.groupby(keys, dropna=False, sort=False):
        *of_run, task = values
        beta, seed, calibrator = (None if pd.isna(value) else value for value in of_run)
        rows = records_of(model, of_file)
        about = {"label_smoothing": beta, "seed": seed, "model": model, "calibrator": calibrator}
        name = "-".join(str(value) for value in (beta, seed, calibrator, task))
        writes = rows[0].get("scoring") == "generate"
        entries = of_answers if writes else of_choices
        for confidence, words in CONFIDENCES.items() if writes else [("sum", "")]:
            if confidence not in LIKELIHOODS and (confidence not in rows[0] or calibrator):
                continue
            path = folder / f"{name}-{confidence}.jsonl"
            read_so = [{**row, "normalise": confidence} for row in rows]
            write_rows(path, read_so)
            dataset = f"{TITLES[task]} | {words}" if writes else TITLES[task]
            entries.append({**about, "dataset": dataset, "records": path.name})
            if calibrator in (None, "transformer") and confidence in LIKELIHOODS:
                halves = at_temperature(path.with_suffix(".temperature.jsonl"), read_so)
                if halves is not None:
                    cures = [cure for cure in (calibrator, "temperature") if cure]
                    entry = {"calibrator": ", ".join(cures), "records": halves.name}
                    entries.append({**entries[-1], **entry})
    heads = ("answers to", "confidence")
    return [
        f"## {model}: answers that it writes",
        "",
        *table(written_index(folder, "answers", of_answers), heads),
        "",
        f"## {model}: choices",
        "",
        *table(written_index(folder, "choices", of_choices), ("questions of",)),
        "",
    ]


def records_of(model: str, answers: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one run's records of a task, as they were scored but for the samples."""
    of_run = ["label_smoothing", "seed", "calibrator", "task", "question"]
    rows = []
    for row in answers.drop(columns=of_run).to_dict("records"):
        record: dict[str, Any] = {"model": model}
        for key, value in row.items():
            if hasattr(value, "tolist"):
                record[str(key)] = value.tolist()
            elif key in ("label", "shots"):
                record[str(key)] = int(value)
            elif not pd.isna(value):
                record[str(key)] = value
        rows.append(record)
    return rows


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write records, and return where."""
    write_rows(path, rows)
    return path


def at_temperature(path: Path, rows: list[dict[str, Any]]) -> Path | None:
    """Write the records at a temperature: each half's is fitted on the other half.

    None where there is none, as of answers that are all wrong.
    """
    scaled: list[dict[str, Any]] = []
    for half in (0, 1):
        fit_on = written(path.with_suffix(f".{1 - half}"), rows[1 - half :: 2])
        test = written(path.with_suffix(f".{half}"), rows[half::2])
        out = path.with_suffix(".half")
        out.unlink(missing_ok=True)
        try:
            calibeval.temperature(fit_on, test, out)
        except NoTemperature:
            return None
        scaled += (row for _, row in calibeval.io.json_lines(out))
    return written(path, scaled)


def written_index(folder: Path, name: str, entries: list[dict[str, Any]]) -> Results:
    """Write an index of record files, and read it."""
    path = folder / f"{name}.jsonl"
    write_rows(path, entries)
    return index.read(path, metrics=[*COLUMNS, SQUARED_ERROR])


def table(results: Results, heads: tuple[str, ...]) -> list[str]:
    """Return a table's lines: a line a data set and row, bold where it differs from β = 0."""
    chosen = [Column(metric) for metric in COLUMNS]
    lines = [f"| {' | '.join((*heads, 'β', 'and then', *COLUMNS.values()))} |"]
    lines.append("|---" * (len(heads) + 2 + len(COLUMNS)) + "|")
    differences = difference_table(results, chosen)
    assert differences is not None  # every model was trained at β = 0
    bold = {}
    for line in differences.lines:
        places = product(differences.data_sets, differences.heads)
        for (data_set, head), cell in zip(places, line.cells, strict=True):
            bold[id(line.row), data_set, head] = cell.bold
    for data_set, row in product(results.data_sets, results.rows):
        if not row.evaluations_of(data_set):
            continue
        cells = [data_set, row.text("label_smoothing"), CURES[row.setting.get("calibrator")]]
        for metric in COLUMNS:
            told_by = Column(TOLD_BY.get(metric, metric)).difference_heading
            value = printed(row.estimate(data_set, metric)).value
            is_bold = bold.get((id(row), data_set, told_by), False)
            cells.append(f"**{value}**" if is_bold else value)
        lines.append(f"| {' | '.join(cells)} |")
    note = (
        "Bold: differs from β = 0 without a temperature, after Holm's correction for all "
        "comparisons of this table."
    )
    return [*lines, "", f"*{note}*"]
