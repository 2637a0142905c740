"""What the page of claims states is what the published records say.

Its tables of levels are compared row by row, the verdicts on claims by the page's own rules, and of
everything else each figure with an interval has to be a difference that the records give.
"""

import re
import subprocess
import sys
from enum import Enum
from functools import cache

import pytest
from studies.claims import answers, contrasts, derived, parts, summary
from studies.claims.contrasts import Quantity
from studies.claims.parts import PUBLISHED, Study

# The first test that asks for a model's records unpacks and measures all of them.
pytestmark = pytest.mark.timeout(900)

LARGE = "qwen2.5-coder-1.5b"
SMALL = "qwen2.5-coder-0.5b"
LABELS = {
    "Qwen2.5-Coder 1.5B": LARGE,
    "Qwen2.5-Coder 0.5B": SMALL,
    "SmolLM2 135M": "smollm2-135m",
    "Gemma 3 270M": "gemma-3-270m",
}
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


# The rows of the table of claims, in its order: the contrast, the claim, and the model and task.
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


def page() -> str:
    return (parts.HERE / "README.md").read_text(encoding="utf-8")


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables_of_levels() -> dict[tuple[str, str], list[list[str]]]:
    """The rows of each model and task, in the page's tables of levels."""
    # The last table has the models at chance.
    tasks = [*answers.LETTER_TASKS, "mmlu"]
    rows: dict[tuple[str, str], list[list[str]]] = {}
    for table, task in zip(page().split("\n| model and setting | ")[1:], tasks, strict=True):
        model = ""
        for line in table.split("\n\n")[0].splitlines()[2:]:
            cells = cells_of(line)
            if cells[0].startswith("**"):
                label, cells[0] = cells[0].removeprefix("**").split("**, ")
                model = LABELS[label]
            rows.setdefault((model, task), []).append(cells)
    return rows


class Published:
    """The published records, whose answers are unpacked once."""

    def __init__(self, folder) -> None:
        self.folder = folder

    @cache  # noqa: B019  (there is one, as long as the tests run)
    def runs(self, model: str) -> list[answers.AnsweredRun]:
        """The runs of a model with their answers."""
        return derived.answered_runs(Study(model, self.folder, PUBLISHED))

    def difference(self, name: str, quantity: Quantity, model: str):
        return contrasts.difference(self.runs(model), CONTRAST[name], quantity)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return Published(tmp_path_factory.mktemp("claims"))


def as_printed(difference: contrasts.Difference, digits: int, sign: int = 1) -> str:
    """A difference with its interval, as the page prints it; nothing has no sign."""
    estimate = difference.estimate
    ends = sorted((sign * estimate.low, sign * estimate.high))
    value = f"{sign * estimate.value:+.{digits}f}"
    if float(value) == 0:
        value = value[1:]
    return f"{value} [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]".replace("-", "−")


def test_the_row_of_a_base_model_is_what_the_records_say(tmp_path):
    """It takes seconds; all other rows are slow tests below."""
    (record,) = [record for record in PUBLISHED.runs(SMALL) if record.origin == "base"]
    PUBLISHED.unpack(SMALL, record, PUBLISHED.questions(), tmp_path)
    run = answers.AnsweredRun(record, tmp_path)
    stated = tables_of_levels()
    for task in answers.LETTER_TASKS:
        recipes = summary.recipes_of_first_tables()[:1]
        (row,) = summary.rows_of_recipes([run], task, recipes)
        assert summary.cells_of_row(row) == stated[SMALL, task][0]


def test_figures_of_other_pages_stand_on_this_page():
    """Every number with three decimals in README's section on smoothing."""
    readme = (parts.HERE.parents[1] / "README.md").read_text(encoding="utf-8")
    section = readme.split("## Should you smooth?")[1].split("\n## ")[0]
    stated = set(re.findall(r"\d\.\d{3}", section))
    assert len(stated) > 20
    assert stated <= set(re.findall(r"\d\.\d{3}", page()))


