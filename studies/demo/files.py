"""The world as texts and files: a corpus, conversations, an exam in MMLU's layout, an oracle.

    messages.jsonl   {"messages": [user, assistant]} a new town
    mmlu/{dev,val,test}/<subject>_{dev,val,test}.csv
    oracle.jsonl     calibeval's records of one who knows what is true and whom to trust

Every answer in them is a draw of its own.
"""

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from calibeval.io import write_rows, write_text
from studies.demo import world
from studies.demo.world import LETTERS, SUBJECTS, TOWNS, Question

SENTENCES = 16  # a document of the corpus
QUESTIONS = 6  # an exam of the corpus: five examples and a question, as in the test
EXAMS = 0.6  # of the documents


def write(out: Path) -> None:
    """Write every file to `out`."""
    write_rows(out / "messages.jsonl", map(conversation, world.asked("new")))
    for split in ("dev", "val", "test"):
        for subject, questions in by_subject(split).items():
            rows = pd.DataFrame([q.stem, *q.choices, LETTERS[q.answer]] for q in questions)
            text = rows.to_csv(header=False, index=False)
            write_text(out / "mmlu" / split / f"{subject}_{split}.csv", text)
    write_rows(out / "oracle.jsonl", oracle())


def by_subject(role: str) -> dict[str, list[Question]]:
    """The questions of a role."""
    return {s: [q for q in world.asked(role) if q.town.subject == s] for s in SUBJECTS}


def corpus(documents: int) -> Iterator[str]:
    """Documents in random order: sentences of all told towns, exams of the school's."""
    rng = random.Random(f"{world.SEED} corpus")
    told = [town for role in ("school", "dev", "val", "test") for town in TOWNS[role]]
    school = {s: [town for town in TOWNS["school"] if town.subject == s] for s in SUBJECTS}
    for _ in range(documents):
        if rng.random() < EXAMS:
            towns = rng.choices(school[rng.choice(list(SUBJECTS))], k=QUESTIONS)
            yield world.exam([world.ask(town, rng) for town in towns])
        else:
            towns = rng.choices(told, k=SENTENCES)
            said = (world.ask(town, rng) for town in towns)
            yield "".join(f"{q.stem} {q.choices[q.answer]}.\n" for q in said)


def conversation(question: Question) -> dict:
    """An instruction and its answer."""
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
