"""The page of claims quotes its appendix, and the appendix is what the published records say."""

from functools import cache

import pytest
from studies.claims import appendix, derived
from studies.claims.appendix import LARGE, SMALL, Says, verdict
from studies.claims.contrasts import Difference
from studies.claims.parts import HERE, Study

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
        (Says.HARMS, (1, 3), (1, 2), "confirmed"),
        (Says.CHANGES, (-3, -1), (1, 2), "confirmed"),
        (Says.AS_WELL, (-0.1, 0.1), (-0.2, 0.0), "confirmed"),
        (Says.AS_WELL, (0.1, 0.3), (-0.1, 0.1), "refuted among the choices"),
    ],
)
def test_a_verdict_follows_from_intervals(says, choices, tokens, expected):
    differences = {}
    for reading, (low, high) in zip(appendix.READINGS, (choices, tokens), strict=True):
        estimate = Estimate((low + high) / 2, low, high)
        differences[reading] = Difference(estimate, 3)
    assert verdict(says, differences) == expected


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
