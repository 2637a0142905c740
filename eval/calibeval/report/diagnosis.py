"""Should this model be smoothed, or given a temperature? Two record files answered in sentences.

`check` compares a model before and after fine-tuning on the same questions and says which way each
errs, whether accuracy changed, how much one temperature would mend, and what to do next. A
difference is called one where its 95 % interval leaves out 0, and a model miscalibrated by a test
at 5 %; else no difference is shown. Each of these stands for itself: they are not corrected for
being several, and the sentences say so. What to do is as careful: a check of one run cannot promise
what smoothing would do, so it names the trial that would tell.

The temperature needs no validation questions here, because it is cross-fitted: the questions are
split at random into halves, and each half is read at the temperature that was fitted on the other.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import logsumexp

from calibeval import measures
from calibeval import records as record_files
from calibeval.ask.tasks import splits_of
from calibeval.io import InputError, atomic_write, counted
from calibeval.measures import (
    AMONG_WORDS,
    SIGNIFICANCE,
    ConfidenceDefinition,
    Estimate,
    Evaluation,
    same_normaliser,
    same_prompts,
    same_questions,
    scaling,
    stats,
)
from calibeval.records import WRITTEN_CONFIDENCES, Records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPLIT_SEED = 0
# Fields of `Check` that JSON knows by another name.
JSON_NAMES = {
    "change_of_accuracy": "accuracy",
    "change_by_tuning": "worsened",
    "change_by_temperature": "mended",
}
FEWEST_QUESTIONS = 2 * scaling.FEWEST_ANSWERS
ERRORS = ("ece", "rms_debiased")  # the ECE with its floor, and the squared error with its draws
TICKS = (0, 0.5, 1)
NEAR_P = (SIGNIFICANCE / 5, 2 * SIGNIFICANCE)  # between these a verdict is printed with its p
GUIDE = "docs/should-i-smooth.md"
CAVEAT = (
    "All this is of one run on these questions: another seed may differ. Each verdict is a test of "
    "its own at 5 %, and they are not corrected for being several."
)
TRIAL = (
    "Smoothing is a trial, not a promise: train with β = 0, 0.1 and 0.2, three seeds each, and "
    f"compare with β = 0 on every task that you use (steps 4 and 5 of {GUIDE}). Smoothing makes a "
    "model less sure among all tokens, whatever the task, and log loss there mostly rises. If this "
    "model was smoothed already, try its β and a larger one instead of 0.1 and 0.2."
)
MORE_QUESTIONS = "score more questions, if the task has more"
BOTH_DIRECTIONS = (
    "The model may be too sure at some confidences and not sure enough at others, which "
    f"`--figure` draws, or these questions are too few to tell: {MORE_QUESTIONS}."
)
UNMENDED = (
    "one temperature is not shown to mend the error, of {points:.1f} points on average: "
    f"{MORE_QUESTIONS}, else leave it."
)
# What is said of each verdict: of the probabilities, and what to do about those among all tokens
# and about those among the choices where no temperature is shown to help.
DESCRIPTIONS = {
    "calibrated": "not shown to be wrong ({ece})",
    "over-confident": "over-confident, by {points:.1f} points on average ({ece})",
    "under-confident": "under-confident, by {points:.1f} points on average ({ece})",
    "miscalibrated": "miscalibrated, though not shown to be too high or too low on average ({ece})",
}
ADVICE_AMONG_ALL_TOKENS = {
    "calibrated": "no error is shown, so nothing speaks for smoothing.",
    "over-confident": f"a temperature does not reach these. {TRIAL}",
    "under-confident": "do not smooth, since the model is less sure than it should be already. If "
    "it was trained with smoothing, use a smaller β.",
    "miscalibrated": f"an error is shown, but not its direction. {BOTH_DIRECTIONS}",
}
ADVICE_WITHOUT_TEMPERATURE = {
    "over-confident": UNMENDED,
    "under-confident": f"{UNMENDED} Smoothing would make the model less sure still.",
    "miscalibrated": f"one temperature is not shown to mend the error. {BOTH_DIRECTIONS}",
}
SCORE_ALIKE = (
    "score both with the same options, as `calibeval check BASE TUNED --task … --out DIR` does"
)


@dataclass(frozen=True)
class Reading:
    """How one model errs under one definition of confidence.

    Attributes:
        ece: Expected calibration error, with the value that calibrated models stay below.
        surplus: Mean confidence minus accuracy, with its interval: above 0 it is over-confident.
        verdict: "calibrated" where no error can be shown, else "over-confident",
            "under-confident" or, where the sign of the surplus is not shown, "miscalibrated".
            That may be errors of both signs, or of one sign that has no interval.
    """

    ece: Estimate
    surplus: Estimate
    verdict: str


@dataclass(frozen=True)
class Check:
    """What was found of two models.

    A further field is filled by `check` and told by `sentences`.

    Attributes:
        before, after: The readings by definition of confidence.
        change_of_accuracy: The change of accuracy by fine-tuning, as a share.
        change_by_tuning: By definition of confidence, the change of the squared calibration error
            by fine-tuning; above 0 it made calibration worse.
        letter_masses: The letters' mean probability among all tokens, before and after; None of
            texts, and where the records do not say.
        temperatures: Those of the two halves of the questions, which should be alike.
        cooled_ece: Expected calibration error of the tuned model at these temperatures. ("Cooled"
            is said of any temperature, above 1 or below.)
        cooled_floor: The value that calibrated models stay below at these temperatures.
        change_by_temperature: The change of the squared calibration error by these temperatures;
            below 0 they help. Its interval takes the two temperatures as given. These four are
            None where one half has no best temperature, as when all its answers are right.
        validation_split: The split of the task that a temperature can be fitted on, where the
            tuned model's sidecar tells the task, whose file is there, and that has one.
        temperature_applied: The temperature that the tuned model's answers are at already, by
            their sidecar; None where it tells of none.
        sentences: What all this means, to be printed one after another.
    """

    before: dict[ConfidenceDefinition, Reading]
    after: dict[ConfidenceDefinition, Reading]
    change_of_accuracy: Estimate
    change_by_tuning: dict[ConfidenceDefinition, Estimate]
    letter_masses: tuple[float | None, float | None]
    temperatures: tuple[float, float] | None
    cooled_ece: float | None
    cooled_floor: float | None
    change_by_temperature: Estimate | None
    validation_split: str | None
    temperature_applied: float | None
    sentences: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers and sentences as JSON has them."""
        return {JSON_NAMES.get(name, name): _plain(value) for name, value in vars(self).items()}


