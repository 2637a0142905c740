"""Every figure and every verdict on the page of claims is what the published records say.

A figure that is changed on the page, or that has changed in the records, fails here. The rows of
tables are compared cell by cell; of a sentence, all numbers in their order. The records cannot tell
how many validation questions MMLU has (1,531), nor how long runs took and on which machines.
"""

import re
import subprocess
import sys
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Literal

import pandas as pd
import pytest
from studies.claims import answers, contrasts, derived, parts, quick_evaluation, report, summary
from studies.claims.contrasts import Contrast, Quantity
from studies.claims.parts import PUBLISHED, Study

from calibeval.measures import evaluations
from sweeps.runs.files import read_rows

# The first test that asks for a model's records unpacks and measures all of them.
pytestmark = pytest.mark.timeout(900)

LARGE = "qwen2.5-coder-1.5b"
SMALL = "qwen2.5-coder-0.5b"
SMOLLM2 = "smollm2-135m"
GEMMA = "gemma-3-270m"
LABELS = {
    "Qwen2.5-Coder 1.5B": LARGE,
    "Qwen2.5-Coder 0.5B": SMALL,
    "SmolLM2 135M": SMOLLM2,
    "Gemma 3 270M": GEMMA,
}
MODELS_OF_THE_PAGE = list(LABELS.values())  # in the order of its tables
AMONG = ("choices", "vocabulary")
ARC = "arc-letters"
HELLASWAG = "hellaswag-letters"
CONTRAST = {contrast.name: contrast for contrast in contrasts.CONTRASTS}


class Claim(Enum):
    """What a row of the table of claims says of a difference."""

    HARMS = "the error grows"
    IMPROVES = "the error falls"
    CHANGES = "the error is another one"
    AS_WELL = "the error is no larger"


# The rows of the table of claims, in its order: the contrast, the claim, and the model or task
# where it is not the 1.5B's or not MMLU.
CLAIMS = [
    ("β = 0 less base", Claim.HARMS, LARGE, "mmlu"),
    ("β = 0 less base", Claim.HARMS, SMALL, "mmlu"),
    ("β = 0 less base", Claim.HARMS, SMALL, ARC),
    ("two epochs less base", Claim.HARMS, LARGE, "mmlu"),
    ("over-trained less base", Claim.HARMS, LARGE, "mmlu"),
    ("recommended: β = 0.1 less 0", Claim.IMPROVES, LARGE, "mmlu"),
    ("recommended: β = 0.1 less 0", Claim.IMPROVES, LARGE, ARC),
    ("recommended: β = 0.1 less 0", Claim.IMPROVES, LARGE, HELLASWAG),
    ("recommended: β = 0.1 less 0", Claim.IMPROVES, SMALL, "mmlu"),
    ("recommended: β = 0.2 less 0", Claim.IMPROVES, LARGE, "mmlu"),
    ("over-trained: β = 0.1 less 0", Claim.IMPROVES, LARGE, "mmlu"),
    ("over-trained: β = 0.1 less 0", Claim.IMPROVES, LARGE, ARC),
    ("over-trained: β = 0.1 less 0", Claim.IMPROVES, SMALL, "mmlu"),
    ("over-trained: β = 0.3 less 0", Claim.IMPROVES, LARGE, "mmlu"),
    ("over-trained: β = 0.3 less 0", Claim.IMPROVES, LARGE, ARC),
    ("over-trained: β = 0.3 less 0", Claim.IMPROVES, LARGE, HELLASWAG),
    ("over-trained: β = 0.5 less 0", Claim.IMPROVES, LARGE, "mmlu"),
    ("– less that of `recommended`, sum, clipped", Claim.CHANGES, LARGE, "mmlu"),
    ("open-instruct's script: 0.1 less 0", Claim.IMPROVES, LARGE, "mmlu"),
    ("equal held-out loss: 0.1 less 0", Claim.IMPROVES, LARGE, "mmlu"),
    ("temperature after β = 0, less β = 0", Claim.IMPROVES, LARGE, "mmlu"),
    ("temperature after β = 0, less β = 0", Claim.IMPROVES, LARGE, ARC),
    ("temperature after β = 0, less β = 0", Claim.IMPROVES, LARGE, HELLASWAG),
    ("temperature after β = 0, less β = 0.1", Claim.IMPROVES, LARGE, "mmlu"),
    ("temperature after β = 0, less β = 0.1", Claim.IMPROVES, LARGE, ARC),
    ("temperature after β = 0, less β = 0.1", Claim.IMPROVES, LARGE, HELLASWAG),
    ("over-trained: temperature after β = 0, less β = 0", Claim.IMPROVES, LARGE, "mmlu"),
    ("over-trained: temperature after β = 0, less β = 0", Claim.IMPROVES, LARGE, ARC),
    ("over-trained: temperature after β = 0, less β = 0", Claim.IMPROVES, LARGE, HELLASWAG),
    ("over-trained: temperature after β = 0, less β = 0.5", Claim.IMPROVES, LARGE, "mmlu"),
    ("DACA's temperature after β = 0, less β = 0", Claim.IMPROVES, LARGE, "mmlu"),
    ("DACA's temperature after β = 0, less β = 0", Claim.IMPROVES, LARGE, ARC),
    ("DACA's temperature after β = 0, less β = 0", Claim.IMPROVES, LARGE, HELLASWAG),
    ("DACA's temperature (of the test) less one of val", Claim.AS_WELL, LARGE, "mmlu"),
    ("half the conversations, less β = 0.1", Claim.AS_WELL, LARGE, "mmlu"),
    ("averaged with base, less β = 0.1", Claim.AS_WELL, LARGE, "mmlu"),
    ("unigram less uniform, β = 0.1", Claim.IMPROVES, LARGE, "mmlu"),
    ("base mean less uniform, β = 0.1", Claim.IMPROVES, LARGE, "mmlu"),
    ("filtered less exact, β = 0.1", Claim.AS_WELL, LARGE, "mmlu"),
]
AS_WELL_MARGIN = 0.2  # of the squared error × 1000: what "as well" allows
# The rows of the other models' table, of MMLU unless tasks are named.
ELSEWHERE = [ARC, HELLASWAG]
OTHER_ROWS = [
    ("β = 0 less base", ["mmlu"]),
    ("two epochs less base", ["mmlu"]),
    ("over-trained less base", ["mmlu"]),
    ("recommended: β = 0.1 less 0", ["mmlu"]),
    ("recommended: β = 0.5 less 0", ["mmlu"]),
    ("over-trained: β = 0.1 less 0", ["mmlu"]),
    ("over-trained: β = 0.2 less 0", ["mmlu"]),
    ("over-trained: β = 0.3 less 0", ["mmlu"]),
    ("over-trained: temperature after β = 0, less β = 0", ["mmlu"]),
    ("over-trained: temperature after β = 0, less β = 0", ELSEWHERE),
    ("equal held-out loss: 0.1 less 0", ["mmlu"]),
    ("temperature after β = 0, less β = 0.1", ["mmlu"]),
    ("temperature after β = 0, less β = 0.1", ELSEWHERE),
    ("DACA's temperature after β = 0, less β = 0", ["mmlu"]),
    ("DACA's temperature after β = 0, less β = 0", ELSEWHERE),
    ("half the conversations, less β = 0.1", ["mmlu"]),
    ("averaged with base, less β = 0.1", ["mmlu"]),
    ("unigram less uniform, β = 0.1", ["mmlu"]),
    ("base mean less uniform, β = 0.1", ["mmlu"]),
]


