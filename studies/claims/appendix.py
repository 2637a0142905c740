"""The appendix of the page of claims, and the page's table, made of the published records.

    python -m studies.claims.appendix    # 17 minutes of processor time

Writes APPENDIX.md, forest.png and ece.png beside this file, and the table of README.md between its
two marks. A verdict follows from a claim's intervals by the rule in `verdict`, and no figure is
written by hand but settings, and those of `OWN_TEXT`, whose records were not kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache

from calibeval.io import read_text, write_text
from calibeval.measures import ConfidenceDefinition, stats
from studies.claims import report, summary
from studies.claims.answers import LETTER_TASKS, AnsweredRun
from studies.claims.contrasts import (
    CONTRASTS,
    Difference,
    Quantity,
    difference,
    smoothing_effect,
)
from studies.claims.derived import answered_runs
from studies.claims.forest import draw_forest, labels_of_models
from studies.claims.parts import BETAS, CONFIG, HERE, Study
from sweeps.runs.grid import plan_sweep

LARGE = "qwen2.5-coder-1.5b"
SMALL = "qwen2.5-coder-0.5b"
MMLU, ARC, HELLASWAG = LETTER_TASKS
READINGS: dict[ConfidenceDefinition, str] = {
    "choices": "among the choices",
    "vocabulary": "among all tokens",
}
TABLE_BEGINS = "<!-- made by python -m studies.claims.appendix -->\n"
TABLE_ENDS = "\n<!-- until here -->"


class Says(Enum):
    """What a claim says of a difference of squared calibration errors."""

    HARMS = "the error grows"
    IMPROVES = "the error falls"
    CHANGES = "the error is another one"
    AS_WELL = "the error is no larger"


@dataclass(frozen=True)
class Claim:
    """A row of the table of claims: its words, and the contrast by which it is judged."""

    words: str
    contrast: str
    says: Says
    model: str = LARGE
    task: str = MMLU


AS_WELL_MARGIN = 0.2  # of the squared error × 1000: what "as well" allows
CLAIMS = [
    Claim("Fine-tuning for one epoch harms calibration", "β = 0 less base", Says.HARMS),
    Claim("– the 0.5B", "β = 0 less base", Says.HARMS, SMALL),
    Claim("– the 0.5B on ARC-Easy", "β = 0 less base", Says.HARMS, SMALL, ARC),
    Claim("Fine-tuning for two epochs harms it", "two epochs less base", Says.HARMS),
    Claim("– the 0.5B", "two epochs less base", Says.HARMS, SMALL),
    Claim("Over-training harms it", "over-trained less base", Says.HARMS),
    Claim("– the 0.5B", "over-trained less base", Says.HARMS, SMALL),
    Claim("β = 0.1 improves it", "recommended: β = 0.1 less 0", Says.IMPROVES),
    Claim("– on ARC-Easy", "recommended: β = 0.1 less 0", Says.IMPROVES, task=ARC),
    Claim("– on HellaSwag", "recommended: β = 0.1 less 0", Says.IMPROVES, task=HELLASWAG),
    Claim("– the 0.5B", "recommended: β = 0.1 less 0", Says.IMPROVES, SMALL),
    Claim("β = 0.2 improves it", "recommended: β = 0.2 less 0", Says.IMPROVES),
    Claim("β = 0.1 improves it, over-trained", "over-trained: β = 0.1 less 0", Says.IMPROVES),
    Claim("– on ARC-Easy", "over-trained: β = 0.1 less 0", Says.IMPROVES, task=ARC),
    Claim("– the 0.5B", "over-trained: β = 0.1 less 0", Says.IMPROVES, SMALL),
    Claim("β = 0.3 improves it, over-trained", "over-trained: β = 0.3 less 0", Says.IMPROVES),
    Claim("– on ARC-Easy", "over-trained: β = 0.3 less 0", Says.IMPROVES, task=ARC),
    Claim("– on HellaSwag", "over-trained: β = 0.3 less 0", Says.IMPROVES, task=HELLASWAG),
    Claim("β = 0.5 improves it, over-trained", "over-trained: β = 0.5 less 0", Says.IMPROVES),
    Claim(
        "The summed, clipped loss changes what β = 0.1 does",
        "– less that of `recommended`, sum, clipped",
        Says.CHANGES,
    ),
    Claim(
        "In open-instruct's own script β = 0.1 improves it",
        "open-instruct's script: 0.1 less 0",
        Says.IMPROVES,
    ),
    Claim(
        "β = 0.1 is better than β = 0 at equal held-out loss",
        "equal held-out loss: 0.1 less 0",
        Says.IMPROVES,
    ),
    Claim(
        "A temperature after β = 0 improves it",
        "temperature after β = 0, less β = 0",
        Says.IMPROVES,
    ),
    Claim("– on ARC-Easy", "temperature after β = 0, less β = 0", Says.IMPROVES, task=ARC),
    Claim("– on HellaSwag", "temperature after β = 0, less β = 0", Says.IMPROVES, task=HELLASWAG),
    Claim(
        "A temperature after β = 0 is better than β = 0.1",
        "temperature after β = 0, less β = 0.1",
        Says.IMPROVES,
    ),
    Claim("– on ARC-Easy", "temperature after β = 0, less β = 0.1", Says.IMPROVES, task=ARC),
    Claim("– on HellaSwag", "temperature after β = 0, less β = 0.1", Says.IMPROVES, task=HELLASWAG),
    Claim(
        "A temperature after β = 0 is better than β = 0.3",
        "temperature after β = 0, less β = 0.3",
        Says.IMPROVES,
    ),
    Claim(
        "A temperature after over-training improves it",
        "over-trained: temperature after β = 0, less β = 0",
        Says.IMPROVES,
    ),
    Claim(
        "– on ARC-Easy",
        "over-trained: temperature after β = 0, less β = 0",
        Says.IMPROVES,
        task=ARC,
    ),
    Claim(
        "– on HellaSwag",
        "over-trained: temperature after β = 0, less β = 0",
        Says.IMPROVES,
        task=HELLASWAG,
    ),
    Claim(
        "A temperature after over-training is better than β = 0.5",
        "over-trained: temperature after β = 0, less β = 0.5",
        Says.IMPROVES,
    ),
    Claim(
        "DACA's temperature after β = 0, fitted without answers, improves it",
        "DACA's temperature after β = 0, less β = 0",
        Says.IMPROVES,
    ),
    Claim("– on ARC-Easy", "DACA's temperature after β = 0, less β = 0", Says.IMPROVES, task=ARC),
    Claim(
        "– on HellaSwag",
        "DACA's temperature after β = 0, less β = 0",
        Says.IMPROVES,
        task=HELLASWAG,
    ),
    Claim(
        "DACA's temperature does as well as one fitted with answers",
        "DACA's temperature (of the test) less one of val",
        Says.AS_WELL,
    ),
    Claim(
        "Training on half the data does as well as β = 0.1",
        "half the conversations, less β = 0.1",
        Says.AS_WELL,
    ),
    Claim(
        "Averaging weights with the base model does as well as β = 0.1",
        "averaged with base, less β = 0.1",
        Says.AS_WELL,
    ),
    Claim(
        "Spreading β by token frequency is better than uniformly",
        "unigram less uniform, β = 0.1",
        Says.IMPROVES,
    ),
    Claim(
        "Spreading β as the base model predicts is better than uniformly",
        "base mean less uniform, β = 0.1",
        Says.IMPROVES,
    ),
    Claim(
        "The filtered gradient does as well as the exact one",
        "filtered less exact, β = 0.1",
        Says.AS_WELL,
    ),
]

HEADING = """# What label smoothing does to real models: all tables