def _plain(value: Any) -> Any:
    """What JSON has of a value: of a reading or an estimate a dictionary."""
    if isinstance(value, Estimate):
        return value.as_dict()
    if isinstance(value, Reading):
        value = vars(value)
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return list(value) if isinstance(value, tuple) else value


def check(base: str | Path, tuned: str | Path, figure: str | Path | None = None) -> Check:
    """Compare the records of a model before and after fine-tuning; draw both to `figure`.

    Both must answer the same questions in the same words. `figure` is the name of a PNG file.
    Raises `InputError` for records that cannot be compared, or fewer than 40 questions.
    """
    parts = measures.SUMMARY_PARTS if figure is None else measures.PARTS
    base_evaluation = measures.load(Path(base), parts=parts)
    tuned_evaluation = measures.load(Path(tuned), parts=parts)
    same_questions([base_evaluation, tuned_evaluation])
    same_normaliser(base_evaluation, tuned_evaluation, SCORE_ALIKE)
    same_prompts(base_evaluation, tuned_evaluation, remedy=SCORE_ALIKE)
    answers = record_files.read(Path(tuned))
    if len(answers) < FEWEST_QUESTIONS:
        number = counted(len(answers), "question")
        raise InputError(
            f"{tuned}: {number}; expected {FEWEST_QUESTIONS} or more, since a temperature is "
            "fitted on one half and read on the other; `calibeval compare` takes fewer"
        )
    both = ([base_evaluation], [tuned_evaluation])
    before = readings(base_evaluation)
    after = readings(tuned_evaluation)
    result = Check(
        before=before,
        after=after,
        change_of_accuracy=stats.difference(*both, "accuracy", "choices"),
        change_by_tuning={
            among: stats.difference(*both, "rms_debiased", among)
            for among in after
            if among in before
        },
        letter_masses=(base_evaluation.letter_mass, tuned_evaluation.letter_mass),
        temperatures=None,
        cooled_ece=None,
        cooled_floor=None,
        change_by_temperature=None,
        validation_split=validation_split(Path(tuned)),
        temperature_applied=temperature_applied(Path(tuned)),
        sentences=[],
    )
    if answers.normalise in WRITTEN_CONFIDENCES:
        on_temperature = (
            f"These answers are read by {answers.normalise}: that is no likelihood, so no "
            "temperature is tried."
        )
    else:
        try:
            cooled, temperatures = cross_fitted(answers)
        except scaling.NoTemperature as error:
            on_temperature = (
                f"In one half of these questions {error.reason}; so none is tried on the other "
                "half."
            )
        else:
            result = with_temperatures(result, tuned_evaluation, cooled, temperatures)
            on_temperature = temperature_sentence(result)
    result.sentences.extend(sentences(result, base_evaluation, tuned_evaluation, on_temperature))
    if figure is not None:
        canvas = draw({"before": base_evaluation, "after": tuned_evaluation})
        with atomic_write(figure, "wb") as file:
            canvas.savefig(file, format="png", dpi=200)
    return result


