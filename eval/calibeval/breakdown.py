"""Metrics by subject, and by MMLU's four official categories."""

import numpy as np

from calibeval.metrics import CONFIDENCES, drawn, scores, summary, values
from calibeval.records import Records

SHOWN = ("accuracy", "ece", "rms", "nll", "brier")

# The four categories of Hendrycks et al. 2021, Table 8; subjects of other data have none.
CATEGORIES = {
    "STEM": """abstract_algebra astronomy college_biology college_chemistry
        college_computer_science college_mathematics college_physics computer_security
        conceptual_physics electrical_engineering elementary_mathematics high_school_biology
        high_school_chemistry high_school_computer_science high_school_mathematics
        high_school_physics high_school_statistics machine_learning""",
    "humanities": """formal_logic high_school_european_history high_school_us_history
        high_school_world_history international_law jurisprudence logical_fallacies moral_disputes
        moral_scenarios philosophy prehistory professional_law world_religions""",
    "social sciences": """econometrics high_school_geography high_school_government_and_politics
        high_school_macroeconomics high_school_microeconomics high_school_psychology
        human_sexuality professional_psychology public_relations security_studies sociology
        us_foreign_policy""",
    "other": """anatomy business_ethics clinical_knowledge college_medicine global_facts human_aging
        management marketing medical_genetics miscellaneous nutrition professional_accounting
        professional_medicine virology""",
}


def breakdown(of: Records, by: str, count: int = 1000) -> dict[str, dict]:
    """{group: {"questions", "metrics"}} with intervals; `by` is "subject" or "category"."""
    if by == "category":
        category = {s: name for name, subjects in CATEGORIES.items() for s in subjects.split()}
        keys = np.array([category.get(s, "uncategorised") for s in of.subjects])
    else:
        keys = of.subjects
    return {name: _group(of, keys == name, count) for name in sorted(set(keys.tolist()))}


def _group(of: Records, member: np.ndarray, count: int) -> dict:
    at = np.flatnonzero(member)
    ids = [of.ids[i] for i in at]
    part = Records(
        of.path, ids, of.subjects[at], of.labels[at], of.logprobs[at], of.letter_mass[at], of.model
    )
    metrics = {}
    for confidence in CONFIDENCES:
        found = scores(part, confidence)
        samples, exact = drawn(found, count, SHOWN), values(found, SHOWN)
        metrics[confidence] = {name: summary(exact[name], samples[name]) for name in SHOWN}
    return {"questions": len(at), "metrics": metrics}
