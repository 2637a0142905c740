"""The paper's claims on a real model, on this machine's GPUs.

    python -m studies.gguf; python -m sweeps prefetch studies/claims/config.yaml
    python -m studies.claims MODEL [PART or STEP …] [key=value …]

MODEL is a folder of models/. This does the parts that are named, one after another, and then the
steps, which rest on what the parts have trained; where none is named, it does all. The records of
each run are packed into records/MODEL/ as it ends, and `summary` and `report` merge them into
records/MODEL.parquet. What is there is not run again, on whatever machine. Parts, each a sweep:

    grid          4 learning rates at β = 0; the one of the lowest held-out loss is that of all
                  parts below that name no other
    recommended   β of 0, 0.1, 0.2, 0.3 and 0.5, one epoch of the mean loss
    high-rate     `recommended`, of MMLU alone, at 2e-4, the top of the paper's grid
    over-trained  `recommended` at 5e-5, two epochs of the summed loss
    sum           the summed loss, with clipped gradients
    filtered      the filtered gradient, at β = 0.1
    equal         β = 0 at the rate whose held-out loss is that of `recommended` at β = 0.1
    script        β of 0 and 0.1 through open-instruct's finetune.py (OPEN_INSTRUCT_DIR)
    unigram       β spread over tokens as often as they are learnt, at β = 0.1
    base-mean     β spread as the base model predicts them in the mean, at β = 0.1
    half-data     half the conversations, at β = 0
    two-epochs    all of them twice, at β = 0

Gradients are clipped in `sum` and `script` alone. The base model is asked each task once, along
with the first part that asks it; all parts share its records.

Steps:

    temperature   a temperature fitted on MMLU's val questions after β = 0
    averaged      weights averaged with the base model's after β = 0
    entropy-gap   entropy less NLL of each model that is still there, and the temperature at
                  which it is 0
    summary       accuracy, calibration error and log loss of `recommended`, `over-trained`,
                  `high-rate` and `two-epochs`, as the records tell; draws the calibration error
                  of the first two
    report        differences between settings, as the records tell, and forest.png, which draws
                  what smoothing does to all models

`python -m studies.claims.appendix` makes the tables of the study's pages of all published models.

An interrupted run goes on where its folder is. key=value overrides the sweep of every part, for
example workers=6 for six runs at a time, or grid.seed=[0,1,2]. A key that open-instruct's script
does not have, such as train.max_tokens, makes the part `script` fail; the others are done all the
same. Without seeds in the command, `grid` has one seed, `sum`, `filtered`, `equal` and `script`
have three, and other parts five (Gemma, SmolLM2 and the 0.5B three), as in the published records.
"""

import os
import sys
from pathlib import Path

from calibeval.io import CONTINUES, InputError, finish
from studies.claims.parts import PARTS, REPOSITORY, Part, Rate, Study, sweep_overrides
from studies.claims.posthoc import average_weights, fit_temperatures, measure_entropy_gaps
from studies.claims.records import RecordStore
from studies.claims.report import report
from studies.claims.summary import summary
from studies.claims.training import train

# What rests on trained models or on the records, by its name, in the order in which it is done.
STEPS = {
    "temperature": fit_temperatures,
    "averaged": average_weights,
    "entropy-gap": measure_entropy_gaps,
    "summary": summary,
    "report": report,
}


def main(
    words: list[str], runs_folder: Path = Study.runs_folder, store: RecordStore = Study.store
) -> int:
    """Do the parts and steps named, or all; returns the exit code."""
    names = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if "-h" in words or "--help" in words:
        print(__doc__)
        return 0
    if not names:
        print(__doc__)
        return 2
    model, *parts_and_steps = names
    study = Study(model, runs_folder, store)
    return finish(lambda: do_parts(study, parts_and_steps, overrides), CONTINUES)


def do_parts(study: Study, names: list[str], overrides: list[str]) -> None:
    """Do the parts and steps named, or all; raises InputError naming the parts that failed.

    The InputError of a step is raised at once: the steps after it are not done, and the parts that
    failed before it are not named.
    """
    os.chdir(REPOSITORY)
    known = [*(part.name for part in PARTS), *STEPS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"{', '.join(unknown)}: no such part or step; known: {', '.join(known)}")
    wanted = names or known
    failed: list[str] = []
    for part in PARTS:
        if part.name not in wanted:
            continue
        if rate_is_unknown(part, failed):
            failed.append(part.name)
            continue
        is_whole = finish_part(study, part, overrides)
        if not is_whole:
            failed.append(part.name)
    # Steps rest on records, and would fail without any. If a part has failed, that is why there are
    # none, and is told already; if none has, the step itself is to tell.
    has_records = bool(study.store.runs(study.model))
    for name, step in STEPS.items():
        if name in wanted and (has_records or not failed):
            step(study)
    if failed:
        then = "why is said above; once that is mended, the same command goes on"
        raise InputError(f"not whole: {', '.join(failed)}; {then}")


def finish_part(study: Study, part: Part, overrides: list[str]) -> bool:
    """Train what a part lacks; returns whether it is whole now. Why it is not goes to stderr."""
    try:
        part_overrides = sweep_overrides(study, part, overrides)
        return train(study, part, part_overrides) == 0
    except InputError as error:
        # The part has no learning rate, or does not know a key of `overrides`, or lacks a file. The
        # parts after it may do without.
        print(f"error: {part.name}: {error}", file=sys.stderr)
        return False


def rate_is_unknown(part: Part, failed: list[str]) -> bool:
    """Whether the learning rate of a part comes from one that has failed."""
    if part.rate is Rate.OWN:
        return False
    # The rate of an equal loss depends on which runs of `recommended` there are, too.
    waits_for_recommended = part.rate is Rate.EQUAL_LOSS and "recommended" in failed
    return "grid" in failed or waits_for_recommended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
