"""The demo's world, its files and its base model's training."""

import json
import math
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "eval"))
from made_records import write_records

from calibeval import prompts, tasks
from calibeval.request import Task
from studies.demo import __main__ as command
from studies.demo import files, pretrain, report, world


@pytest.fixture(scope="module")
def made():
    """The demo's world."""
    return world.build()


@pytest.fixture(scope="module")
def folder(made, tmp_path_factory):
    """Its files, with a short corpus."""
    out = tmp_path_factory.mktemp("world")
    files.write(made, out, documents=200)
    return out


def texts(folder) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / "corpus.jsonl").open()]


def test_a_source_is_right_as_often_as_it_is_reliable():
    rng, town, n = random.Random(1), world.Town("Ardin", "mining", 2), 20_000
    for source, reliability in world.SOURCES.items():
        told = Counter(world.ask(town, rng, source).answer for _ in range(n))
        for thing in range(4):
            p = reliability if thing == 2 else (1 - reliability) / 3
            assert abs(told[thing] / n - p) < 4.5 * math.sqrt(p * (1 - p) / n)
        expected = world.Question(town, source, 0).confidences
        assert sum(expected) == pytest.approx(1) and max(expected) == expected[2] == reliability


def test_each_town_serves_one_end(made, folder):
    """And a world is a function of its seed."""
    assert world.build() == made != world.build(1)
    assert made.ask("test") == world.build().ask("test")
    names = {role: {town.name for town in towns} for role, towns in made.towns.items()}
    assert len(set().union(*names.values())) == sum(map(len, names.values()))
    exams = [text for text in texts(folder) if text.startswith("The following")]
    told = [text for text in texts(folder) if not text.startswith("The following")]
    in_exams, in_told = set(" ".join(exams).split()), set(" ".join(told).split())
    assert in_exams & names["school"] and in_told & names["test"]
    for role in ("dev", "val", "test", "new"):
        assert not in_exams & names[role]
    assert not in_told & names["new"]
    conversations = (folder / "messages.jsonl").read_text()
    assert all(name in conversations for name in names["new"])


def test_oracle_and_exam_are_calibevals(made, folder):
    """Documents of the corpus are laid out as the official prompt, to the byte."""
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


def test_tokens_are_words_and_letters_are_single(folder, tmp_path):
    from transformers import AutoTokenizer

    from sweeps.data import render

    rows = [json.loads(line) for line in (folder / "messages.jsonl").open()]
    said = [message["content"] for row in rows for message in row["messages"]]
    pretrain.tokenizer([*texts(folder), *said]).save_pretrained(tmp_path)
    words = AutoTokenizer.from_pretrained(tmp_path)
    text = texts(folder)[0] + texts(folder)[-1]
    assert words.decode(words(text).input_ids, skip_special_tokens=True) == text
    assert words(text).input_ids[0] == words.bos_token_id
    for ids in words([*texts(folder), *said]).input_ids:
        assert words.unk_token_id not in ids
    context = words("Answer:").input_ids
    for letter in world.LETTERS:
        assert words(f"Answer: {letter}").input_ids[:-1] == context
    whole, spans = render(rows[0]["messages"], words)
    assert [whole[a:b] for a, b in spans] == [rows[0]["messages"][1]["content"] + "</s>"]


def test_results_of_two_recipes_are_not_mixed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "ARITHMETIC", {})
    monkeypatch.setenv("TQDM_MININTERVAL", "15")
    with pytest.raises(SystemExit):
        command.main(["x"])
    assert command.main([]) == 2
    assert "run the demo from the repository's folder" in capsys.readouterr().err
    command.SWEEP.parent.mkdir(parents=True)
    command.SWEEP.write_text("name: demo\n")
    monkeypatch.setattr(command.files, "write", lambda *_, **__: 1 / 0)  # the first step
    with pytest.raises(ZeroDivisionError):
        command.main([])
    command.SWEEP.write_text("name: another\n")
    assert command.main([]) == 2
    assert "made by another version of the demo" in capsys.readouterr().err


def test_each_run_gets_its_temperature_once(tmp_path, monkeypatch):
    """Fitted on what its own model says of val; what is there is kept."""
    entries = [{"run": f"r{i}", "records": f"../r{i}/scores/mmlu.jsonl"} for i in range(2)]
    sweep, out, done = tmp_path / "results", tmp_path / "out", []
    for folder in (sweep, out, *(tmp_path / f"r{i}" / "scores" for i in range(2))):
        folder.mkdir(parents=True)
    for i, entry in enumerate(entries):
        write_records(sweep / entry["records"], 50, 2.0, seed=i)

    def score(model, tasks, out, **_):
        assert tasks[0].split == "val" and tasks[0].data == "mmlu"
        done.append(model)
        write_records(out / f"{tasks[0].key}.jsonl", 400, 2.0, seed=9)

    monkeypatch.setattr("calibeval.score", score)
    made = report.at_temperature(entries, sweep, Path("mmlu"), out)
    assert done == [str(tmp_path / run / "model") for run in ("r0", "r1")]
    assert [entry["calibrator"] for entry in made] == ["temperature"] * 2
    assert all(Path(entry["records"]).exists() for entry in made)
    assert report.at_temperature(entries, sweep, Path("mmlu"), out) == made and len(done) == 2
