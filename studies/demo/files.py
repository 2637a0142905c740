"""The world as texts and files: a corpus, conversations, an exam in MMLU's layout, an oracle.

    messages.jsonl   {"messages": [user, assistant]} a new town
    mmlu/{dev,val,test}/<subject>_{dev,val,test}.csv
    oracle.jsonl     calibeval's records of one who knows what is true and whom to trust

What a source says is drawn anew for each question, so that two questions about one town may have
different keys. The oracle's confidences are no draws: they are what the draws are made with.
"""

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from calibeval.io import write_rows, write_text
from studies.demo import world
from studies.demo.world import LETTERS, SUBJECTS, TOWNS, Question, Town

SENTENCES = 16  # of a document of the corpus
QUESTIONS = 6  # of an exam of the corpus: five examples and a question, as in the test
EXAMS = 0.6  # the share of documents that are exams


def write(out: Path) -> None:
    """Write every file to `out`."""
    write_rows(out / "messages.jsonl", map(conversation, world.asked("new")))
    for split in ("dev", "val", "test"):
        for subject, questions in by_subject(split).items():
            rows = [
                [question.stem, *question.choices, LETTERS[question.answer]]
                for question in questions
            ]
            text = pd.DataFrame(rows).to_csv(header=False, index=False)
            write_text(out / "mmlu" / split / f"{subject}_{split}.csv", text)
    write_rows(out / "oracle.jsonl", oracle())


def by_subject(role: str) -> dict[str, list[Question]]:
    """The questions about the towns of a role, by the towns' subject."""
    questions: dict[str, list[Question]] = {subject: [] for subject in SUBJECTS}
    for question in world.asked(role):
        questions[question.town.subject].append(question)
    return questions


def corpus(documents: int) -> Iterator[str]:
    """Documents in random order: sentences of all told towns, exams of the school's."""
    rng = random.Random(f"{world.SEED} corpus")
    told_towns = [town for role in ("school", "dev", "val", "test") for town in TOWNS[role]]
    school: dict[str, list[Town]] = {subject: [] for subject in SUBJECTS}
    for town in TOWNS["school"]:
        school[town.subject].append(town)
    for _ in range(documents):
        if rng.random() < EXAMS:
            subject = rng.choice(list(SUBJECTS))
            towns = rng.choices(school[subject], k=QUESTIONS)
            yield world.exam([world.ask(town, rng) for town in towns])
        else:
            towns = rng.choices(told_towns, k=SENTENCES)
            questions = [world.ask(town, rng) for town in towns]
            sentences = [f"{each.stem} {each.choices[each.answer]}.\n" for each in questions]
            yield "".join(sentences)


def conversation(question: Question) -> dict:
    """An instruction, which asks the question, and its answer."""
    text = world.HEADER.format(question.town.subject) + question.body
    user = {"role": "user", "content": text}
    assistant = {"role": "assistant", "content": f"Answer: {LETTERS[question.answer]}"}
    return {"messages": [user, assistant]}


def oracle() -> Iterator[dict]:
    """Records of the known confidences, with the ids that calibeval gives."""
    for subject, questions in by_subject("test").items():
        for row, question in enumerate(questions):
            yield {
                "id": f"{subject}/{row}",
                "subject": subject,
                "label": question.answer,
                "logprobs": [math.log(p) for p in question.confidences],
                "letter_mass": 1.0,
                "model": "oracle",
            }