def page() -> str:
    """The page of claims, with further pages of its folder behind it."""
    first = parts.HERE / "README.md"
    others = sorted(set(parts.HERE.glob("*.md")) - {first})
    return "\n\n".join(file.read_text(encoding="utf-8") for file in (first, *others))


def page_rows(heading: str) -> list[list[str]]:
    """The cells of the rows of the page's table whose first line begins so."""
    lines = page().splitlines()
    (start,) = [n for n, line in enumerate(lines) if line.strip().startswith(f"| {heading}")]
    rows = []
    for line in lines[start + 2 :]:
        if not line.strip().startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip().strip("|").split(" | ")])
    return rows


def passage(beginning: str) -> str:
    """The item of a list on the page that begins so, up to the next item, table or empty line."""
    lines = page().splitlines()
    (start,) = [n for n, line in enumerate(lines) if line.startswith(beginning)]
    item = [lines[start]]
    for line in lines[start + 1 :]:
        is_another_item = re.match(r"- |\d+\. ", line)
        if not line.strip() or is_another_item or line.strip().startswith("|"):
            break
        item.append(line)
    return " ".join(item)


NUMBER = r"[+−]?\d[\d,]*(?:\.\d+)?(?:e-\d+)?"
FIGURE = re.compile(
    rf"(\*\*)?(?<![\w.])({NUMBER})(?:\*\*)?(?: (?:points|nats))?"  # a number, bold or not, …
    rf"( \[{NUMBER}, {NUMBER}\])?"  # … and its interval
)
MODEL_SIZE = re.compile(r"\d(?:\.\d)? ?B\b")
SETTINGS = {f"{beta:g}" for beta in parts.BETAS}  # stand in sentences without being figures


def figures_of(text: str) -> list[str]:
    """The figures in a sentence, with their intervals; β and the models' sizes are none."""
    text = re.sub(r"^(- |\d+\. )", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)  # addresses of links
    text = MODEL_SIZE.sub("", text)
    figures = []
    for bold, number, interval in FIGURE.findall(text):
        if interval or number.rstrip(",") not in SETTINGS:
            figures.append(f"{bold}{number.rstrip(',')}{bold}{interval}")
    return figures


def with_sign(value: float, digits: int) -> str:
    """A change as the page has it; nothing has no sign."""
    text = f"{value:+.{digits}f}"
    if float(text) == 0:
        text = text[1:]
    return text


class Published:
    """The published records, whose answers are unpacked once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cache  # noqa: B019  (there is one, as long as the tests run)
    def runs(self, model: str) -> list[answers.AnsweredRun]:
        """The runs of a model with their answers."""
        return derived.answered_runs(Study(model, self.folder, PUBLISHED))

    def difference(
        self, contrast: str | Contrast, quantity: Quantity, model: str = LARGE
    ) -> contrasts.Difference | None:
        """A contrast, by its name or itself."""
        if isinstance(contrast, str):
            contrast = CONTRAST[contrast]
        return contrasts.difference(self.runs(model), contrast, quantity)

    def told(
        self,
        contrast: str | Contrast,
        quantity: Quantity,
        model: str = LARGE,
        digits: int = 1,
        bold: bool = True,
        tells: Literal["change", "gain", "fall"] = "change",
    ) -> str | None:
        """A difference with its interval as the page prints it; None where there is none.

        A gain has no plus sign, since "rises by" stands before it; a fall is positive.
        """
        found = self.difference(contrast, quantity, model)
        if found is None:
            return None
        value, low, high = found.estimate.value, found.estimate.low, found.estimate.high
        if tells == "fall":
            value, low, high = -value, -high, -low
        text = with_sign(value, digits)
        if tells != "change":
            text = text.removeprefix("+")
        if bold and found.estimate.significant:
            text = f"**{text}**"
        return f"{text} [{low:.{digits}f}, {high:.{digits}f}]".replace("-", "−")

    @cache  # noqa: B019
    def levels(self, model: str, task: str) -> dict[tuple[str, str], list[str]]:
        """The cells of each setting and β: of the first tables, `high-rate` and `two-epochs`."""
        recipes = [*summary.recipes_of_first_tables(), *summary.recipes_of_other_parts()]
        rows = summary.rows_of_recipes(self.runs(model), task, recipes)
        return {(row.setting, row.beta): summary.cells_of_row(row) for row in rows}

    def level(
        self, column: str, setting: str, beta: str, model: str = LARGE, task: str = "mmlu"
    ) -> str:
        """A cell of the first tables without its interval."""
        cells = self.levels(model, task)[setting, beta]
        return cells[summary.COLUMNS.index(column)].split(" [")[0]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return Published(tmp_path_factory.mktemp("claims"))


def squared_error(
    task: str = "mmlu", among: str = "choices", normalise: str | None = None
) -> Quantity:
    """The squared calibration error × 1000."""
    return Quantity(task, among, normalise)


def level_of(metric: str, task: str = "mmlu", among: str = "choices", scale: int = 1) -> Quantity:
    """Another metric, whose differences are told in its own unit times `scale`."""
    return Quantity(task, among, None, metric, scale)


def smoothing(part: str, beta: float) -> str:
    """The name of the contrast of a β with β = 0."""
    return f"{part}: β = {beta} less 0"


# ---- what needs no answers


def test_figures_of_a_sentence_are_its_numbers_with_intervals_and_bold():
    text = (
        "- **Other metrics** of the 1.5B at β = 0.1: by **+1.5** [0.4, 2.6] points and −0.2 "
        "[−1.0, 0.3], [see](../eval/METRICS.md#5) 14,042 questions, 5e-6; 0.5 falls to **0.049**."
    )
    assert figures_of(text) == [
        "**+1.5** [0.4, 2.6]",
        "−0.2 [−1.0, 0.3]",
        "14,042",
        "5e-6",
        "**0.049**",
    ]


def test_a_claim_of_a_small_model_is_what_the_records_say(tmp_path):
    """SmolLM2's row of β = 0.1 against 0, which takes seconds; all others are slow tests below."""
    questions = PUBLISHED.questions()
    runs = []
    for record in PUBLISHED.runs(SMOLLM2):
        if answers.PLAIN.matches(record) or answers.SMOOTHED.matches(record):
            record.tasks = {"mmlu": record.tasks["mmlu"]}
            PUBLISHED.unpack(SMOLLM2, record, questions, tmp_path / record.run)
            runs.append(answers.AnsweredRun(record, tmp_path / record.run))
    cells = []
    for among in ("choices", "vocabulary"):
        quantity = Quantity("mmlu", among)
        found = contrasts.difference(runs, CONTRAST["recommended: β = 0.1 less 0"], quantity)
        estimate = found.estimate
        value = f"{estimate.value:+.1f}"
        if estimate.significant:
            value = f"**{value}**"
        cells.append(f"{value} [{estimate.low:.1f}, {estimate.high:.1f}]".replace("-", "−"))
    (row,) = [
        cells for cells in page_rows("change of the squared") if cells[0] == "β = 0.1 against β = 0"
    ]
    assert row[2] == "; ".join(cells)


