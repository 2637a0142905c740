"""The appendix of the page of claims: of one model it is what the published records say, and each
verdict follows from its intervals. `python -m studies.claims.appendix` makes all of it anew, in 17
minutes of processor time."""

import re

import pytest
from studies.claims import appendix, derived, report, summary
from studies.claims.contrasts import CONTRASTS, Difference
from studies.claims.parts import HERE, Study

from calibeval.measures.stats import Estimate


def page(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_models_tables_are_what_the_records_say(tmp_path, monkeypatch):
    """Its levels, losses and temperatures, and of its many differences those of one contrast."""
    contrasts = [each for each in CONTRASTS if each.name == "recommended: β = 0.1 less 0"]
    monkeypatch.setattr(report, "CONTRASTS", contrasts)
    study = Study("smollm2-135m", tmp_path)
    runs = derived.answered_runs(study)
    published = page("APPENDIX.md").split("\n## SmolLM2 135M\n\n")[1]
    assert published.startswith("\n".join(summary.lines(runs)))
    lines = "\n".join(report.lines(study, runs)).splitlines()
    assert sum(line.startswith("| recommended: β = 0.1 less 0 |") for line in lines) == 2
    assert [line for line in lines if line not in published.splitlines()] == []


def difference_of(cell: str) -> Difference:
    """The difference that a cell of the table of claims tells: "**−2.1** [−3.2, −1.1] ✓"."""
    numbers = re.findall(r"-?[0-9.]+", cell.replace("−", "-"))
    value, low, high = map(float, numbers)
    return Difference(Estimate(value=value, low=low, high=high), seeds=1)


def test_the_verdicts_follow_from_the_intervals_beside_them():
    table = page("APPENDIX.md").split("\n| claim | verdict |")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == [claim.words for claim in appendix.CLAIMS]
    for claim, (_, verdict, *cells) in zip(appendix.CLAIMS, rows, strict=True):
        differences = {}
        for reading, cell in zip(appendix.READINGS, cells, strict=True):
            if cell != "not read":
                differences[reading] = difference_of(cell)
        assert appendix.verdict(claim.says, differences) == verdict, claim
