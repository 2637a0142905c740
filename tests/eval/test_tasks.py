"""MMLU, HellaSwag, ARC and users' own files: what is asked, and the prompts byte for byte."""

import pandas as pd
import pytest
from made_records import write_lines as write

from calibeval import prompts, tasks
from calibeval.io import InputError
from calibeval.request import Task
from calibeval.tasks import clean


def load(task, data, shots=0, **options):
    return tasks.load(Task(task=task, data=str(data), shots=shots, **options))


def independent(data, subject: str) -> list[str]:
    """5-shot prompts from pandas frames, as evaluate.py of hendrycks/test lays them out; pandas
    2 would read the choice "None" as missing."""
    frames = [
        pd.read_csv(data / split / f"{subject}_{split}.csv", header=None, keep_default_na=False)
        for split in ("dev", "test")
    ]
    shots, questions = (
        [
            "{}\nA. {}\nB. {}\nC. {}\nD. {}\nAnswer:".format(*row[:5]) + " " * shot + row[5] * shot
            for row in frame.itertuples(index=False)
        ]
        for shot, frame in zip((True, False), frames, strict=True)
    )
    topic = subject.replace("_", " ")
    first = f"The following are multiple choice questions (with answers) about  {topic}."
    return ["\n\n".join([first, *shots, question]) for question in questions]


def test_all_official_prompts(shared_data):
    data = shared_data("mmlu.tar.xz")
    subjects = load("mmlu", data, 5)
    assert len(subjects) == 57 and sum(len(s.questions) for s in subjects) == 14042
    for subject in subjects:
        built = [prompts.build(subject, question, 5) for question in subject.questions]
        assert [prompt.text for prompt in built] == independent(data, subject.name)


def test_hellaswag(shared_data):
    path = shared_data("hellaswag_val.jsonl.xz")
    (subject,) = load("hellaswag", path, shots=5)
    assert len(subject.questions) == 10042 - 5 and len(subject.shots) == 5
    assert subject.shots[0].text == "Roof shingle removal: A man is sitting on a roof. he"
    assert subject.shots[0].label == 3
    assert not {q.id for q in subject.shots} & {q.id for q in subject.questions}


def test_hellaswag_original_markers(tmp_path):
    assert clean("Ski: [header] How [title] Go  on. [step] Now") == "Ski: How. Go on. Now"
    row = {"ind": 7, "activity_label": "Ski", "ctx": "A [step] b", "endings": ["c", "d"]}
    write(tmp_path / "hellaswag_val.jsonl", [row | {"label": "1"}])
    write(tmp_path / "hellaswag_train.jsonl", [row | {"label": 0}] * 1)
    (subject,) = load("hellaswag", tmp_path, shots=1)
    (question,) = subject.questions
    assert question.id == "hellaswag/7" and question.text == "Ski: A b" and question.label == 1
    assert subject.shots[0].label == 0
    assert prompts.build(subject, question, 1).text == (
        "The following are multiple choice questions (with answers) about  how an everyday "
        "situation goes on.\n\nSki: A b\nA. c\nB. d\nAnswer: A\n\nSki: A b\nA. c\nB. d\nAnswer:"
    )


ROWS = [
    {"question": "1 + 1?", "choices": ["1", "2", "3"], "answer": 1, "subject": "sums", "id": "x"},
    {"question": "Sky?", "choices": ["red", "blue"], "answer": "B"},
    {"question": "Sea?", "choices": ["red", "blue"], "answer": "blue"},
    {"question": "Z?", "choices": [f"c{i}" for i in range(26)], "answer": "Z"},
]


def test_jsonl(tmp_path):
    path = write(tmp_path / "q.jsonl", ROWS)
    general, sums = load("jsonl", path)
    assert [q.label for q in general.questions] == [1, 1, 25] and sums.questions[0].id == "x"
    examples = write(tmp_path / "e.jsonl", ROWS[1:3])
    (sums,) = load("jsonl", path, shots=2, examples=str(examples), subjects=("sums",))
    assert prompts.build(sums, sums.questions[0], 2).text == (
        "The following are multiple choice questions (with answers) about  sums.\n\n"
        "Sky?\nA. red\nB. blue\nAnswer: B\n\nSea?\nA. red\nB. blue\nAnswer: B\n\n"
        "1 + 1?\nA. 1\nB. 2\nC. 3\nAnswer:"
    )
    (asked,) = load("jsonl", examples, shots=1, examples=str(examples))
    assert [q.text for q in asked.questions] == ["Sea?"]
    own = write(tmp_path / "c.jsonl", [ROWS[1] | {"context": "Q: Sky?\nA:", "endings": ["r", "b"]}])
    (subject,) = load("jsonl", own)
    prompt = prompts.build(subject, subject.questions[0], 0, "continuation")
    assert prompt.text.endswith("\n\nQ: Sky?\nA:") and prompt.endings == ("r", "b")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "?", "choices": ["a", "b"]}, "line 2: no 'answer'; found question, choices"),
        (ROWS[1] | {"answer": 2}, "answer is 2, expected 0 to 1, A to B, or the text of one"),
        (ROWS[1] | {"answer": "same", "choices": ["same", "same"]}, "answer is 'same'"),
        (ROWS[0], "line 2: id 'x' is there already"),
    ],
)
def test_malformed_jsonl(tmp_path, row, expected):
    path = write(tmp_path / "q.jsonl", [ROWS[0], row])
    with pytest.raises(InputError) as raised:
        load("jsonl", path)
    assert expected in str(raised.value) and str(path) in str(raised.value)