Made from the published records by `python -m studies.claims.appendix`, in 17 minutes of processor
time and without a GPU. What the tables mean, and what follows from them, is on [the page of the
claims](README.md); [how it was made](README.md#how-it-was-made) too.

A *squared calibration error* is debiased, so that its expectation is 0 for a calibrated model, and
is told × 1000. Differences are read from β = 0 of the same setting, unless a row names something
else; below 0 is better for errors and log losses. Square brackets have the 95 % interval over
questions and seeds, round ones the number of seeds, and bold says that the interval leaves out 0.
In the names of rows *less* means minus.
"""
CLAIMS_HEADING = """## The claims, one by one

Of the 1.5B on MMLU, as recommended, unless a row names something else: changes of the squared
calibration error × 1000. The first rows are against the model before fine-tuning. *Not read*: a
temperature is fitted among the choices alone.

- *Confirmed*: every interval that was read leaves out 0 on the side that the claim says. Where the
  claim is that something *does as well*, every interval lies between −0.2 and 0.2 instead.
- *Partly confirmed*: one of two intervals does, and the other one includes 0.
- *Refuted*: an interval leaves out 0 on the side against the claim.
- *No difference shown*: every interval includes 0.
"""
HOW_THE_RUNS_WERE_MADE = """## How the runs were made

- **Learning rates** were chosen by held-out loss at β = 0 on one seed, out of 5e-6, 2e-5, 5e-5 and
  2e-4: 5e-6, the lowest tried, for the 1.5B; 2e-5 for the 0.5B and Gemma; 2e-4, the highest tried,
  for SmolLM2.
- **Seeds**: five for the 1.5B; three for its comparisons with the summed, clipped loss, at equal
  held-out loss, with the filtered gradient and with open-instruct's script, and three for the other
  models.
- **Machines**: H100s and H200s, torch 2.11.0, transformers 5.17.0. The 1.5B's temperatures,
  averaged weights and entropy gaps are from models that were trained a second time, with the same
  seeds. A temperature so fitted is applied to the answers of the first training.
- **Equal held-out loss**: smoothing raises the held-out loss, so β = 0 was also trained at a
  learning rate whose held-out loss is near that of β = 0.1. That compares two learning rates as
  well.
- **Averaged weights**: the tuned model's share is 0.25, 0.5, 0.75 or 1, whichever has the least log
  loss on MMLU's validation questions.
- **DACA** (Luo et al. 2025) fits a temperature without answers: on MMLU's questions, where the base
  and the tuned model choose the same, so that their confidences agree.
- **The temperatures** were sought between 1/54.6 and 54.6. For a model at chance log loss falls as
  long as the temperature rises, so that those of Gemma and SmolLM2 stand at the end of the search
  or near it.

`records/MODEL.parquet` has a row for every question of every run, `records/questions.parquet` says
what was asked, and `records/manifest.json` holds the SHA-256 of each file. pandas reads them alone;
log-probabilities are in steps of 1/128. In seven trained runs of the 1.5B (seeds 0 and 1) the
column `learning_rate` is empty, and only the name in the column `run` has the rate: pandas drops
such rows when it groups by `learning_rate`, unless `dropna=False` is given.

    runs = pandas.read_parquet("studies/claims/records/qwen2.5-coder-1.5b.parquet")
    questions = pandas.read_parquet("studies/claims/records/questions.parquet")
    answers = runs.dropna(subset="task").merge(questions, on=["task", "question"])
    answers["logprobs"] = answers.logprob_steps / 128
"""
OWN_TEXT = """## Own text

Smoothed models write more random text at temperature 1, seen on Gemma 3 270M alone. It continued
256 of Alpaca's prompts that no run had seen, with 128 tokens each. The entropy gap of sampled text
is the entropy of the model's predictions along its own text minus its log loss on reference
answers, in nats a token; ± is half of a 95 % t interval over four or five seeds.

| β | log loss at temperature 1 | entropy gap | log loss at temperature 0.8 | entropy gap |
|---|---|---|---|---|
| 0 | 1.694 | +0.304 ± 0.049 | 1.762 | −0.508 ± 0.011 |
| 0.1 | 1.894 | +5.399 ± 0.189 | 1.804 | −0.033 ± 0.054 |

A share β of all draws falls on an arbitrary token of the vocabulary, and the text goes on from
there. This table is of 2026-11-22, and its records were not kept: `.venv/bin/python
slurm/claims.py seeds` at commit 091aee3 trains and measures such runs anew
(`gemma-seeds/results/entropy.md`)."""


def main() -> None:
    """Write the appendix, its figures and the page's table."""
    folder = Study.runs_folder
    labels = labels_of_models(Study.store.models(), plan_sweep(CONFIG, []).sweep.model_labels)
    # The models that answer above chance come first.
    models = sorted(labels, key=lambda model: (model not in (LARGE, SMALL), labels[model]))
    runs_of = cache(lambda model: answered_runs(Study(model, folder)))
    write_text(HERE / "APPENDIX.md", appendix(models, labels, runs_of))
    table = table_of_the_page(labels, runs_of)
    write_text(HERE / "README.md", with_table(read_text(HERE / "README.md"), table))
    draw_forest(Study(LARGE, folder), HERE / "forest.png")
    recipes = summary.recipes_of_first_tables()
    rows = {task: summary.rows_of_recipes(runs_of(LARGE), task, recipes) for task in LETTER_TASKS}
    summary.draw_ece(rows, HERE / "ece.png")


RunsOf = Callable[[str], list[AnsweredRun]]


def appendix(models: list[str], labels: dict[str, str], runs_of: RunsOf) -> str:
    """The whole text of APPENDIX.md."""
    lines = [HEADING, CLAIMS_HEADING, *table_of_claims(runs_of), ""]
    lines += ["## What smoothing changes", ""]
    lines += [
        "Minus β = 0, in points for accuracy and in nats for log loss. The figure has the squared "
        "calibration errors of all models: filled marks stand for the choices, hollow ones for all "
        "tokens, and marks left of the line are better calibrated.",
        "",
        "![What each β does to the squared calibration error, with 95 % intervals](forest.png)",
        "",
    ]
    for task, title in LETTER_TASKS.items():
        lines += [f"### {title}: what smoothing changes", ""]
        lines += table_of_changes([LARGE, SMALL], task, labels, runs_of)
    for model in models:
        lines += [f"## {labels[model]}", "", *tables_of_model(model, runs_of(model))]
    return "\n".join([*lines, HOW_THE_RUNS_WERE_MADE, OWN_TEXT, ""])


def tables_of_model(model: str, runs: list[AnsweredRun]) -> list[str]:
    """What `summary` and `report` print of a model."""
    lines = summary.lines(runs)
    lines += ["Differences of the squared calibration error × 1000, by task and reading:", ""]
    return lines + report.lines(Study(model), runs)


def table_of_claims(runs_of: RunsOf) -> list[str]:
    """The claims with their verdicts, and what survives a correction for their number."""
    found = [differences_of(claim, runs_of) for claim in CLAIMS]
    estimates = [each.estimate for readings in found for each in readings.values()]
    survivors = stats.holm([estimate.p_no_difference for estimate in estimates])
    survives = {id(each): kept for each, kept in zip(estimates, survivors, strict=True)}
    lines = ["| claim | verdict | among the choices | among all tokens |", "|---|---|---|---|"]
    for claim, readings in zip(CLAIMS, found, strict=True):
        cells = []
        for reading in READINGS:
            cell = "not read"
            if reading in readings:
                estimate = readings[reading].estimate
                cell = told(estimate) + (" ✓" if survives[id(estimate)] else "")
            cells.append(cell)
        lines.append(f"| {claim.words} | {verdict(claim.says, readings)} | {' | '.join(cells)} |")
    significant = sum(estimate.significant for estimate in estimates)
    lines += [
        "",
        f"These are {len(CLAIMS)} claims with {len(estimates)} intervals. **The verdicts are not "
        "corrected for their number**: if nothing had any effect, about "
        f"{0.05 * len(estimates):.0f} of {len(estimates)} intervals would leave out 0 by luck. "
        f"{significant} do, and {sum(survivors)} of these, marked ✓, survive Holm's correction for "
        f"all {len(estimates)}.",
    ]
    return lines


def differences_of(claim: Claim, runs_of: RunsOf) -> dict[ConfidenceDefinition, Difference]:
    """A claim's difference in each reading that was read."""
    (contrast,) = (each for each in CONTRASTS if each.name == claim.contrast)
    differences: dict[ConfidenceDefinition, Difference] = {}
    for reading in READINGS:
        found = difference(runs_of(claim.model), contrast, Quantity(claim.task, reading))
        if found is not None:
            differences[reading] = found
    return differences


def verdict(says: Says, differences: dict[ConfidenceDefinition, Difference]) -> str:
    """The verdict on a claim, by the rule that the appendix prints above its table."""
    signs = {}
    for reading, each in differences.items():
        signs[reading] = 0
        if each.estimate.significant:
            is_worse = each.estimate.value is not None and each.estimate.value > 0
            signs[reading] = 1 if is_worse else -1
    wrong_sign = {Says.HARMS: -1, Says.IMPROVES: 1, Says.AS_WELL: 1}.get(says)
    against = [reading for reading, sign in signs.items() if sign and sign == wrong_sign]
    if against:
        where = f" {READINGS[against[0]]}" if len(against) < len(signs) else ""
        return f"refuted{where}"
    if says is Says.AS_WELL:
        if all(is_within_margin(each.estimate) for each in differences.values()):
            return "confirmed"
        return "not settled"
    shown = [reading for reading, sign in signs.items() if sign]
    if not shown:
        return "no difference shown"
    if len(shown) == len(signs):
        return "confirmed"
    return f"partly confirmed: {READINGS[shown[0]]}"


def is_within_margin(estimate: stats.Estimate) -> bool:
    """Whether the whole interval is so near 0 that the claim "does as well" holds."""
    if estimate.low is None or estimate.high is None:
        return False
    return max(-estimate.low, estimate.high) <= AS_WELL_MARGIN


def told(estimate: stats.Estimate, digits: int = 1) -> str:
    """A difference with its interval, bold where that leaves out 0."""
    value = f"{estimate.value:+.{digits}f}"
    if float(value) == 0:
        value = value[1:]
    if estimate.low is None:
        return value.replace("-", "−")
    if estimate.significant:
        value = f"**{value}**"
    return f"{value} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]".replace("-", "−")


def table_of_changes(
    models: list[str], task: str, labels: dict[str, str], runs_of: RunsOf
) -> list[str]:
    """What each β changes on a task: accuracy, calibration and log loss."""
    columns = {
        "accuracy, points": (Quantity(task, "choices", None, "accuracy", 100), 2),
        "squared error, choices": (Quantity(task, "choices"), 1),
        "squared error, all tokens": (Quantity(task, "vocabulary"), 1),
        "log loss, choices": (Quantity(task, "choices", None, "nll", 1), 3),
        "log loss, all tokens": (Quantity(task, "vocabulary", None, "nll", 1), 3),
    }
    lines = [f"| model and setting | β | {' | '.join(columns)} |", "|---" * 7 + "|"]
    for model in models:
        for part, setting in summary.SETTING_LABELS.items():
            for beta in BETAS[1:]:
                effect = smoothing_effect("", part, beta)
                cells = []
                for quantity, digits in columns.values():
                    found = difference(runs_of(model), effect, quantity)
                    cells.append("–" if found is None else told(found.estimate, digits))
                lines.append(f"| {labels[model]}, {setting} | {beta:g} | {' | '.join(cells)} |")
    return [*lines, ""]


def table_of_the_page(labels: dict[str, str], runs_of: RunsOf) -> str:
    """The page's table of levels: two models on three tasks, of the 0.5B fewer β."""
    headings = [
        f"{title}: {column}"
        for title in LETTER_TASKS.values()
        for column in ("accuracy, %", "ECE", "log loss")
    ]
    lines = [f"| model and setting | β | {' | '.join(headings)} |", "|---" * 11 + "|"]
    everything = summary.recipes_of_first_tables()
    some = [each for each in everything if each.beta in ("", "0", "0.1", "0.3")]
    for model, recipes in ((LARGE, everything), (SMALL, some)):
        rows: dict[tuple[str, str], list[str]] = {}
        for task in LETTER_TASKS:
            for row in summary.rows_of_recipes(runs_of(model), task, recipes):
                cells = summary.cells_of_row(row)
                accuracy, ece, ece_tokens, _, loss_tokens = (
                    cell.partition(" [")[0] for cell in cells[3:]
                )
                levels = rows.setdefault((row.setting, row.beta), [])
                levels += [accuracy, f"{ece}; {ece_tokens}", loss_tokens]
        for (setting, beta), levels in rows.items():
            name = f"**{labels[model]}**, {setting}" if not beta else setting
            lines.append(f"| {name} | {beta} | {' | '.join(levels)} |")
    return "\n".join(lines)


def with_table(page: str, table: str) -> str:
    """A page with a table between its two marks."""
    before, _, rest = page.partition(TABLE_BEGINS)
    _, _, after = rest.partition(TABLE_ENDS)
    return f"{before}{TABLE_BEGINS}\n{table}\n{TABLE_ENDS}{after}"


if __name__ == "__main__":
    main()