def rows_of_first_tables() -> list[tuple[str, str, list[str]]]:
    """The model, the task and the cells of each row of the page's tables of levels."""
    # The last table has the models at chance.
    tasks = [*answers.LETTER_TASKS, "mmlu"]
    rows = []
    tables = page().split("\n| model and setting | ")[1:]
    for table, task in zip(tables, tasks, strict=True):
        model = ""
        for line in table.split("\n\n")[0].splitlines()[2:]:
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if cells[0].startswith("**"):
                label, cells[0] = cells[0].removeprefix("**").split("**, ")
                model = LABELS[label]
            rows.append((model, task, cells))
    return rows


@pytest.mark.parametrize("model", [LARGE, SMALL])
def test_the_rows_of_base_models_are_what_the_records_say(model, tmp_path):
    """They take seconds; all other rows are slow tests below."""
    (record,) = [record for record in PUBLISHED.runs(model) if record.origin == "base"]
    PUBLISHED.unpack(model, record, PUBLISHED.questions(), tmp_path)
    run = answers.AnsweredRun(record, tmp_path)
    stated = {(row[0], row[1]): row[2] for row in rows_of_first_tables() if not row[2][1]}
    for task in answers.LETTER_TASKS:
        recipes = summary.recipes_of_first_tables()[:1]
        (row,) = summary.rows_of_recipes([run], task, recipes)
        assert summary.cells_of_row(row) == stated[model, task]


def test_the_first_tables_have_every_setting_once():
    found: dict[tuple[str, str], list[list[str]]] = {}
    for model, task, cells in rows_of_first_tables():
        found.setdefault((model, task), []).append(cells[:2])
    all_settings = [[row.setting, row.beta] for row in summary.recipes_of_first_tables()]
    assert len(all_settings) == 13
    as_recommended = [cells for cells in all_settings if "over-trained" not in cells[0]]
    expected = {}
    for model in (LARGE, SMALL):
        for task in answers.LETTER_TASKS:
            expected[model, task] = all_settings
    for model in (SMOLLM2, GEMMA):
        expected[model, "mmlu"] = as_recommended
    assert found == expected


def test_the_headlines_over_beta_agree_with_the_tables():
    """ECE among all tokens of the over-trained 1.5B, which stands on README and twice here."""
    readme = (parts.HERE.parents[1] / "README.md").read_text()
    tables = page().split("| model and setting |")[1:4]  # MMLU, ARC-Easy, HellaSwag
    in_readme = readme[readme.index("| over-trained 1.5B, ECE among all tokens |") :]
    readme_rows = [line.strip("| ").split(" | ") for line in in_readme.splitlines()[2:7]]
    claims_rows = page_rows("over-trained, among all tokens")
    assert [row[0] for row in readme_rows] == [row[0] for row in claims_rows]
    assert len(readme_rows) == len(parts.BETAS)
    for short, long in zip(readme_rows, claims_rows, strict=True):
        beta = short[0].removeprefix("β = ")
        for table, short_cell, long_cell in zip(tables, short[1:], long[1:], strict=True):
            line = next(
                row for row in table.splitlines() if row.startswith(f"| over-trained | {beta} ")
            )
            ece = line.strip("| ").split(" | ")[5]
            assert short_cell.split(",")[0] == long_cell.split(" ")[0] == ece
            if beta == "0":
                continue
            verdict = "no difference"
            if "(**" in long_cell:
                verdict = "lower" if "−" in long_cell.split("**")[1] else "**higher**"
            assert short_cell.split(", ")[1] == verdict


