"""The page of claims quotes its appendix, and the appendix is what the published records say."""

import re
import subprocess
import sys
from functools import cache

import pytest
from studies.claims import answers, appendix, contrasts, derived
from studies.claims.appendix import LARGE, SMALL, Says, verdict
from studies.claims.contrasts import Difference, Quantity
from studies.claims.parts import HERE, PUBLISHED, Study

from calibeval.measures.stats import Estimate


def page(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("says", "choices", "tokens", "expected"),
    [
        (Says.IMPROVES, (-3, -1), (-2, -1), "confirmed"),
        (Says.IMPROVES, (-3, -1), (-2, 1), "partly confirmed: among the choices"),
        (Says.IMPROVES, (-3, 1), (1, 2), "refuted among all tokens"),
        (Says.IMPROVES, (1, 3), (1, 2), "refuted"),
        (Says.IMPROVES, (-3, 1), (-2, 1), "no difference shown"),
        (Says.HARMS, (1, 3), (1, 2), "confirmed"),
        (Says.HARMS, (-3, -1), (-2, -1), "refuted"),
        (Says.CHANGES, (-3, -1), (1, 2), "confirmed"),
        (Says.AS_WELL, (-0.1, 0.1), (-0.2, 0.0), "confirmed"),
        (Says.AS_WELL, (-0.3, 0.1), (-0.2, 0.1), "not settled"),
        (Says.AS_WELL, (0.1, 0.3), (-0.1, 0.1), "refuted among the choices"),
    ],
)
def test_a_verdict_follows_from_intervals(says, choices, tokens, expected):
    differences = {}
    for reading, (low, high) in zip(appendix.READINGS, (choices, tokens), strict=True):
        estimate = Estimate((low + high) / 2, low, high)
        differences[reading] = Difference(estimate, 3)
    assert verdict(says, differences) == expected


def test_the_page_has_its_appendixs_figures():
    """Every level, p and interval of the page stands in the appendix."""
    figures = re.compile(r"\d\.\d{3}\b|\[[−+\d., ]+\]")
    stated = set(figures.findall(page("README.md")))
    assert len(stated) > 100
    assert stated <= set(figures.findall(page("APPENDIX.md")))


def test_the_appendixs_row_of_a_small_model_is_what_the_records_say(tmp_path):
    """SmolLM2's β = 0.1 against 0, which takes seconds; the slow test below makes all anew."""
    model = "smollm2-135m"
    runs = []
    for record in PUBLISHED.runs(model):
        if answers.PLAIN.matches(record) or answers.SMOOTHED.matches(record):
            record.tasks = {"mmlu": record.tasks["mmlu"]}
            PUBLISHED.unpack(model, record, PUBLISHED.questions(), tmp_path / record.run)
            runs.append(answers.AnsweredRun(record, tmp_path / record.run))
    name = "recommended: β = 0.1 less 0"
    (contrast,) = (each for each in contrasts.CONTRASTS if each.name == name)
    section = page("APPENDIX.md").split("## SmolLM2")[1].split("\n## ")[0]
    (row, *_) = [line for line in section.splitlines() if line.startswith(f"| {name} |")]
    for reading, cell in zip(appendix.READINGS, row.split(" | ")[1:], strict=False):
        estimate = contrasts.difference(runs, contrast, Quantity("mmlu", reading)).estimate
        ends = [f"{end:+.2f}" for end in (estimate.value, estimate.low, estimate.high)]
        assert cell.replace("**", "") == "{} [{}, {}] (3)".format(*ends)


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory):
    """The runs of a model with their answers, which are unpacked once."""
    folder = tmp_path_factory.mktemp("claims")
    return cache(lambda model: derived.answered_runs(Study(model, folder)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_claims_and_the_pages_table_are_what_the_records_say(runs_of):
    assert "\n".join(appendix.table_of_claims(runs_of)) in page("APPENDIX.md")
    labels = {LARGE: "Qwen2.5-Coder 1.5B", SMALL: "Qwen2.5-Coder 0.5B"}
    table = appendix.table_of_the_page(labels, runs_of)
    assert appendix.with_table(page("README.md"), table) == page("README.md")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_models_tables_are_what_the_records_say(runs_of):
    model = "smollm2-135m"
    lines = appendix.tables_of_model(model, runs_of(model))
    assert "\n".join(lines) in page("APPENDIX.md")


@pytest.mark.slow
def test_the_page_on_ones_own_model_prints_what_check_prints(runs_of):
    """Of seed 0 of the over-trained 1.5B at β = 0, and of the model before fine-tuning."""
    base = answers.files_by_seed(runs_of(LARGE), answers.BASE, "mmlu")[None]
    tuned = answers.files_by_seed(runs_of(LARGE), answers.OVER_TRAINED, "mmlu")[0]
    command = [sys.executable, "-m", "calibeval", "check", str(base), str(tuned)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    guide = (HERE.parents[1] / "docs" / "should-i-smooth.md").read_text(encoding="utf-8")
    example = guide.split("(#the-example)):\n\n")[1].split("\n\n")[0]
    lines = [line.strip() for line in example.splitlines() if line.strip() != "…"]
    assert len(lines) == 5
    for line in lines:
        assert line.removesuffix("…").strip() in done.stdout
