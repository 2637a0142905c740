"""Scored questions, and samples of them, from which every metric is computed. Never a model.

What the probability of a choice is, is one of two definitions of confidence:

choices:    p_k = softmax of the choices' log-probabilities (the official way)
vocabulary: p_k = exp(log-probability), what the model gives the letter among all its tokens

The definition is called `among` in parameters and "among the choices" or "among all tokens" in
print. It is `confidence` in `calibeval.reliability` and in CSV, and `Evaluation.confidences` lists
the definitions that a file has. Elsewhere *the confidence* is a number, the probability of the
likeliest choice.

`Scores` holds N questions under one of them, and `Sample` R samples of these questions: the
questions as they are, resamples of them, or simulated answers. A sample never copies questions: it
counts how often it holds each of them, or says anew which are answered right.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Literal

import numpy as np

from calibeval.measures import kernel_smoothing
from calibeval.measures.bins import TIE_DECIMALS, Binning, Bins, Segments
from calibeval.records import Records

BINS = 15
QUESTIONS_PER_FOLDED_BIN = 100
SEED = 0
# Samples × questions that are computed at a time: larger arrays leave the processor's caches.
CHUNK_CELLS = 300_000
# From so many questions on, samples are of `Cells`, and resamples draw each question by itself.
MANY_QUESTIONS = 100_000
CELLS = 10_000  # at least, where so many confidences differ
BLOCK = 1 << 14  # questions, whose values the processor's caches hold
MANY_QUESTIONS_ROWS = 8  # resamples of so many questions at a time, of one byte each
POISSON_LEVELS = 1 << 16  # of the quantiles by which very many questions are drawn
LARGEST_KEPT_BLOCK = (32 << 20) - (64 << 10)  # bytes

ConfidenceDefinition = Literal["choices", "vocabulary"]  # see above: what p_k is
# The definitions as figures and sentences call them, behind "confidence" or "probability".
AMONG_WORDS: dict[ConfidenceDefinition, str] = {
    "choices": "among the choices",
    "vocabulary": "among all tokens",
}


class Scores:
    """N questions with up to K choices, under one definition of confidence.

    Args:
        logprobs, labels: See the attributes.
        bin_count: How many bins of equal width `Sample.bins` has.

    Attributes:
        logprobs: Natural log-probabilities (N, K), −∞ for a choice that the question lacks.
        labels: The right choices, (N,).
        probs: Probabilities (N, K), whose rows need not sum to 1.
        best: The likeliest choice, the first of equals, (N,).
        confidence: The probability of the likeliest choice, (N,).
        correct: 1.0 where the likeliest choice is right, else 0.0, (N,).
        right_logprob: Log-probability of the right choice, (N,).
    """

    def __init__(self, logprobs: np.ndarray, labels: np.ndarray, bin_count: int = BINS):
        rows = np.arange(len(labels))
        self.bin_count = bin_count
        self.logprobs = logprobs
        self.labels = labels
        self.probs = np.exp(logprobs)
        self.best = logprobs.argmax(1)
        self.confidence = self.probs[rows, self.best]
        self.correct = (self.best == labels).astype(float)
        self.right_logprob = logprobs[rows, labels]

    def part(self, questions: np.ndarray) -> "Scores":
        """Return the scores of some of the questions, a mask (N,) of bool."""
        return Scores(self.logprobs[questions], self.labels[questions], self.bin_count)

    @cached_property
    def level(self) -> np.ndarray:
        """The confidence in TIE_DECIMALS decimals, by which questions are ranked and tied, (N,)."""
        return self.confidence.round(TIE_DECIMALS)

    @cached_property
    def order(self) -> np.ndarray:
        """The questions by ascending confidence, and so by ascending level, (N,)."""
        return np.argsort(self.confidence, kind="stable")

    @cached_property
    def ranked_confidence(self) -> np.ndarray:
        """The confidences in ascending order, (N,)."""
        return self.confidence[self.order]

    @cached_property
    def brier_score(self) -> np.ndarray:
        """Σ_k (p_k − y_k)² of each question; mass outside the choices is one more outcome."""
        outside = 1 - self.probs.sum(1)
        right = np.exp(self.right_logprob)
        return (self.probs**2).sum(1) + 1 - 2 * right + outside**2

    @cached_property
    def level_segments(self) -> "Segments":
        """The questions of each level of confidence, in `order`."""
        starts = np.unique(self.level[self.order], return_index=True)[1]
        return Segments(starts, len(self.level))

    @property
    def equal_width_edges(self) -> np.ndarray:
        """The inner edges 1/B, …, 1 − 1/B of B bins of equal width, (B − 1,)."""
        return np.arange(1, self.bin_count) / self.bin_count

    @cached_property
    def equal_width(self) -> "Binning":
        """Bins of equal width of the confidence."""
        return Binning(self.confidence, self.equal_width_edges, self.order)

    @cached_property
    def equal_mass_edges(self) -> np.ndarray:
        """The confidences in the places round(i N / B) of all in their order, (B − 1,)."""
        return _values_in_even_places(self.ranked_confidence, self.bin_count)

    @cached_property
    def equal_mass(self) -> "Binning":
        """Bins of as many questions each, but for questions of equal confidence."""
        return Binning(self.confidence, self.equal_mass_edges, self.order)

    @cached_property
    def folded_edges(self) -> np.ndarray:
        """The inner edges of Hendrycks' bins, of about 100 questions each, (B − 1,).

        They are in the places round(i N / B) of all N values max(p, 1 − p), in their order, of the
        confidences p.
        """
        folded = np.maximum(self.confidence, 1 - self.confidence)
        bin_count = max(1, len(folded) // QUESTIONS_PER_FOLDED_BIN)
        return _values_in_even_places(np.sort(folded), bin_count)

    @cached_property
    def folded(self) -> "Binning":
        """Hendrycks' bins of max(p, 1 − p) for the confidence p."""
        return Binning(np.maximum(self.confidence, 1 - self.confidence), self.folded_edges)

    @cached_property
    def cells(self) -> "Cells":
        """The questions with those of nearly one confidence taken together."""
        return Cells(self)

    @cached_property
    def smoother(self) -> kernel_smoothing.Smoother:
        """Kernel smoothing over the confidences, of the questions in `order`."""
        return kernel_smoothing.Smoother(self.ranked_confidence)

    @cached_property
    def ranked_correct(self) -> np.ndarray:
        """`correct` of the questions by ascending confidence, (1, N)."""
        return self.correct[None, self.order]