def test_other_pages_tell_figures_of_this_page():
    """Every number with three decimals in README's section on smoothing stands here too."""
    readme = (parts.HERE.parents[1] / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Should you smooth?")[1].split("\n## ")[0]
    stated = set(re.findall(r"\d\.\d{3}", section))
    assert len(stated) > 20
    assert stated <= set(re.findall(r"\d\.\d{3}", page()))


def test_the_page_counts_its_claims_and_their_intervals():
    rows = page_rows("claim | verdict")
    intervals = sum(len(re.findall(r"\[", " ".join(cells[2:]))) for cells in rows)
    by_luck = round(0.05 * intervals)
    words = {2: "two", 3: "three", 4: "four"}
    assert f"has {len(rows)} claims with {intervals} intervals" in page()
    assert f"about {words[by_luck]} of {intervals} would leave out 0 by luck" in page()


def test_vocabulary_over_width_is_that_of_the_page_of_models():
    shapes = (parts.HERE.parent / "gguf" / "README.md").read_text(encoding="utf-8")
    ratios = []
    for model in MODELS_OF_THE_PAGE:
        (line,) = [line for line in shapes.splitlines() if line.startswith(f"| `{model}` |")]
        vocabulary, width = (int(cell.replace(",", "")) for cell in line.split(" | ")[1:3])
        ratios.append(f"{vocabulary / width:.0f}")
    assert "V/D, is {}, {}, {} and {} for the 1.5B".format(*ratios) in page()


def test_headings_tell_how_many_questions_were_asked():
    asked = {task: len(questions) for task, questions in PUBLISHED.questions().items()}
    assert f"MMLU, 5-shot, {asked['mmlu']:,} questions" in page()
    assert f"ARC-Easy, 5-shot, {asked[ARC]:,} questions" in page()
    assert f"HellaSwag, 5-shot by letters, the first {asked[HELLASWAG]:,} questions" in page()
    assert f"one half of MMLU's test questions ({asked['mmlu'] // 2:,})" in page()
    for task, name in answers.LETTER_TASKS.items():
        shots = {question["shots"] for question in PUBLISHED.questions()[task]}
        assert shots == {5}, name


def test_the_page_tells_the_chosen_learning_rates():
    rates = {model: parts.chosen_rate(Study(model)) for model in MODELS_OF_THE_PAGE}
    assert rates == {LARGE: 5e-6, SMALL: 2e-5, GEMMA: 2e-5, SMOLLM2: 2e-4}
    grid = sorted(parts.losses_of_grid(Study(LARGE)).index)
    assert grid == [5e-6, 2e-5, 5e-5, 2e-4]
    text = passage("- **Learning rates**")
    assert figures_of(text) == ["5e-6", "2e-5", "5e-5", "2e-4", "5e-6", "2e-5", "2e-4"]
    assert "That is 5e-6 for the 1.5B, at the edge of the rates that were tried" in page()
    assert "and 2e-5 for the 0.5B" in page()


def test_the_page_tells_how_many_seeds_there_are():
    three_of_the_large_model = {"sum", "equal", "filtered", "script"}
    for model in MODELS_OF_THE_PAGE:
        seeds: dict[tuple[str, float | None], set[int | None]] = {}
        for record in PUBLISHED.runs(model):
            if record.origin not in ("base", "grid"):
                seeds.setdefault((record.origin, record.label_smoothing), set()).add(record.seed)
        for (part, _), of_setting in seeds.items():
            has_five = model == LARGE and part not in three_of_the_large_model
            assert len(of_setting) == (5 if has_five else 3), (model, part)


def test_the_page_tells_which_records_lack_their_learning_rate():
    runs = pd.DataFrame(PUBLISHED.runs(LARGE), columns=["origin", "run", "learning_rate", "seed"])
    lacking = runs[
        runs.learning_rate.isna() & ~runs.origin.isin(["base", "temperature", "averaged"])
    ]
    assert len(lacking) == 7 and set(lacking.seed) == {0, 1}
    assert "In seven trained runs of the 1.5B (seeds 0 and 1) the column `learning_rate`" in page()


def test_the_page_tells_the_temperatures_and_which_are_no_optimum():
    (row,) = [cells for cells in page_rows("temperature | ") if "fitted after β" in cells[0]]
    expected = []
    for model in MODELS_OF_THE_PAGE:
        (line,) = report.temperature_lines(PUBLISHED.runs(model))[2:-1]
        expected.append(line.strip("| ").split(" | "))
    assert [[row[0], cell] for cell in row[1:]] == expected


def test_the_page_tells_what_equal_held_out_losses_are():
    rows = page_rows("model | held-out loss at β = 0.1")
    for cells, model in zip(rows, MODELS_OF_THE_PAGE, strict=True):
        losses = parts.equal_losses(Study(model))
        assert cells[1:3] == [f"{losses.smoothed:.3f}", f"{losses.plain:.3f}"]
        rate, _, end = cells[3].partition(", ")
        assert float(rate) == losses.learning_rate == parts.equal_rate(Study(model))
        assert end.startswith("the grid's") == losses.smoothed_is_above_grid


def held_out_losses(model: str) -> dict[tuple[str, str], str]:
    """The held-out loss of each part and β, as `report` prints it."""
    losses = {}
    for line in report.held_out_loss_table(Study(model))[2:-1]:
        part, _, beta, loss, _ = line.strip("| ").split(" | ")
        losses[part, beta] = loss
    return losses


def test_the_page_tells_the_entropy_gaps():
    """`report` prints them, of each part and β in the mean over seeds."""
    stated = {cells[0]: cells[1:] for cells in page_rows("entropy gap, nats a token")}
    assert list(stated) == list(LABELS)
    settings = [("recommended", 0.0), ("recommended", 0.1), ("unigram", 0.1), ("base-mean", 0.1)]
    plain_temperatures = []
    smoothed_temperatures = []
    for label, model in LABELS.items():
        gaps = pd.DataFrame(read_rows(PUBLISHED.entropy_gap_file(model)))
        means = gaps.groupby(["part", "label_smoothing"])[report.ENTROPY_COLUMNS].mean()
        cells = [f"{abs(round(means.entropy_gap[setting], 2)):.2f}" for setting in settings]
        assert stated[label] == cells
        for (_, beta), temperature in means.entropy_temperature.items():
            of_beta = smoothed_temperatures if beta == 0.1 else plain_temperatures
            if beta in (0.0, 0.1):
                of_beta.append(temperature)
    text = passage("The entropy of the model's predictions less")
    ends = [
        f"{end(temperatures):.2f}"
        for temperatures in (smoothed_temperatures, plain_temperatures)
        for end in (min, max)
    ]
    assert figures_of(text) == ends


# ---- what needs the answers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "task", "cells"),
    [
        pytest.param(*row, id="-".join([row[0], row[1], *row[2][:2]]))
        for row in rows_of_first_tables()
    ],
)
def test_a_row_of_the_first_tables_is_what_the_records_say(published, model, task, cells):
    """Model, setting, β, seeds and all figures; `python -m studies.claims MODEL summary`."""
    assert published.levels(model, task)[cells[0], cells[1]] == cells