def with_temperatures(
    result: Check, tuned: Evaluation, cooled: Records, temperatures: tuple[float, float]
) -> Check:
    """What was found, with what the cross-fitted temperatures do to the tuned model's answers."""
    cooled_evaluation = measures.measure(cooled, None, ERRORS, measures.SUMMARY_PARTS)
    return replace(
        result,
        temperatures=temperatures,
        cooled_ece=number_of(stats.estimate([cooled_evaluation], "ece", "choices")),
        cooled_floor=cooled_evaluation.floor_tests["choices"]["ece"].floor,
        change_by_temperature=stats.difference(
            [tuned], [cooled_evaluation], "rms_debiased", "choices"
        ),
    )


def cross_fitted(answers: Records) -> tuple[Records, tuple[float, float]]:
    """The answers with each half at the temperature of the other, and both temperatures.

    Raises `scaling.NoTemperature` where none is best for one half.
    """
    order = np.random.default_rng(SPLIT_SEED).permutation(len(answers))
    half = len(answers) // 2
    halves = (order[:half], order[half:])
    logprobs = answers.logprobs.copy()
    temperatures = []
    for fitted_on, read_at in (halves, halves[::-1]):
        used = np.zeros(len(answers), bool)
        used[fitted_on] = True
        temperature, _ = scaling.fit(answers, used)
        temperatures.append(temperature)
        logits = answers.logprobs[read_at] / temperature
        if answers.scoring != "generate":  # a written answer has no others to share with
            logits = logits - logsumexp(logits, axis=1, keepdims=True)
        logprobs[read_at] = logits
    # A temperature of the choices says nothing of all tokens.
    no_mass = np.full(len(answers), np.nan)
    cooled = replace(answers, logprobs=logprobs, letter_mass=no_mass)
    return cooled, (temperatures[0], temperatures[1])


def readings(evaluation: Evaluation) -> dict[ConfidenceDefinition, Reading]:
    """How a model errs, under each definition of confidence that its records have."""
    by_confidence: dict[ConfidenceDefinition, Reading] = {}
    for among in evaluation.confidences:
        ece = stats.estimate([evaluation], "ece", among)
        surplus = stats.estimate([evaluation], "ece_signed", among)
        by_confidence[among] = Reading(ece, surplus, verdict_of(ece, surplus))
    return by_confidence


def verdict_of(ece: Estimate, surplus: Estimate) -> str:
    """Which way a model errs, in a word."""
    if ece.p_calibrated is not None and ece.p_calibrated > SIGNIFICANCE:
        return "calibrated"
    if not surplus.significant:
        return "miscalibrated"
    return "over-confident" if number_of(surplus) > 0 else "under-confident"


def number_of(estimate: Estimate) -> float:
    """The value of an estimate that is known to have one."""
    assert estimate.value is not None
    return estimate.value


def sentences(result: Check, base: Evaluation, tuned: Evaluation, on_temperature: str) -> list[str]:
    """What was found, in plain sentences, the last two of how far it goes and what to do.

    `on_temperature` is the sentence before these: what a temperature does, or why none is tried.
    """
    lines = [accuracy_sentence(result.change_of_accuracy, base, tuned)]
    for among, after in result.after.items():
        change = result.change_by_tuning.get(among)
        lines.append(error_sentence(result.before.get(among), after, change, among))
    if {after.verdict for after in result.after.values()} >= {"over-confident", "under-confident"}:
        lines.append(mass_sentence(result.letter_masses[1]))
    lines.append(on_temperature)
    lines.append(CAVEAT)
    lines.append(advice(result))
    if tuned.scoring == "generate":  # there are no choices that a written answer is among
        for of_choices, of_written in (("among", "of the written"), ("Among", "The written")):
            choices = f"{of_choices} the choices"
            lines = [line.replace(choices, f"{of_written} answers") for line in lines]
    return lines


