"""The page of claims quotes its appendix, and the appendix is what the published records say."""

from functools import cache

import pytest
from studies.claims import appendix, derived
from studies.claims.appendix import LARGE, SMALL
from studies.claims.parts import HERE, Study


def page(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


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
