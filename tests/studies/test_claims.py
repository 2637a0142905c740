"""The claims: each part is a sweep that plans, and its runs are the published ones."""

import pytest
from studies.claims import parts, training
from studies.claims.parts import CONFIG, PARTS, Study
from studies.claims.records import RecordStore

from sweeps.runs.grid import plan_sweep

MODEL = "smollm2-135m"
PUBLISHED = RecordStore(parts.HERE / "records")
# Of all models but the 1.5B and, in part, the 0.5B.
NOT_RUN = {"high-rate", "over-trained", "sum", "script"}


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        "gemma-3-270m",
        pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.slow),
        pytest.param("qwen2.5-coder-1.5b", marks=pytest.mark.slow),
    ],
)
def test_planned_runs_are_the_published_ones(model):
    """By their names; otherwise they would be trained again. What is not published was not run."""
    study = Study(model)
    planned = set()
    for part in PARTS:
        plan = plan_sweep(CONFIG, parts.sweep_overrides(study, part, []))
        planned |= {training.record_key(part, run) for run in (*plan.baselines, *plan.runs)}
    trained = {key for key in PUBLISHED.keys(model) if key[0] not in ("temperature", "averaged")}
    assert trained - planned == set()
    not_run = {"qwen2.5-coder-1.5b": set(), "qwen2.5-coder-0.5b": NOT_RUN - {"over-trained"}}
    assert {part for part, _ in planned - trained} == not_run.get(model, NOT_RUN)