def accuracy_sentence(change: Estimate, base: Evaluation, tuned: Evaluation) -> str:
    """Whether accuracy changed."""
    before = 100 * number_of(stats.estimate([base], "accuracy", "choices"))
    after = 100 * number_of(stats.estimate([tuned], "accuracy", "choices"))
    text = f"Accuracy went from {before:.1f} % to {after:.1f} % on {tuned.questions:,} questions"
    if change.low is None or change.high is None:
        return f"{text}."
    interval = f"[{100 * change.low:+.1f}, {100 * change.high:+.1f}] points, 95 %"
    if not change.significant:
        return f"{text}: no difference is shown ({interval})."
    direction = "higher" if change.low > 0 else "lower"
    return f"{text}: the tuned model's is {direction} ({interval})."


def error_sentence(
    before: Reading | None, after: Reading, change: Estimate | None, among: ConfidenceDefinition
) -> str:
    """How the tuned model errs under one definition of confidence, and how it erred before.

    `change` says whether that is a difference.
    """
    text = f"The tuned model's probabilities {AMONG_WORDS[among]} are {described(after)}"
    if before is None or change is None:
        return f"{text}."
    text += f"; before fine-tuning they were {described(before)}."
    size = in_thousandths(change)
    if change.low is None:
        return (
            f"{text} The squared calibration error's change has no interval: too few questions "
            "make it up."
        )
    if change.significant:
        direction = "higher" if number_of(change) > 0 else "lower"
        return f"{text} The squared calibration error is {direction} than before{size}."
    text += f" No difference of the squared calibration error is shown{size}"
    if before.verdict != after.verdict:
        text += ", so it is not shown that fine-tuning caused the change"
    return f"{text}."


def in_thousandths(change: Estimate) -> str:
    """The size of a change of the squared calibration error, in brackets; empty without one."""
    if change.value is None or change.low is None or change.high is None:
        return ""
    low = 1000 * change.low
    high = 1000 * change.high
    return f" ({1000 * change.value:+.1f} [{low:+.1f}, {high:+.1f}] thousandths, 95 %)"


def mass_sentence(letter_mass: float | None) -> str:
    """Why a model may be too sure of its choice, and its letters too unlikely."""
    assert letter_mass is not None  # or nobody knew the probabilities among all tokens
    return (
        f"These two differ because the letters together have {100 * letter_mass:.0f} % of the "
        "probability among all tokens; among the choices each letter's is divided by that share."
    )


def described(reading: Reading) -> str:
    """A reading in words, with its numbers."""
    ece = f"ECE {number_of(reading.ece):.3f}, where {calibrated_models(reading.ece.floor)}"
    p_value = reading.ece.p_calibrated
    if p_value is not None and NEAR_P[0] <= p_value <= NEAR_P[1]:
        ece += f"; p = {p_value:.3f}"
    return DESCRIPTIONS[reading.verdict].format(points=points_of(reading), ece=ece)


def points_of(reading: Reading) -> float:
    """By how many points confidence and accuracy differ on average."""
    return 100 * abs(number_of(reading.surplus))


def calibrated_models(floor: float | None) -> str:
    """What an ECE is to be measured by: the ECE of calibrated models, on as many questions."""
    assert floor is not None  # ECE has one in every reading
    return f"95 of 100 calibrated models have less than {floor:.3f}"


def temperature_sentence(result: Check) -> str:
    """What one temperature would do, cross-fitted."""
    change = result.change_by_temperature
    assert result.temperatures is not None  # or another sentence says why
    assert change is not None
    low, high = sorted(result.temperatures)
    before = number_of(result.after["choices"].ece)
    name = "One temperature" if result.temperature_applied is None else "One further temperature"
    text = (
        f"{name} of about {math.sqrt(low * high):.2f} ({low:.2f} and {high:.2f}, each "
        "fitted on one half of these questions and tried on the other) would take the ECE among "
        f"the choices from {before:.3f} to {result.cooled_ece:.3f}, where "
        f"{calibrated_models(result.cooled_floor)}"
    )
    assert result.cooled_ece is not None
    assert result.cooled_floor is not None
    size = in_thousandths(change)
    if not change.significant:
        return f"{text}. On these questions that may be chance: no difference is shown{size}."
    verb = "lowers" if number_of(change) < 0 else "raises"
    left = "; an error is left" if result.cooled_ece > result.cooled_floor else ""
    return f"{text}. That {verb} the squared calibration error{size}{left}."


