"""The demo's world, its files and its base model's training."""

import json
import subprocess
import sys

import pytest

from calibeval import prompts, tasks
from calibeval.request import Task
from studies.demo import files, world


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo's world, and a folder of its files with a short corpus."""
    made, folder = world.build(), tmp_path_factory.mktemp("world")
    files.write(made, folder, documents=200)
    return made, folder


def test_each_town_serves_one_end(demo):
    """And a world is a function of its seed."""
    made, folder = demo
    assert world.build() == made != world.build(1)
    assert made.ask("test") == world.build().ask("test")
    names = {role: {town.name for town in towns} for role, towns in made.towns.items()}
    assert len(set().union(*names.values())) == sum(map(len, names.values()))
    texts = [json.loads(line)["text"] for line in (folder / "corpus.jsonl").open()]
    exams = [text for text in texts if text.startswith("The following")]
    told = [text for text in texts if not text.startswith("The following")]
    in_exams, in_told = set(" ".join(exams).split()), set(" ".join(told).split())
    assert in_exams & names["school"] and in_told & names["test"]
    for role in ("dev", "val", "test", "new"):
        assert not in_exams & names[role]
    assert not in_told & names["new"]
    conversations = (folder / "messages.jsonl").read_text()
    assert all(name in conversations for name in names["new"])


def test_oracle_and_exam_are_calibevals(demo):
    """Documents of the corpus are laid out as the official prompt, to the byte."""
    made, folder = demo
    oracle = [json.loads(line) for line in (folder / "oracle.jsonl").open()]
    labels, examples = {row["id"]: row["label"] for row in oracle}, made.ask("dev")
    for subject in tasks.load(Task(task="mmlu", data=str(folder / "mmlu"))):
        asked = [q for q in made.ask("test") if q.town.subject == subject.name]
        shots = [q for q in examples if q.town.subject == subject.name]
        for read, question in zip(subject.questions, asked, strict=True):
            assert read.label == labels.pop(read.id) == question.answer
        answer = f" {world.LETTERS[asked[-1].answer]}\n\n"
        text = prompts.build(subject, subject.questions[-1], 5).text
        assert text + answer == world.exam([*shots, asked[-1]])
    assert not labels


def test_head_may_stop_reading_a_study():
    code = "import studies, sys; sys.exit(studies.finish(lambda: print(studies)))"
    call = ["bash", "-o", "pipefail", "-c", f"'{sys.executable}' -c '{code}' | true"]
    done = subprocess.run(call, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