def _values_in_even_places(ascending: np.ndarray, bin_count: int) -> np.ndarray:
    """The values in the places round(i N / B) of N ascending ones, for i from 1 to B − 1."""
    places = np.round(np.arange(1, bin_count) * len(ascending) / bin_count).astype(int)
    return ascending[places.clip(max=len(ascending) - 1)]


class EventScores(Scores):
    """N answers, the probability of each to be right, and whether it was.

    Args:
        p: The probabilities, (N,).
        came_true: Whether each answer was right, (N,) bool.
        bin_count: How many bins of equal width `Sample.bins` has.
    """

    def __init__(self, p: np.ndarray, came_true: np.ndarray, bin_count: int = BINS):
        self.bin_count = bin_count
        # 0 is the only choice. 1, of a wrong answer, is the index of none.
        self.labels = np.where(came_true, 0, 1)
        self.probs = p[:, None]
        self.best = np.zeros(len(p), int)
        self.confidence = p
        self.correct = came_true.astype(float)
        with np.errstate(divide="ignore"):  # the logarithm of 0 is −∞
            self.logprobs = np.log(self.probs)
            self.right_logprob = np.where(came_true, np.log(p), np.log1p(-p))

    def part(self, questions: np.ndarray) -> "EventScores":
        """Return the scores of some of the answers, a mask (N,) of bool."""
        came_true = self.labels[questions] == 0
        return EventScores(self.confidence[questions], came_true, self.bin_count)

    @cached_property
    def brier_score(self) -> np.ndarray:
        """(p − y)² of each answer, (N,)."""
        return (self.confidence - self.correct) ** 2


