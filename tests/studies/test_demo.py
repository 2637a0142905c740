"""The demo's world and its files."""

import json

from studies.demo import files, world

from calibeval.ask import prompts, tasks
from calibeval.ask.request import Task


def test_each_town_serves_one_end():
    """And the world is always the same."""
    assert world.build() == world.TOWNS and world.asked("test") == world.asked("test")
    names = {role: {town.name for town in towns} for role, towns in world.TOWNS.items()}
    assert len(set().union(*names.values())) == sum(map(len, names.values()))
    texts = [*files.corpus(200)]
    exams = [text for text in texts if text.startswith("The following")]
    told = [text for text in texts if not text.startswith("The following")]
    in_exams, in_told = set(" ".join(exams).split()), set(" ".join(told).split())
    assert in_exams & names["school"] and in_told & names["test"]
    for role in ("dev", "val", "test", "new"):
        assert not in_exams & names[role]
    assert not in_told & names["new"]


def test_oracle_and_exam_are_calibevals(tmp_path):
    """Documents of the corpus are laid out as the official prompt, to the byte."""
    files.write(tmp_path)
    oracle = [json.loads(line) for line in (tmp_path / "oracle.jsonl").open()]
    labels = {row["id"]: row["label"] for row in oracle}
    asked, shots = files.by_subject("test"), files.by_subject("dev")
    for subject in tasks.load(Task(task="mmlu", data=str(tmp_path / "mmlu"))):
        questions = asked[subject.name]
        for read, question in zip(subject.questions, questions, strict=True):
            assert read.label == labels.pop(read.id) == question.answer
        answer = f" {world.LETTERS[questions[-1].answer]}\n\n"
        text = prompts.build(subject, subject.questions[-1], 5).text
        assert text + answer == world.exam([*shots[subject.name], questions[-1]])
    assert not labels