@pytest.mark.slow
def test_the_page_tells_what_calibrated_models_read(published):
    """The largest floor of all rows of a table."""
    floors = []
    for task in answers.LETTER_TASKS:
        rows = []
        for model in (LARGE, SMALL):
            recipes = summary.recipes_of_first_tables()
            rows += summary.rows_of_recipes(published.runs(model), task, recipes)
        floors.append(f"{summary.largest_ece_floor(rows):.3f}")
    stated = "an ECE of up to {} on MMLU, {} on ARC-Easy and {} on HellaSwag".format(*floors)
    assert stated in page()


@pytest.mark.slow
def test_the_page_tells_where_miscalibration_is_shown_without_smoothing(published):
    """Of the 1.5B as recommended: p of ECE over seeds is the least of theirs times their number."""
    p_over_seeds = []
    for task in answers.LETTER_TASKS:
        files = answers.files_by_seed(published.runs(LARGE), answers.PLAIN, task)
        evaluated = [evaluations.load(path) for path in files.values()]
        for among in AMONG:
            least = min(each.floor_tests[among]["ece"].p for each in evaluated)
            p_over_seeds.append(f"{len(evaluated) * least:.2f}")
    mmlu, mmlu_tokens, arc, arc_tokens, hellaswag, hellaswag_tokens = p_over_seeds
    assert mmlu == mmlu_tokens
    assert (
        f"on MMLU (p = {mmlu} in both readings) and on HellaSwag ({hellaswag} among the choices, "
        f"{hellaswag_tokens} among all tokens), and on ARC-Easy it is not ({arc} and {arc_tokens})."
    ) in page()


def readings(
    published: Published, name: str, model: str, task: str
) -> dict[str, contrasts.Difference]:
    """A contrast in both readings, where there are both."""
    found = {
        "among the choices": published.difference(name, squared_error(task), model),
        "among all tokens": published.difference(name, squared_error(task, "vocabulary"), model),
    }
    return {reading: each for reading, each in found.items() if each is not None}


def verdict(claim: Claim, found: dict[str, contrasts.Difference]) -> str:
    """The verdict on a claim, by the rules in the page's table of verdicts."""
    signs = {}
    for reading, each in found.items():
        signs[reading] = 0
        if each.estimate.significant:
            signs[reading] = 1 if each.estimate.value > 0 else -1
    side = {Claim.HARMS: 1, Claim.IMPROVES: -1, Claim.AS_WELL: -1}.get(claim)
    against = [reading for reading, sign in signs.items() if side and sign == -side]
    if against:
        is_in_one_of_two = len(against) < len(signs)
        return f"refuted {against[0]}" if is_in_one_of_two else "refuted"
    if claim is Claim.AS_WELL:
        ends = [end for each in found.values() for end in (each.estimate.low, each.estimate.high)]
        return "confirmed" if max(map(abs, ends)) <= AS_WELL_MARGIN else "not settled"
    shown = [reading for reading, sign in signs.items() if sign != 0]
    if not shown:
        return "no difference shown"
    return "confirmed" if len(shown) == len(signs) else f"partly confirmed: {shown[0]}"


@pytest.mark.slow
def test_the_table_of_claims_is_what_the_records_say(published):
    """The names' model, task and β, the verdicts, and all figures."""
    rows = page_rows("claim | verdict")
    for cells, (name, claim, model, task) in zip(rows, CLAIMS, strict=True):
        assert ("0.5B" in cells[0]) == (model == SMALL), cells
        for other_task, title in answers.LETTER_TASKS.items():
            assert (title in cells[0]) == (other_task == task and task != "mmlu"), cells
        beta = re.match(r"(?:recommended|over-trained): (β = [\d.]+) less 0", name)
        assert beta is None or cells[0].startswith((beta[1], "–")), cells

        found = readings(published, name, model, task)
        told = [
            published.told(name, squared_error(task, among), model) or "not read"
            for among in ("choices", "vocabulary")
        ]
        assert cells[2:] == told, cells

        expected = verdict(claim, found)
        stated = cells[1]
        if len(found) == 1:
            stated = stated.removesuffix(" among the choices")
        if stated.endswith(", both Qwens"):
            stated = stated.removesuffix(", both Qwens")
            assert verdict(claim, readings(published, name, SMALL, task)) == expected, cells
        if claim is Claim.AS_WELL and expected == "confirmed":
            in_favour = published.told(name, squared_error(task), bold=False, digits=2)
            expected += f": the difference is at most {AS_WELL_MARGIN} (and in its favour: "
            expected += f"{in_favour})"
        assert stated.removesuffix(" for the 1.5B") == expected, cells


@pytest.mark.slow
@pytest.mark.parametrize(("column", "model"), [(1, SMALL), (2, SMOLLM2), (3, GEMMA)])
def test_the_other_models_rows_are_what_the_records_say(published, column, model):
    rows = page_rows("change of the squared calibration error")
    assert len(rows) == len(OTHER_ROWS)
    expected = []
    for name, tasks in OTHER_ROWS:
        quantities = [squared_error(task, among) for task in tasks for among in AMONG]
        found = [published.told(name, quantity, model) for quantity in quantities]
        expected.append("; ".join(filter(None, found)) or "not trained")
    assert [cells[column] for cells in rows] == expected


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS_OF_THE_PAGE)
def test_the_page_tells_all_kinds_of_temperatures(published, model):
    column = 1 + MODELS_OF_THE_PAGE.index(model)
    stated = [[cells[0], cells[column]] for cells in page_rows("temperature | ")]
    lines = report.temperature_lines(run.record for run in published.runs(model))[2:-1]
    expected = [line.strip("| ").split(" | ") for line in lines]
    assert [cells for cells in stated if cells[1] != "not trained"] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("among", "column", "quantity"),
    [
        ("all tokens", "ECE, all tokens", "vocabulary"),
        ("the choices", "ECE, choices", "choices"),
    ],
)
def test_what_each_beta_does_to_the_over_trained_model_is_what_the_records_say(
    published, among, column, quantity
):
    for cells in page_rows(f"over-trained, among {among}"):
        beta = cells[0].removeprefix("β = ")
        expected = []
        for task in answers.LETTER_TASKS:
            ece = published.level(column, "over-trained", beta, task=task)
            if beta != "0":
                error = squared_error(task, quantity)
                ece += f" ({published.told(smoothing('over-trained', beta), error)})"
            expected.append(ece)
        assert cells[1:] == expected