def advice(result: Check) -> str:
    """What to do next, for the answers read among the choices and among all tokens."""
    steps = []
    change = result.change_of_accuracy
    lost_accuracy = change.significant and number_of(change) < 0
    error_rose = any(
        change.significant and number_of(change) > 0 for change in result.change_by_tuning.values()
    )
    if lost_accuracy and error_rose:
        steps.append(
            "Accuracy fell and the error rose: first try to train less, with fewer epochs or a "
            "lower learning rate."
        )
    steps.append(f"Among the choices: {advice_among_choices(result)}")
    if "vocabulary" in result.after:
        to_do = ADVICE_AMONG_ALL_TOKENS[result.after["vocabulary"].verdict]
        steps.append(f"Among all tokens: {to_do}")
    elif result.temperature_applied is not None:
        steps.append(
            "Among all tokens: these records hold nothing of it; check those that the temperature "
            "was applied to."
        )
    return f"What to do: {' '.join(steps)}"


def advice_among_choices(result: Check) -> str:
    """What to do about the probabilities among the choices, of those who only compare choices."""
    reading = result.after["choices"]
    if reading.verdict == "calibrated":
        return "no error is shown that would have to be mended."
    if result.temperature_applied is not None:
        return (
            "a temperature was applied already. If the ECE is only a few thousandths above what "
            "calibrated models have, stop here: that is no reason to train again. If it is far "
            f"above, fit it anew on more {questions_to_fit_on(result)}, and apply it to the "
            f"records without a temperature (step 3 of {GUIDE})."
        )
    change = result.change_by_temperature
    if change is not None and change.significant and number_of(change) < 0:
        return (
            f"fit a temperature on {questions_to_fit_on(result)} with `calibeval temperature "
            f"VALIDATION.jsonl TEST.jsonl --out SCALED.jsonl` (step 3 of {GUIDE}). It changes no "
            "answer, and it is this task's alone: other tasks need their own."
        )
    return ADVICE_WITHOUT_TEMPERATURE[reading.verdict].format(points=points_of(reading))


def questions_to_fit_on(result: Check) -> str:
    """What a temperature is to be fitted on: never the questions that it is read on."""
    if result.validation_split is None:
        return "validation questions of this task"
    return (
        f"validation questions of this task (`calibeval score --split {result.validation_split}`, "
        "else with the options of TEST.jsonl)"
    )


def validation_split(file: Path) -> str | None:
    """The split to fit on that a record file's task has; None where nothing tells of another."""
    settings = record_files.meta(file).get("settings") or {}
    task = settings.get("task")
    splits = splits_of(task) if isinstance(task, str) else None
    if splits is None:
        return None
    data = settings.get("data")
    if isinstance(data, str) and Path(data).is_file():
        return None  # one file has no splits
    _, other_split = splits
    return other_split if settings.get("split") != other_split else None


def temperature_applied(file: Path) -> float | None:
    """The temperature that a record file's answers are at, as `calibeval temperature` writes it."""
    return (record_files.meta(file).get("temperature") or {}).get("temperature")


def draw(by_model: dict[str, Evaluation]) -> "Figure":
    """Reliability diagrams: a column for each model, a row for each definition of confidence.

    A legend below tells the lines and bands apart.
    """
    from calibeval.report import figures

    confidences = [
        name for name in AMONG_WORDS if all(name in e.confidences for e in by_model.values())
    ]
    with figures.style():
        from matplotlib.figure import Figure

        canvas = Figure((5.0, 3.0 * len(confidences)), layout="constrained")
        panels = canvas.subplots(
            len(confidences), len(by_model), sharex=True, sharey=True, squeeze=False
        )
        for row, among in enumerate(confidences):
            for column, (model, evaluation) in enumerate(by_model.items()):
                axis = panels[row, column]
                curves = {
                    key: np.array(curve) for key, curve in evaluation.reliability[among].items()
                }
                figures.draw_curves(axis, curves, figures.color(0.1))
                ece = number_of(stats.estimate([evaluation], "ece", among))
                axis.set_title(f"{model}: ECE {ece:.3f}")
                axis.set(xlim=(0, 1), ylim=(-0.26, 1), xticks=TICKS, yticks=TICKS, aspect="equal")
            panels[row, 0].set_ylabel(f"accuracy of answers,\nby confidence {AMONG_WORDS[among]}")
        for axis in panels[-1]:
            axis.set_xlabel("confidence")
        handles = panels[0, 0].get_legend_handles_labels()[0]
        canvas.legend(handles=handles, loc="outside lower center", ncols=2)
    return canvas