def test_malformed_arc_and_hellaswag(tmp_path):
    own = write(tmp_path / "own.jsonl", ROWS[1:2])
    item = {"id": "a", "answerKey": "Q"}
    item["question"] = {"stem": "s", "choices": [{"text": "t", "label": "A"}] * 2}
    write(tmp_path / "ARC-Easy-Test.jsonl", [item])
    with pytest.raises(InputError, match="'Q' is not in list"):
        load("arc_easy", tmp_path)
    for label, expected in (("", "not a row of this task"), ("2", "answer is 2, expected 0 to 1")):
        path = write(tmp_path / "h.jsonl", [{"ctx": "c", "endings": ["a", "b"], "label": label}])
        with pytest.raises(InputError, match=expected):
            load("hellaswag", path)
    for task, options, expected in (
        ("jsonl", {"shots": 5}, "--shots 5 needs --examples"),
        ("hellaswag", {"split": "val"}, "is one file, so --split val chooses nothing"),
        ("mmlu", {"examples": "x"}, "--examples x: mmlu's are its dev split's"),
        ("jsonl", {"shots": 1, "examples": str(own)}, "every question is an example as well"),
    ):
        with pytest.raises(InputError, match=expected):
            load(task, own if task == "jsonl" else path, **options)


def test_arc_challenge_in_both_schemas(tmp_path):
    """The hub keeps choices as two columns; AI2's files keep them as a list of items."""
    rows, items = [], []
    for i, labels in enumerate(("ABCD", "1234", "ABC", "ABCDE")):
        texts = [f"t{label}" for label in labels]
        row = {"question": f"Why {i}?", "answerKey": labels[2]}
        rows.append(row | {"choices": {"text": texts, "label": list(labels)}})
        choices = [{"text": t, "label": k} for t, k in zip(texts, labels, strict=True)]
        items.append(row | {"question": {"stem": f"Why {i}?", "choices": choices}})
    found = []
    for name, made in (("hub", rows), ("ai2", items)):
        (tmp_path / name).mkdir()
        for split, part in (("Train", slice(2)), ("Test", slice(4))):
            lines = [row | {"id": f"{split}-{i}"} for i, row in enumerate(made[part])]
            write(tmp_path / name / f"ARC-Challenge-{split}.jsonl", lines)
        found += load("arc_challenge", tmp_path / name, shots=2)
    assert found[0] == found[1] and [q.label for q in found[0].questions] == [2] * 4
    assert [len(q.choices) for q in found[0].questions] == [4, 4, 3, 5]
    assert prompts.build(found[0], found[0].questions[2], 1).text == (
        "The following are multiple choice questions (with answers) about  grade-school "
        "science.\n\nWhy 0?\nA. tA\nB. tB\nC. tC\nD. tD\nAnswer: C\n\n"
        "Why 2?\nA. tA\nB. tB\nC. tC\nAnswer:"
    )


def test_the_hubs_cache_is_read_offline(tmp_path, monkeypatch):
    """All subjects, from what a download leaves; what is absent ends in one error."""
    datasets, hub = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub")
    folder = tmp_path / "mmlu"
    folder.mkdir()
    card = "---\nconfigs:\n- config_name: all\n  data_files:\n"
    for split, count in (("dev", 2), ("test", 3)):
        row = {"question": f"{split}?", "choices": ["a", "b", "c", "d"], "answer": 2}
        rows = [row | {"subject": s} for s in ("old_kings", "light") for _ in range(count)]
        write(folder / f"{split}.jsonl", rows)
        card += f"  - {{split: {split}, path: {split}.jsonl}}\n"
    (folder / "README.md").write_text(f"{card}---\n")
    cache = tmp_path / "cache"
    datasets.load_dataset(str(folder), "all", cache_dir=cache)
    (cache / "mmlu").rename(cache / "cais___mmlu")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    for config in (datasets.config, hub.constants):
        monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    found = load("mmlu", "hub:cais/mmlu", 2)
    ids = [f"{subject}/{i}" for subject in ("light", "old_kings") for i in range(3)]
    assert [q.id for subject in found for q in subject.questions] == ids
    (cache / "cais___mmlu").rename(tmp_path / "gone")
    with pytest.raises(InputError, match="hub:cais/mmlu: cannot be loaded from the hub"):
        load("mmlu", "hub:cais/mmlu", 2)