@pytest.mark.slow
def test_what_a_temperature_does_where_it_is_carried_is_what_the_records_say(published):
    """The table below the conclusions, with its words."""
    for cells, task in zip(page_rows("carried to"), ELSEWHERE, strict=True):
        expected = [answers.LETTER_TASKS[task]]
        for setting, beta in (
            ("as recommended", "0"),
            ("as recommended, then a temperature", "0"),
            ("as recommended", "0.1"),
        ):
            expected.append(published.level("ECE, choices", setting, beta, task=task))
        for beta in ("0", "0.1"):
            name = f"temperature after β = 0, less β = {beta}"
            estimate = published.difference(name, squared_error(task)).estimate
            word = "no difference shown"
            if estimate.significant:
                word = "worse" if estimate.value > 0 else "better"
            expected.append(f"{word}: {published.told(name, squared_error(task))}")
        assert cells == expected


@pytest.mark.slow
def test_details_tell_the_other_metrics(published):
    text = passage("- **Other metrics on MMLU at β = 0.1**")
    name = smoothing("recommended", 0.1)
    assert figures_of(text) == [
        published.told(name, level_of("accuracy", scale=100)),
        published.told(name, level_of("brier"), digits=3),
        published.told(name, level_of("nll"), digits=3),
        published.told(name, level_of("auroc"), digits=3),
        published.told(name, level_of("nll", among="vocabulary"), digits=3),
    ]
    aurc = published.difference(name, level_of("aurc"))
    assert "(AURC, no difference)" in text and not aurc.estimate.significant


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "quantity"),
    [
        ("usual confidences", "aurc"),
        ("divided by the norm", "aurc, normalized logits"),
    ],
)
def test_details_tell_confidences_divided_by_the_norm_of_the_logits(published, row, quantity):
    (cells,) = [cells for cells in page_rows("AURC × 100") if cells[0] == row]
    expected = []
    for part in ("recommended", "over-trained"):
        for beta in (0.1, 0.3):
            name = smoothing(part, beta)
            told = published.told(name, contrasts.GUARDS[quantity], digits=2, tells="gain")
            expected.append(told)
    assert cells[1:] == expected


@pytest.mark.slow
def test_details_tell_arc_easy_by_letters(published):
    text = passage("- **ARC-Easy by letters**")
    quantities = [squared_error(ARC, among) for among in AMONG]
    figures = []
    for part in ("recommended", "over-trained"):
        figures += [published.told(smoothing(part, 0.1), quantity) for quantity in quantities]
    assert figures_of(text) == ["1000", *figures]
    assert "and larger β by more" in text
    for quantity in quantities:
        changes = [
            published.difference(smoothing("recommended", beta), quantity).estimate.value
            for beta in parts.BETAS[1:]
        ]
        assert changes == sorted(changes)


@pytest.mark.slow
def test_details_tell_hellaswag_by_letters(published):
    text = passage("- **HellaSwag by letters**")
    shown = {}
    for beta in parts.BETAS[1:]:
        for among in AMONG:
            name = smoothing("recommended", beta)
            found = published.difference(name, squared_error(HELLASWAG, among))
            if found.estimate.significant:
                shown[beta, among] = published.told(name, squared_error(HELLASWAG, among))
    assert list(shown) == [(0.5, "vocabulary")]
    assert "at β = 0.5" in text and figures_of(text) == [*shown.values()]


@pytest.mark.slow
def test_details_tell_what_is_read_by_continuation(published):
    text = passage("- **By continuation**").replace("error × 1000", "error")  # its unit
    expected = [
        published.told(smoothing("recommended", 0.1), squared_error(f"{task}-continuation", **how))
        for task in ("arc", "hellaswag")
        for how in ({}, {"normalise": "sum"})
    ]
    assert figures_of(text) == expected
    assert text.endswith("the last of the four grows with β.")
    summed = squared_error("hellaswag-continuation", normalise="sum")
    changes = [
        published.difference(smoothing("recommended", beta), summed).estimate.value
        for beta in parts.BETAS[1:]
    ]
    assert changes == sorted(changes)


@pytest.mark.slow
def test_details_tell_larger_beta_as_recommended(published):
    tokens = squared_error(among="vocabulary")
    expected = [
        published.told(smoothing("recommended", 0.3), squared_error()),
        published.told(smoothing("recommended", 0.3), tokens, digits=2),
        published.told(smoothing("recommended", 0.5), squared_error()),
        published.told(smoothing("recommended", 0.5), tokens),
    ]
    for task, tells in (("mmlu", {"tells": "gain"}), (HELLASWAG, {"tells": "fall"})):
        accuracy = level_of("accuracy", task, scale=100)
        for beta in (0.2, 0.3, 0.5):
            name = smoothing("recommended", beta)
            expected.append(published.told(name, accuracy, digits=2, **tells))
    assert figures_of(passage("- **Larger β, as recommended**")) == expected


@pytest.mark.slow
def test_details_tell_larger_beta_over_trained(published):
    tokens = squared_error(among="vocabulary")
    accuracy = level_of("accuracy", scale=100)
    loss = level_of("nll", among="vocabulary")
    at_03 = smoothing("over-trained", 0.3)
    at_05 = smoothing("over-trained", 0.5)
    expected = [
        published.told(smoothing("over-trained", 0.2), squared_error()),
        published.told(smoothing("over-trained", 0.2), tokens),
        published.told(at_03, accuracy, tells="gain"),
        published.told(at_05, accuracy, tells="gain"),
        published.told(at_03, loss, digits=3, tells="gain"),
        published.told(at_05, loss, digits=3, tells="gain"),
        published.told(at_05, squared_error(ARC, "vocabulary")),
        published.told(at_03, loss, SMALL, digits=3, tells="gain"),
        published.told(at_05, loss, SMALL, digits=3, tells="gain"),
    ]
    text = passage("- **Larger β, over-trained**")
    assert figures_of(text) == expected
    assert "where no difference of that error is shown" in text
    for among in AMONG:
        quantity = squared_error(among=among)
        assert not published.difference(at_05, quantity, SMALL).estimate.significant