class Cells(EventScores):
    """Very many questions, with those of nearly one confidence taken together.

    A cell is an interval of the confidence that no edge of `equal_width`, `equal_mass` or `folded`
    divides, nor one of CELLS quantiles. It stands for two answers with its mean confidence, a wrong
    one and a right one, of which a sample of cells has many. So a sample of C cells is computed
    from 2 C numbers in place of N.

    Args:
        scores: The questions.

    Attributes:
        sizes: How many questions are in each cell, (C,).
        mean_confidence: Their mean confidence, (C,).
    """

    def __init__(self, scores: Scores):
        level = scores.level[scores.order]
        quantiles = level[np.arange(CELLS) * len(level) // CELLS]
        folded = (scores.folded_edges, 1 - scores.folded_edges)
        edges = [scores.equal_width_edges, scores.equal_mass_edges, *folded, quantiles]
        starts = np.searchsorted(level, np.concatenate(edges).round(TIE_DECIMALS))
        starts = np.unique(np.append(starts, 0))
        starts = starts[starts < len(level)]
        self.sizes = np.diff(starts, append=len(level))
        sums = np.add.reduceat(scores.ranked_confidence, starts)
        self.mean_confidence = np.minimum(sums / self.sizes, 1)
        both = np.tile([False, True], len(starts))
        super().__init__(np.repeat(self.mean_confidence, 2), both, scores.bin_count)
        self.equal_mass_edges = scores.equal_mass_edges
        self.folded_edges = scores.folded_edges
        cell_of_question = np.empty(len(level), np.intp)
        cell_of_question[scores.order] = np.repeat(np.arange(len(starts)), self.sizes)
        self._answer_of_question = 2 * cell_of_question + scores.correct.astype(np.intp)

    def counts(self, counts_of_questions: np.ndarray) -> np.ndarray:
        """Return how often samples have each answer, (R, 2 C), from that of each question, (R, N).

        Both are whole numbers.
        """
        sums = [
            np.bincount(self._answer_of_question, weights=counts, minlength=2 * len(self.sizes))
            for counts in counts_of_questions
        ]
        return np.stack(sums).astype(np.int64)

    def answers_of(self, right: np.ndarray) -> np.ndarray:
        """Return how often samples have each answer, (R, 2 C), where `right` (R, C) are right."""
        return np.stack([self.sizes - right, right], axis=2).reshape(len(right), -1)


def scores_of_records(records: Records, among: ConfidenceDefinition) -> Scores:
    """Return the records' questions under a definition of confidence, "choices" or "vocabulary"."""
    logprobs = records.logprobs
    if records.scoring == "generate":  # one answer, of which a confidence is given
        return EventScores(np.exp(logprobs[:, 0]), records.labels == 0)
    if among == "choices":
        logprobs = logprobs - np.logaddexp.reduce(logprobs, axis=1, keepdims=True)
    return Scores(logprobs, records.labels)


class Sample:
    """R samples of N scored questions, of one of three kinds, which its constructors tell apart:

        Sample.observed(scores)             the questions as they are, each once: R is 1
        Sample.resampled(scores, counts)    each question as often as `counts` (R, N) say
        Sample.simulated(scores, correct)   each question once, R times with other answers (R, N)

    A metric reads from `sample.scores` what is the same in every sample, such as confidences and
    probabilities. Which answers are right, and how often a question is there, it has from the
    sample:

        sample.correct              whether the likeliest choice is right, (N,) or (R, N)
        sample.mean(values)         a mean over the questions of each sample, (R,)
        sample.mean_if_labels_known(values)
                                    the same of values that depend on which choice is right
        ranked_…, by_level, bins    the same questions by ascending confidence, or in bins

    Simulated answers say whether the likeliest choice is right, and not which other choice is if it
    is not. So `mean_if_labels_known`, which `nll` and `brier` need, refuses them; a metric with a
    floor must do without it.

    Attributes:
        scores: The questions.
        counts: How often each sample has each question, (R, N), or (1, N) of ones.
        correct: 1 or True where an answer is right: the scores' own (N,), or simulated (R, N).
        size: R.
        has_each_once: Whether `counts` are ones: of observed questions and simulated answers.
        has_own_correct: Whether the answers are simulated.
    """

    def __init__(
        self,
        scores: Scores,
        counts: np.ndarray | None = None,
        correct: np.ndarray | None = None,
    ):
        self.scores = scores
        self.has_each_once = counts is None
        self.counts = np.ones((1, len(scores.labels))) if counts is None else counts
        self.has_own_correct = correct is not None
        self.correct = scores.correct if correct is None else correct
        self.size = len(self.counts) if correct is None else len(correct)

    @classmethod
    def observed(cls, scores: Scores) -> "Sample":
        """Return one sample, which is the questions as they are."""
        return cls(scores)

    @classmethod
    def resampled(cls, scores: Scores, counts: np.ndarray) -> "Sample":
        """Return R resamples; `counts` (R, N) are whole numbers."""
        return cls(scores, counts)

    def __len__(self) -> int:
        """Return R, how many samples it is."""
        return self.size

    @property
    def coarse(self) -> "Sample":
        """The sample, of very many questions one of their `Cells`.

        What compares questions by their confidence is computed from it many times as fast, and
        varies over samples as the sample itself does. Means are the sample's own to compute.
        """
        return self if len(self.scores.labels) < MANY_QUESTIONS else self._of_cells

    @cached_property
    def _of_cells(self) -> "Sample":
        cells = self.scores.cells
        return Sample.resampled(cells, cells.counts(self.counts))

    @classmethod
    def simulated(cls, scores: Scores, correct: np.ndarray) -> "Sample":
        """Return R samples of the questions as they are, answered otherwise.

        `correct` (R, N) is 1 or True where an answer is right.
        """
        return cls(scores, correct=correct)

    @cached_property
    def ranked_counts(self) -> np.ndarray:
        """`counts` of the questions by ascending confidence, (R, N) or (1, N)."""
        if self.has_each_once:
            return self.counts
        return self.counts.take(self.scores.order, axis=1).astype(float, copy=False)

    @cached_property
    def ranked_correct(self) -> np.ndarray:
        """`correct` of the questions by ascending confidence, (R, N) or (1, N)."""
        if not self.has_own_correct:
            return self.scores.ranked_correct
        return self.correct.take(self.scores.order, axis=1).astype(float, copy=False)

    @cached_property
    def by_level(self) -> tuple[np.ndarray, np.ndarray]:
        """Answers and right answers at each level of confidence, ascending, (R, levels) both.

        Where each question is there once, the first is (1, levels).
        """
        levels = self.scores.level_segments
        if self.has_each_once:
            return levels.sizes[None].astype(float), levels.sum(self.ranked_correct)
        return levels.sum(self.ranked_counts), levels.sum(self.ranked_counts * self.ranked_correct)

    @cached_property
    def answers_up_to_level(self) -> np.ndarray:
        """Answers at each level of confidence or below, (R, levels) or (1, levels).

        Whole numbers are added as integers, which is many times as fast as in floating point.
        """
        answers, _ = self.by_level
        return answers.astype(np.int64).cumsum(1)

    @cached_property
    def bins(self) -> Bins:
        """Equal-width bins of the confidence."""
        counts = None if self.has_each_once else self.ranked_counts
        return self.scores.equal_width.of(self.ranked_correct, counts)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return the mean over each sample, (R,), of a value of every question, (N,) or (R, N)."""
        with np.errstate(invalid="ignore"):  # 0 × ∞: the log loss of a certain answer is infinite
            if values.ndim == 1:
                sums = self._float_counts @ values
            else:
                sums = (self._float_counts * values).sum(1)
        return sums / self._answers

    def mean_if_labels_known(self, values: np.ndarray) -> np.ndarray:
        """Return the mean of values (N,) that depend on which choice is right, (R,).

        Raises `ValueError` of simulated answers, which do not say that.
        """
        self.refuse_without_labels()
        return self.mean(values)

    def refuse_without_labels(self) -> None:
        """Raise `ValueError` of simulated answers, which do not say which choice is right."""
        if self.has_own_correct:
            raise ValueError(
                "simulated answers say whether the likeliest choice is right, and not which choice "
                "is; a metric that needs that has no floor"
            )

    @cached_property
    def _float_counts(self) -> np.ndarray:
        return self.counts.astype(float, copy=False)

    @cached_property
    def _answers(self) -> np.ndarray:
        """How many answers each sample has, (R,) or (1,)."""
        return self._float_counts.sum(1)


class QuestionsApart(Sample):
    """N samples of one question each: of a metric that is a mean, each question's own value."""

    def __init__(self, scores: Scores):
        super().__init__(scores)
        self.size = len(scores.labels)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return each sample's mean, (N,), which is the value of its one question."""
        return values


def resamples(
    questions: int, count: int, clusters: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Yield arrays (R, N) of how often each of N questions is drawn, `count` rows in all.

    Each row draws N questions with replacement. The rows are the same for every file of as
    many questions, so differences between models are paired. With `clusters`, the number of each
    question's cluster from 0 to C − 1, (N,), each row draws C clusters with all their questions.

    Of very many questions each is drawn as often as a Poisson number of mean 1 says, by itself: a
    row then draws N questions but for a few in a thousand, which no mean depends on, and takes a
    fifth of the time.
    """
    rng = np.random.default_rng(SEED)
    units = questions if clusters is None else int(clusters.max()) + 1
    keep_freed_memory()
    if clusters is None and questions >= MANY_QUESTIONS:
        for rows in _chunk_rows(count, questions, MANY_QUESTIONS_ROWS):
            levels = rng.integers(0, POISSON_LEVELS, (rows, questions), dtype=np.uint16)
            yield _poisson_quantiles(levels)
        return
    for rows in _chunk_rows(count, questions):
        drawn = rng.integers(0, units, (rows, units), dtype=np.int32)
        # Small numbers are quick to sort by confidence.
        counts = np.stack([np.bincount(row, minlength=units).astype(np.int16) for row in drawn])
        yield counts if clusters is None else counts[:, clusters]


def means_of_resamples(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the means (R, M) over resamples `counts` (R, N) of M values a question, (N, M).

    Of very many questions this takes a tenth of the time of `Sample.mean`, one value at a time.
    """
    sums = np.zeros((len(counts), values.shape[1]))
    for start in range(0, len(values), BLOCK):
        block = slice(start, start + BLOCK)
        sums += counts[:, block].astype(float) @ values[block]
    return sums / counts.sum(1, keepdims=True)


def _poisson_quantiles(levels: np.ndarray) -> np.ndarray:
    """The quantiles of Poisson's distribution of mean 1 at (level + ½) / POISSON_LEVELS."""
    most = 8  # one in a million is larger
    probabilities = np.exp(-1) / np.cumprod([1, *range(1, most + 1)])
    quantiles = np.zeros(levels.shape, np.uint8)
    for share_below in probabilities.cumsum()[:-1]:
        quantiles += levels >= np.ceil(share_below * POISSON_LEVELS - 0.5).astype(np.uint16)
    return quantiles


def simulated_answers(scores: Scores, count: int) -> Iterator[Sample]:
    """Yield samples, `count` in all, of answers that are right with the probability they state.

    They tell which calibration errors a perfectly calibrated model with these confidences shows on
    these questions, by chance alone. Of very many questions they are samples of `Cells`, with as
    many right answers in each as a binomial number says.
    """
    rng = np.random.default_rng(SEED)
    questions = len(scores.labels)
    if questions >= MANY_QUESTIONS:
        cells = scores.cells
        for rows in _chunk_rows(count, len(cells.labels)):
            right = rng.binomial(cells.sizes, cells.mean_confidence, (rows, len(cells.sizes)))
            yield Sample.resampled(cells, cells.answers_of(right))
        return
    # A uniform draw names the choice in whose share of [0, 1] it falls, and the answer is right
    # where that is the likeliest one. `draws < confidence` would be as probable, but would change
    # the last digits of every floor.
    share_end = scores.probs.cumsum(1)[np.arange(questions), scores.best]
    share_start = share_end - scores.confidence
    keep_freed_memory()
    for rows in _chunk_rows(count, questions):
        draws = rng.random((rows, questions))
        yield Sample.simulated(scores, (share_start <= draws) & (draws < share_end))


def keep_freed_memory() -> None:
    """Let the process keep the memory of one chunk of samples for the next.

    The C library of Linux gives memory back to the system where it is larger than the largest block
    that was freed so far, up to 32 MiB, and to get it again takes as long as to compute with it.
    The block that is freed here raises that limit for good; no page of it is ever touched.
    """
    np.empty(LARGEST_KEPT_BLOCK, np.uint8)


def _chunk_rows(count: int, questions: int, fewest: int = 1) -> Iterator[int]:
    """Split `count` rows of so many questions into chunks that fit the processor's caches."""
    most = max(fewest, CHUNK_CELLS // questions)
    while count > 0:
        yield min(most, count)
        count -= most
