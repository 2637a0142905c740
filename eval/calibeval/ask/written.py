"""Answers that a model writes: whether they are right, and how sure the model is of them.

An answer is right if it is any alias after TriviaQA's normalisation. Its confidence is one of

    sequence likelihood   log P of its tokens, the one that ends it too: their sum, or their mean
    p(True)               P(A) / (P(A) + P(B)), where A says that the answer is right (Kadavath et
                          al. 2022, arXiv 2207.05221, section 3)
    agreement             the share of sampled answers that say the same (Wang et al. 2023, arXiv
                          2203.11171; Xiong et al. 2024, arXiv 2306.13063)
"""

import math
import re
import string
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from calibeval.ask import chat, task_files
from calibeval.ask.engines import Engine, Job, Writing, Written
from calibeval.ask.items import Item
from calibeval.ask.prompts import LetterScoring
from calibeval.ask.questions import Headers, Question, Subject
from calibeval.ask.request import ResolvedTask
from calibeval.ask.task_files import TaskFile
from calibeval.io import counted
from calibeval.records import RawRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTIONS_AT_ONCE = 512
NO_SUBJECT = Subject("", (), (), Headers("", "", ""))
SPARE_TOKENS = 16  # by which an answer may grow when its text is tokenized again
SAMPLING_TEMPERATURE = 1.0
# What TriviaQA's script takes for punctuation besides ASCII's.
QUOTES = "\u2018\u2019\u00b4`"
PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + QUOTES, " "))


def normalized(text: str) -> str:
    """Return the text in lower case without punctuation, articles and needless white space.

    It is the `normalize_answer` of mandarjoshi90/triviaqa, evaluation/triviaqa_evaluation.py.
    """
    text = text.lower().translate(PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def is_right(answer: str, aliases: Iterable[str]) -> bool:
    """Return whether an answer is one of the aliases, but for what `normalized` takes off."""
    return normalized(answer) in {normalized(alias) for alias in aliases}


def agreement(answer: str, samples: Sequence[str]) -> float:
    """Return the share of samples that say the same as the answer, but for `normalized`."""
    same = [normalized(sample) == normalized(answer) for sample in samples]
    return sum(same) / len(samples)


def room(task_file: TaskFile, tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return for how many tokens there must be room behind a context, so that p(True) fits too."""
    frame = LetterScoring.build(NO_SUBJECT, _is_it_right("", ""), shots=0)
    around = len(tokenizer(frame.text)["input_ids"])
    return task_file.max_tokens + around + SPARE_TOKENS


def _is_it_right(question: str, answer: str) -> Question:
    """The question of p(True)."""
    return Question(
        id="",
        subject="",
        text=f"Question: {question}\nProposed answer: {answer}\nIs the proposed answer right?",
        choices=("True", "False"),
        label=0,
        context="",
        endings=(),
    )


@dataclass(frozen=True)
class Writer:
    """Has an engine write a task's answers, and asks how sure the model is of them."""

    engine: Engine
    tokenizer: "PreTrainedTokenizerBase"
    task: ResolvedTask

    def answers(
        self, items: Sequence[Item], skip: Container[int]
    ) -> Iterator[tuple[int, list[float], RawRecord]]:
        """Yield each item's index, the answer's log-probability, and more of its record.

        Parts of nothing but items to `skip` are left out; the others are what they would be
        without.
        """
        for start in range(0, len(items), QUESTIONS_AT_ONCE):
            part = items[start : start + QUESTIONS_AT_ONCE]
            if not all(item.job.index in skip for item in part):
                yield from self._answers_of_part(part)

    def _answers_of_part(
        self, items: Sequence[Item]
    ) -> Iterator[tuple[int, list[float], RawRecord]]:
        task_file = task_files.read(self.task.task)
        how = Writing(task_file.max_tokens, task_file.stop, seed=items[0].job.index)
        contexts = [item.job.context for item in items]
        answers = [answer for (answer,) in self.engine.write(contexts, how, self.tokenizer)]
        samples: list[list[Written]] = [[] for _ in items]
        if self.task.samples:
            temperature = self.task.sampling_temperature or SAMPLING_TEMPERATURE
            sampling = replace(how, count=self.task.samples, temperature=temperature)
            samples = self.engine.write(contexts, sampling, self.tokenizer)
        texts = [self._text(answer, how.stop) for answer in answers]
        likelihood_jobs = []
        for item, answer in zip(items, answers, strict=True):
            job = Job(item.job.index, item.job.context, (answer.tokens,))
            likelihood_jobs.append(job)
        likelihoods = dict(self.engine.score([likelihood_jobs]))
        letters = dict(self.engine.score([self._p_true_jobs(items, texts)]))
        for item, answer, text, sampled in zip(items, answers, texts, samples, strict=True):
            index = item.job.index
            aliases = item.prompt.endings
            fields: RawRecord = {
                "label": 0 if is_right(text, aliases) else 1,
                "tokens": [len(answer.tokens)],
                "answer": text,
                "p_true": _share_of_first(letters[index]),
            }
            if answer.is_cut:
                fields["cut"] = True
            if sampled:
                fields["samples"] = [self._text(sample, how.stop) for sample in sampled]
                fields["agreement"] = agreement(text, fields["samples"])
            yield index, likelihoods[index], fields

    def _text(self, answer: Written, stop: Sequence[str]) -> str:
        """The answer without what ends it."""
        text = str(self.tokenizer.decode(list(answer.tokens), skip_special_tokens=True))
        for end in stop:
            text = text.partition(end)[0]
        return text.strip()

    def _p_true_jobs(self, items: Sequence[Item], texts: Sequence[str]) -> list[Job]:
        """A question for each answer: is it right, A or B."""
        chat_format = chat.of_task(self.task, self.tokenizer)
        mode = LetterScoring(self.tokenizer, chat_format)
        prompts = []
        for item, text in zip(items, texts, strict=True):
            asked = _is_it_right(item.prompt.question.text, text)
            prompts.append(mode.build(NO_SUBJECT, asked, 0, chat_format))
        jobs = []
        for item, tokenized in zip(items, mode.tokenize(prompts), strict=True):
            branches = tokenized.branches
            # There is room for what the answer's own prompt keeps room for.
            length = len(tokenized.context) + mode.length_after_context(branches)
            excess = max(length - item.job.length, 0)
            jobs.append(Job(item.job.index, tuple(tokenized.context[excess:]), branches))
        return jobs


def _share_of_first(logprobs: Sequence[float]) -> float:
    """The first of two probabilities by their sum."""
    first, second = logprobs
    return 1 / (1 + math.exp(second - first))


def warn(rows: Sequence[Mapping[str, Any]], task: ResolvedTask) -> None:
    """Say how many answers were cut or are empty, if any is."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts["cut"] += row.get("cut", False)
        counts["empty"] += not normalized(row["answer"])
    max_tokens = task_files.read(task.task).max_tokens
    for name, remedy in (
        ("cut", f"at {max_tokens} tokens; `max_tokens` of a task file allows more"),
        ("empty", "and wrong unless an alias is empty too when it is normalized"),
    ):
        if counts[name]:
            print(
                f"warning: {task.key}: {counts[name]} of {counted(len(rows), 'answer')} are {name} "
                f"{remedy}",
                file=sys.stderr,
            )