EQUAL = "equal held-out loss: 0.1 less 0"


def means_at_equal_loss(published: Published) -> list[str]:
    """The 1.5B's log loss among all tokens at β = 0 and 0.1, over the three seeds of both."""
    means = []
    files = [
        answers.files_by_seed(published.runs(LARGE), term, "mmlu")
        for term in (answers.Term("equal", 0.0), answers.SMOOTHED)
    ]
    for paired in zip(*contrasts.paired_files(files), strict=True):
        losses = [
            quick_evaluation.load(file, ("nll",)).values["vocabulary"]["nll"] for file in paired
        ]
        means.append(f"{sum(losses) / len(losses):.3f}")
    return means


@pytest.mark.slow
def test_details_tell_what_happens_at_equal_held_out_loss(published):
    text = passage("- **At equal held-out loss**")
    accuracy = level_of("accuracy", scale=100)
    losses = {model: parts.equal_losses(Study(model)) for model in (LARGE, SMALL)}
    of_large, of_small = losses[LARGE], losses[SMALL]
    assert figures_of(text) == [
        "5.7e-5",
        f"{of_large.plain:.3f}",
        f"{of_large.smoothed:.3f}",
        published.told(EQUAL, accuracy, tells="gain"),
        published.told(EQUAL, level_of("nll"), digits=3, tells="fall"),
        *means_at_equal_loss(published),
        "7e-5",
        f"{of_small.plain:.3f}",
        f"{of_small.smoothed:.3f}",
        published.told(EQUAL, accuracy, SMALL, tells="gain"),
        published.told(EQUAL, level_of("nll", among="vocabulary"), SMALL, 3, tells="gain"),
    ]
    assert of_large.learning_rate == 5.7e-5 and of_small.learning_rate == 7e-5
    assert round(of_large.learning_rate / parts.chosen_rate(Study(LARGE))) == 11
    assert "eleven times the rate" in text


@pytest.mark.slow
def test_details_tell_what_happens_at_the_highest_rate(published):
    text = passage("- **At the top of the paper's grid**")
    levels = [
        published.level("accuracy, %", "high-rate", beta)
        for beta in ("0", "0.1", "0.2", "0.3", "0.5")
    ]
    gain = published.told(
        smoothing("high-rate", 0.5), level_of("accuracy", scale=100), tells="gain"
    )
    assert figures_of(text) == ["2e-4", *levels, gain]
    assert published.levels(LARGE, "mmlu")["high-rate", "0"][2] == "5"
    assert "five seeds" in text


@pytest.mark.slow
def test_details_tell_a_temperature_against_larger_beta(published):
    expected = [
        published.told("temperature after β = 0, less β = 0.3", squared_error()),
        published.told("over-trained: temperature after β = 0, less β = 0.3", squared_error()),
    ]
    assert figures_of(passage("- **Temperatures** of all models")) == expected


@pytest.mark.slow
def test_details_tell_held_out_losses_and_two_epochs(published):
    losses = held_out_losses(LARGE)
    expected = [losses["recommended", f"{beta:g}"] for beta in parts.BETAS]
    expected += [losses["two-epochs", "0"], losses["over-trained", "0"]]
    expected.append(losses["over-trained", "0.3"])
    for column in ("accuracy, %", "ECE, choices", "ECE, all tokens"):
        expected.append(published.level(column, "two-epochs", "0"))
    assert figures_of(passage("- **Held-out loss**")) == expected


def ece(published: Published, among: str, setting: str, *betas: str, **where: str) -> list[str]:
    """The expected calibration error at some β."""
    column = {"choices": "ECE, choices", "vocabulary": "ECE, all tokens"}[among]
    return [published.level(column, setting, beta, **where) for beta in betas]


def loss(published: Published, among: str, setting: str, *betas: str, **where: str) -> list[str]:
    """The log loss at some β."""
    column = {"choices": "log loss, choices", "vocabulary": "log loss, all tokens"}[among]
    return [published.level(column, setting, beta, **where) for beta in betas]


def conclusion_1(published: Published) -> list[str | None]:
    one_epoch = "β = 0 less base"
    return [
        published.told(one_epoch, squared_error(), bold=False),
        published.told(one_epoch, squared_error(), SMALL, bold=False),
        published.told(one_epoch, squared_error(ARC), SMALL, bold=False),
        published.told("two epochs less base", squared_error(), bold=False),
        published.told("over-trained less base", squared_error(), bold=False),
    ]


def conclusion_2(published: Published) -> list[str | None]:
    return [
        *ece(published, "choices", "as recommended", "0", "0.1"),
        *ece(published, "vocabulary", "as recommended", "0", "0.1"),
        published.told(smoothing("recommended", 0.1), level_of("auroc"), digits=3, bold=False),
    ]


def conclusion_3(published: Published) -> list[str | None]:
    return [*ece(published, "vocabulary", "as recommended", "0", "0.1", model=SMALL)]


def overconfidence_without_smoothing(published: Published, task: str) -> float:
    """Mean confidence among the choices less accuracy of the 1.5B as recommended at β = 0."""
    files = answers.files_by_seed(published.runs(LARGE), answers.PLAIN, task)
    of_seeds = [
        quick_evaluation.load(path, ("ece_signed",)).values["choices"]["ece_signed"]
        for path in files.values()
    ]
    return sum(of_seeds) / len(of_seeds)