def test_smoothing_costs_log_loss_among_all_tokens():
    """Conclusion 8: both Qwens, every β, all tasks, as recommended and over-trained."""
    for (model, _), rows in tables_of_levels().items():
        for setting in ("as recommended", "over-trained"):
            losses = [float(cells[-1].split(" ")[0]) for cells in rows if cells[0] == setting]
            if model in (LARGE, SMALL):
                assert len(losses) == len(parts.BETAS)
                assert all(loss > losses[0] for loss in losses[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "task"), tables_of_levels())
def test_a_table_of_levels_is_what_the_records_say(published, model, task):
    """Settings, β, seeds and all figures; `python -m studies.claims MODEL summary`."""
    recipes = summary.recipes_of_first_tables()
    if model not in (LARGE, SMALL):  # at chance: no verdict rests on them
        recipes = [recipe for recipe in recipes if "over-trained" not in recipe.setting]
    rows = summary.rows_of_recipes(published.runs(model), task, recipes)
    assert [summary.cells_of_row(row) for row in rows] == tables_of_levels()[model, task]


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
    """The model and the task that are named, the verdict, and the figures in both readings."""
    table = page()[page().index("\n| claim | verdict") :].strip().split("\n\n")[0]
    rows = [cells_of(line) for line in table.splitlines()[2:]]
    names = dict(zip(AMONG, ("among the choices", "among all tokens"), strict=True))
    for cells, (name, claim, model, task) in zip(rows, CLAIMS, strict=True):
        assert ("0.5B" in cells[0]) == (model == SMALL), cells
        for other_task, title in answers.LETTER_TASKS.items():
            assert (title in cells[0]) == (other_task == task and task != "mmlu"), cells
        found = {}
        for among, cell in zip(AMONG, cells[2:], strict=True):
            difference = published.difference(name, Quantity(task, among), model)
            if difference is None:
                assert cell == "not read", cells
                continue
            found[names[among]] = difference
            value, interval = as_printed(difference, digits=1).split(" ", 1)
            if difference.estimate.significant:
                value = f"**{value}**"
            assert cell == f"{value} {interval}", cells
        assert cells[1].startswith(verdict(claim, found)), cells


# Quantities of sentences and other tables, with the decimals that they have there.
QUANTITIES = [
    *((quantity, 1) for quantity in contrasts.CALIBRATION),
    *((quantity, 2) for quantity in contrasts.CALIBRATION),
    *(
        (Quantity(task, "choices", metric="accuracy", scale=100), 1)
        for task in answers.LETTER_TASKS
    ),
    *(
        (Quantity(task, "choices", metric="accuracy", scale=100), 2)
        for task in answers.LETTER_TASKS
    ),
    *((Quantity("mmlu", among, metric="nll", scale=1), 3) for among in AMONG),
    *((Quantity("mmlu", "choices", metric=name, scale=1), 3) for name in ("brier", "auroc")),
    (contrasts.GUARDS["aurc"], 2),
    (contrasts.GUARDS["aurc, normalized logits"], 2),
]
INTERVAL = re.compile(r"(\*\*)?([+−]?\d+\.\d+)(?:\*\*)?(?: (?:points|nats))? (\[[^\]]+, [^\]]+\])")


@pytest.mark.slow
def test_every_figure_with_an_interval_is_a_difference_that_the_records_give(published):
    """Wherever it stands; a bold one leaves 0 out. "Rises by" and "falls by" have no sign."""
    levels = {
        cell.replace("*", "")
        for rows in tables_of_levels().values()
        for row in rows
        for cell in row
    }
    known = {}
    for model in LABELS.values():
        for name in CONTRAST:
            for quantity, digits in QUANTITIES:
                difference = published.difference(name, quantity, model)
                if difference is None or difference.estimate.low is None:
                    continue
                for sign in (1, -1):
                    text = as_printed(difference, digits, sign).removeprefix("+")
                    significant = difference.estimate.significant
                    known[text] = known.get(text, False) or significant
    stated = [(bold, f"{value} {interval}") for bold, value, interval in INTERVAL.findall(page())]
    stated = [(bold, text) for bold, text in stated if text not in levels]
    assert len(stated) > 100
    unknown = [text for _, text in stated if text.removeprefix("+") not in known]
    assert unknown == []
    assert [text for bold, text in stated if bold and not known[text.removeprefix("+")]] == []


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
