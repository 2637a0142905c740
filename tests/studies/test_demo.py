"""The demo's world and its files."""

import json

from studies.demo import files, world

from calibeval.ask import prompts, tasks
from calibeval.ask.request import Task


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
        text = prompts.LetterScoring.build(subject, subject.questions[-1], 5).text
        assert text + answer == world.exam([*shots[subject.name], questions[-1]])
    assert not labels