def conclusion_4(published: Published) -> list[str | None]:
    accuracy = level_of("accuracy", HELLASWAG, scale=100)
    error = squared_error(HELLASWAG, "vocabulary")
    fall = published.told(
        smoothing("recommended", 0.2), accuracy, digits=2, bold=False, tells="fall"
    )
    return [
        *ece(published, "choices", "as recommended", "0", "0.1", task=ARC),
        *ece(published, "vocabulary", "as recommended", "0", "0.1", task=ARC),
        published.told(smoothing("recommended", 0.5), error, bold=False),
        fall,
        f"{overconfidence_without_smoothing(published, 'mmlu'):.3f}",
        f"{overconfidence_without_smoothing(published, HELLASWAG):.3f}",
        f"{-overconfidence_without_smoothing(published, ARC):.3f}",
    ]


def conclusion_5(published: Published) -> list[str | None]:
    tokens = squared_error(among="vocabulary")
    further = "recommended: β = 0.3 less 0.1"
    return [
        *ece(published, "choices", "as recommended", "0.1", "0.3"),
        published.told(further, squared_error(), bold=False),
        *ece(published, "vocabulary", "as recommended", "0.1", "0.3"),
        published.told(further, tokens, bold=False),
        *ece(published, "vocabulary", "as recommended", "0.5", "0"),
        published.told(smoothing("recommended", 0.5), tokens, bold=False),
    ]


def conclusion_6(published: Published) -> list[str | None]:
    return [
        *ece(published, "choices", "as recommended", "0"),
        *ece(published, "choices", "as recommended, then a temperature", "0"),
        published.told("temperature after β = 0, less β = 0", squared_error(), bold=False),
        *ece(published, "choices", "as recommended", "0.1", "0.3"),
        published.told("temperature after β = 0, less β = 0.3", squared_error(), bold=False),
    ]


def conclusion_7(published: Published) -> list[str | None]:
    figures: list[str | None] = []
    for among in ("vocabulary", "choices"):
        figures += ece(published, among, "before fine-tuning", "")
        figures += ece(published, among, "over-trained", "0")
    for task in ("mmlu", HELLASWAG):
        figures += ece(published, "choices", "over-trained", "0", task=task)
        figures += ece(published, "choices", "over-trained, then a temperature", "0", task=task)
    for task in ("mmlu", ARC):
        figures += ece(published, "choices", "over-trained", "0", "0.5", task=task)
    name = smoothing("over-trained", 0.5)
    return [*figures, published.told(name, squared_error(ARC), bold=False)]


def conclusion_8(published: Published) -> list[str | None]:
    name = smoothing("recommended", 0.1)
    tokens = level_of("nll", among="vocabulary")
    at_0, at_01 = means_at_equal_loss(published)
    return [
        *loss(published, "vocabulary", "as recommended", "0", "0.1"),
        published.told(name, tokens, digits=3, bold=False),
        "2e-4",
        *loss(published, "vocabulary", "high-rate", "0", "0.1"),
        at_01,
        at_0,
        published.told(EQUAL, tokens, SMALL, digits=3, bold=False),
        *loss(published, "choices", "as recommended", "0", "0.1"),
        published.told(name, level_of("nll"), digits=3, bold=False),
        *loss(published, "choices", "as recommended", "0", "0.1", task=ARC),
        *loss(published, "choices", "as recommended", "0", "0.1", task=HELLASWAG),
    ]


def conclusion_9(published: Published) -> list[str | None]:
    """Has no figures; the errors are larger for both Qwens."""
    for name in ("unigram less uniform, β = 0.1", "base mean less uniform, β = 0.1"):
        for model in (LARGE, SMALL):
            for among in AMONG:
                estimate = published.difference(name, squared_error(among=among), model).estimate
                assert estimate.significant and estimate.value > 0
    return []


def conclusion_10(published: Published) -> list[str | None]:
    name = "DACA's temperature after β = 0, less β = 0"
    return [
        published.told(name, squared_error(), bold=False),
        published.told(name, squared_error(HELLASWAG), bold=False),
        published.told(name, squared_error(ARC), bold=False),
        published.told(name, squared_error(ARC), SMALL, bold=False),
    ]


def conclusion_11(published: Published) -> list[str | None]:
    half = "half the conversations, less β = 0.1"
    averaged = "averaged with base, less β = 0.1"
    return [
        published.told(half, squared_error(among="vocabulary"), bold=False),
        published.told(half, squared_error(), bold=False),
        published.told(averaged, squared_error(), bold=False),
        published.told(averaged, squared_error(among="vocabulary"), bold=False),
    ]


CONCLUSIONS = [
    conclusion_1,
    conclusion_2,
    conclusion_3,
    conclusion_4,
    conclusion_5,
    conclusion_6,
    conclusion_7,
    conclusion_8,
    conclusion_9,
    conclusion_10,
    conclusion_11,
]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, len(CONCLUSIONS) + 1))
def test_the_conclusions_figures_are_what_the_records_say(published, number):
    expected = CONCLUSIONS[number - 1](published)
    assert figures_of(passage(f"{number}. **")) == expected


@pytest.mark.slow
def test_smoothing_costs_log_loss_among_all_tokens(published):
    """Conclusion 8: both Qwens, every β, all tasks, as recommended and over-trained."""
    for model in (LARGE, SMALL):
        for task in answers.LETTER_TASKS:
            for setting in ("as recommended", "over-trained"):
                betas = [f"{beta:g}" for beta in parts.BETAS]
                plain, *smoothed = loss(
                    published, "vocabulary", setting, *betas, model=model, task=task
                )
                assert all(float(each) > float(plain) for each in smoothed)


@pytest.mark.slow
def test_the_page_on_ones_own_model_prints_what_check_prints(published):
    """Of seed 0 of the over-trained 1.5B at β = 0, and of the model before fine-tuning."""
    runs = published.runs(LARGE)
    base = answers.files_by_seed(runs, answers.BASE, "mmlu")[None]
    tuned = answers.files_by_seed(runs, answers.OVER_TRAINED, "mmlu")[0]
    command = [sys.executable, "-m", "calibeval", "check", str(base), str(tuned)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    guide = (parts.HERE.parents[1] / "docs" / "should-i-smooth.md").read_text(encoding="utf-8")
    example = guide.split("(#the-example)):\n\n")[1].split("\n\n")[0]
    lines = [line.strip() for line in example.splitlines() if line.strip() != "…"]
    assert len(lines) == 5
    for line in lines:
        assert line.removesuffix("…").strip() in done.stdout
