"""MMLU, HellaSwag and users' own files: what is asked, and the prompts byte for byte."""

import json
import re

import pandas as pd
import pytest
from made_records import write_lines

from calibeval.ask import prompts, task_files, tasks
from calibeval.ask.questions import Subject
from calibeval.ask.request import Task
from calibeval.io import InputError
from calibeval.validation import checked


def load(task: str, data, shots: int = 0, **options) -> list[Subject]:
    return tasks.load(Task(task=task, data=str(data), shots=shots, **options))


# --- MMLU ---


def official_prompts(data, subject: str) -> list[str]:
    """5-shot prompts from pandas frames, as evaluate.py of hendrycks/test lays them out."""

    def rows(split: str):
        # pandas 2 would read the choice "None" as missing.
        path = data / split / f"{subject}_{split}.csv"
        frame = pd.read_csv(path, header=None, keep_default_na=False)
        return frame.itertuples(index=False)

    def question(row) -> str:
        return "{}\nA. {}\nB. {}\nC. {}\nD. {}\nAnswer:".format(*row[:5])

    topic = subject.replace("_", " ")
    header = f"The following are multiple choice questions (with answers) about  {topic}."
    examples = [f"{question(row)} {row[5]}" for row in rows("dev")]
    return ["\n\n".join([header, *examples, question(row)]) for row in rows("test")]


def test_all_official_prompts(shared_data):
    data = shared_data("mmlu.tar.xz")
    subjects = load("mmlu", data, shots=5)
    assert len(subjects) == 57
    assert sum(len(subject.questions) for subject in subjects) == 14042
    for subject in subjects:
        built = [
            prompts.LetterScoring.build(subject, question, 5).text for question in subject.questions
        ]
        assert built == official_prompts(data, subject.name)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """What a download of cais/mmlu leaves in a cache that is read offline: two subjects of three
    questions and two examples."""
    datasets = pytest.importorskip("datasets")
    huggingface_hub = pytest.importorskip("huggingface_hub")
    folder = tmp_path / "mmlu"
    folder.mkdir()
    card = "---\nconfigs:\n- config_name: all\n  data_files:\n"
    for split, count in (("dev", 2), ("test", 3)):
        row = {"question": f"{split}?", "choices": ["a", "b", "c", "d"], "answer": 2}
        rows = []
        for subject in ("old_kings", "light"):
            rows += [{**row, "subject": subject}] * count
        write_lines(folder / f"{split}.jsonl", rows)
        card += f"  - {{split: {split}, path: {split}.jsonl}}\n"
    (folder / "README.md").write_text(f"{card}---\n")
    cache = tmp_path / "cache"
    datasets.load_dataset(str(folder), "all", cache_dir=cache)
    (cache / "mmlu").rename(cache / "cais___mmlu")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    for config in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    return cache


def test_the_hubs_cache_is_read_offline(hub_cache):
    subjects = load("mmlu", "hub:cais/mmlu", shots=2)
    ids = [question.id for subject in subjects for question in subject.questions]
    light = ["light/0", "light/1", "light/2"]
    assert ids == [*light, "old_kings/0", "old_kings/1", "old_kings/2"]


# --- HellaSwag ---


def test_what_stands_beside_one_file_is_no_copy_of_a_data_set(tmp_path):
    """A README.md beside the file made it ask for a file of the examples' split."""
    row = {"activity_label": "Ski", "ctx": "A b", "endings": ["c", "d"], "label": 0}
    rows = [{**row, "ind": number, "ctx": f"A {number}"} for number in range(3)]
    path = write_lines(tmp_path / "hellaswag_val.jsonl", rows)
    (tmp_path / "README.md").write_text("My notes.\n")
    (subject,) = load("hellaswag", path, shots=1)
    assert [example.id for example in subject.examples] == ["hellaswag/0"]
    assert [question.id for question in subject.questions] == ["hellaswag/1", "hellaswag/2"]


def test_hellaswags_original_rows(tmp_path):
    row = {"ind": 7, "activity_label": "Ski", "ctx": "A [step] b", "endings": ["c", "d"]}
    write_lines(tmp_path / "hellaswag_val.jsonl", [{**row, "label": "1"}])
    write_lines(tmp_path / "hellaswag_train.jsonl", [{**row, "label": 0}])
    (subject,) = load("hellaswag", tmp_path, shots=1)
    (question,) = subject.questions
    assert question.id == "hellaswag/7"
    assert question.text == "Ski: A b"
    assert question.label == 1
    assert subject.examples[0].label == 0
    assert prompts.LetterScoring.build(subject, question, 1).text == (
        "The following are multiple choice questions (with answers) about  how an everyday "
        "situation goes on.\n\nSki: A b\nA. c\nB. d\nAnswer: A\n\nSki: A b\nA. c\nB. d\nAnswer:"
    )


# --- Users' own files ---

SUMS = {
    "question": "1 + 1?",
    "choices": ["1", "2", "3"],
    "answer": 1,
    "subject": "sums",
    "id": "x",
}
SKY = {"question": "Sky?", "choices": ["red", "blue"], "answer": "B"}
SEA = {"question": "Sea?", "choices": ["red", "blue"], "answer": "blue"}
MANY = {"question": "Z?", "choices": [f"c{i}" for i in range(26)], "answer": "Z"}


@pytest.fixture
def questions_file(tmp_path):
    return write_lines(tmp_path / "q.jsonl", [SUMS, SKY, SEA, MANY])


@pytest.fixture
def examples_file(tmp_path):
    return write_lines(tmp_path / "e.jsonl", [SKY, SEA])


def test_answers_are_indices_letters_or_texts(questions_file):
    general, sums = load("jsonl", questions_file)
    assert [question.label for question in general.questions] == [1, 1, 25]
    assert sums.questions[0].label == 1
    assert sums.questions[0].id == "x"


def test_examples_are_of_another_subject_where_it_has_none(questions_file, examples_file):
    (sums,) = load(
        "jsonl", questions_file, shots=2, examples=str(examples_file), subjects=("sums",)
    )
    assert prompts.LetterScoring.build(sums, sums.questions[0], 2).text == (
        "The following are multiple choice questions (with answers) about  sums.\n\n"
        "Sky?\nA. red\nB. blue\nAnswer: B\n\nSea?\nA. red\nB. blue\nAnswer: B\n\n"
        "1 + 1?\nA. 1\nB. 2\nC. 3\nAnswer:"
    )


def test_examples_are_not_asked_under_another_id_either(tmp_path):
    """A question without an id is named by its row, which another file has it on elsewhere."""
    data = write_lines(tmp_path / "q.jsonl", [SEA, SKY])
    examples = write_lines(tmp_path / "e.jsonl", [SKY])
    (subject,) = load("jsonl", data, shots=1, examples=str(examples))
    assert [question.text for question in subject.questions] == ["Sea?"]


def test_texts_for_continuation_may_be_others(tmp_path):
    row = {**SKY, "context": "Q: Sky?\nA:", "endings": ["r", "b"]}
    (subject,) = load("jsonl", write_lines(tmp_path / "q.jsonl", [row]))
    prompt = prompts.ContinuationScoring.build(subject, subject.questions[0], 0)
    assert prompt.text.endswith("\n\nQ: Sky?\nA:")
    assert prompt.endings == ("r", "b")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "?", "choices": ["a", "b"]}, "line 2: no 'answer'; found question, choices"),
        ({**SKY, "answer": 2}, "answer is 2, expected 0 to 1, A to B, or the text of one"),
        ({**SKY, "answer": "same", "choices": ["same", "same"]}, "answer is 'same'"),
        (SUMS, "line 2: id 'x' is there already"),
        ({**SKY, "endings": ["x"]}, "line 2: endings is ['x']: found 1, expected 2"),
        ({**SKY, "id": "\ud800"}, r"line 2: id is '\ud800': expected text, found half of a surr"),
    ],
)
def test_malformed_jsonl(tmp_path, row, expected):
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (SUMS, row)))
    with pytest.raises(InputError) as raised:
        load("jsonl", path)
    assert str(path) in str(raised.value)
    assert expected in str(raised.value)


# --- Task files ---

LOGIC = """
data: {path: rows.csv}
row:
  subject: logic
  question: "{{ premise }} Is it so that {{ claim }}?"
  choices: ["no", "yes"]
  answer: "{{ 1 if row['holds?'] == 'true' else 0 }}"
  context: "{{ premise }} {{ claim }}:"
topic: what follows
"""


@pytest.fixture
def logic(tmp_path):
    """A task of one's own, whose data lie beside it."""
    (tmp_path / "rows.csv").write_text(
        'premise,claim,holds?\n"All cats, all",cats purr,true\nNo cat,it barks,false\n'
    )
    path = tmp_path / "logic.yaml"
    path.write_text(LOGIC)
    return path


def test_a_task_file(logic, tmp_path):
    task = Task(task=str(logic))
    assert task.key == "logic"
    assert task.data == str(tmp_path / "rows.csv")
    (subject,) = tasks.load(task.model_copy(update={"shots": 0}))
    assert [question.label for question in subject.questions] == [1, 0]
    question = subject.questions[0]
    assert question.id == "logic/0"
    assert prompts.LetterScoring.build(subject, question, 0).text == (
        "The following are multiple choice questions (with answers) about  what follows.\n\n"
        "All cats, all Is it so that cats purr?\nA. no\nB. yes\nAnswer:"
    )
    prompt = prompts.ContinuationScoring.build(subject, question, 0)
    assert prompt.text == "All cats, all cats purr:"
    assert prompt.endings == ("no", "yes")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("topic:", "topics:", r"logic.yaml: topics: no such key; known: data, split, other_split"),
        (
            '"no", "yes"',
            "no, yes",
            r"logic.yaml: row.choices is \[False, True\]: expected a text; YAML",
        ),
        ("{{ claim }}?", "{{ row.clam }}?", r"line 2: no column 'clam'"),
        (
            '["no", "yes"]',
            '"{{ claim }}"',
            r"line 2: choices is 'cats purr': expected a list \(row.choices in .*logic.yaml: {{ cl",
        ),
        ("topic: what", "topic: '{{ claim }}' # ", r"topic is '{{ claim }}': no variable 'claim'"),
        ("subject: logic", 'subject: "{{ 1 / 0 }}"', r"rows.csv, line 2: .*division by zero"),
        ("row:", "row: [", r"^\S*logic.yaml:5:11: not YAML: .*expected ',' or '\]'"),
    ],
)
def test_malformed_task_files(logic, old, new, expected):
    logic.write_text(LOGIC.replace(old, new))
    with pytest.raises(InputError, match=expected):
        tasks.load(checked(Task, {"task": str(logic), "shots": 0}, "--task"))


def test_a_files_name_may_have_a_variables_name_in_it(tmp_path):
    """`subjects.jsonl` was taken for a file a subject."""
    task = tmp_path / "own.yaml"
    task.write_text("data: {files: subjects.jsonl}\nheaders: {letters: ''}\n")
    row = {"question": "q", "choices": ["a", "b"], "answer": 0}
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "subjects.jsonl", [row, {**row, "question": "r"}])
    examples = write_lines(tmp_path / "examples.jsonl", [{**row, "question": "shown"}])
    (subject,) = load(str(task), tmp_path / "data", shots=1, examples=str(examples))
    assert [question.text for question in subject.questions] == ["q", "r"]


def test_a_file_is_chosen_by_language_without_a_configuration_too(tmp_path):
    """`{{ language }}` in the files' name alone: --language was refused, and None was read."""
    task = tmp_path / "own.yaml"
    task.write_text("data: {files: '{{ language }}-{{ split }}.jsonl'}\n")
    write_lines(tmp_path / "de-test.jsonl", [SKY])
    (subject,) = load(str(task), tmp_path, language="de")
    assert len(subject.questions) == 1
    with pytest.raises(InputError, match="is by language; give --language"):
        load(str(task), tmp_path)


def test_ids_that_two_subjects_files_share_are_refused_before_scoring(tmp_path):
    """One answer took the other's place, and `finish` refused it when all was scored."""
    task = tmp_path / "own.yaml"
    files = "data: {files: '{{ subject }}_{{ split }}.jsonl'}\n"
    task.write_text(files)
    rows = [{**SKY, "id": str(number)} for number in range(2)]
    for subject in ("a", "b"):
        write_lines(tmp_path / f"{subject}_test.jsonl", rows)
    expected = f"{tmp_path}: id '0' is of a question of subject 'a' and of one of 'b'; ids must be"
    with pytest.raises(InputError, match=re.escape(expected)) as raised:
        load(str(task), tmp_path)
    remedy = str(raised.value).rpartition("write `")[2].rstrip("`")
    task.write_text(f"{files}{remedy}\n")
    subjects = load(str(task), tmp_path)
    ids = [question.id for subject in subjects for question in subject.questions]
    assert ids == ["a/0", "a/1", "b/0", "b/1"]


def test_an_index_may_be_a_text_where_no_choice_is_a_number(tmp_path):
    """As all cells of a CSV file are."""
    row = {"question": "?", "choices": ["no", "yes"], "answer": "1"}
    (subject,) = load("jsonl", write_lines(tmp_path / "q.jsonl", [row]))
    assert subject.questions[0].label == 1
    for choices in (["2", "0"], ["no", "10"]):
        data = write_lines(tmp_path / "numbers.jsonl", [{**row, "choices": choices}])
        with pytest.raises(InputError, match="answer is '1', expected 0 to 1"):
            load("jsonl", data)


@pytest.mark.parametrize("task", ["global_mmlu", "mmlu_pro"])
def test_no_split_that_examples_use_up_is_named_to_choose_on(task):
    """`check` named global_mmlu's dev split, in which every question is an example."""
    assert tasks.splits_of(task) is None


def test_a_task_by_language(tmp_path):
    row = {"sample_id": "a/0", "subject": "a", "question": " Was? ", "answer": "B"}
    row |= {f"option_{letter}": letter for letter in "abcd"}
    (tmp_path / "de").mkdir()
    write_lines(tmp_path / "de" / "test.jsonl", [row])
    (subject,) = load("global_mmlu", tmp_path, language="de")
    assert prompts.LetterScoring.build(subject, subject.questions[0], 0).text == (
        "Was?\nA. a\nB. b\nC. c\nD. d\nAnswer:"
    )
    with pytest.raises(InputError, match="is by language; give --language"):
        load("global_mmlu", tmp_path)
    with pytest.raises(InputError, match="--language de: mmlu has one language"):
        load("mmlu", tmp_path, language="de")


@pytest.mark.parametrize(
    ("files", "file"),
    [
        ("{{ language }}/{{ split }}.jsonl", "de/test.jsonl"),
        ("{{ split }}/{{ language }}.jsonl", "test/de.jsonl"),
        ("{{ split }}.jsonl", "test.jsonl"),
    ],
)
def test_one_files_examples_are_those_of_its_folder(tmp_path, files, file):
    """Those of de/test.jsonl were looked for in de/de/dev.jsonl."""
    task = tmp_path / "own.yaml"
    task.write_text(
        f"data: {{files: '{files}'}}\nexamples: {{split: dev, else_first_asked: true}}\n"
    )
    asked = tmp_path / file
    examples = tmp_path / file.replace("test", "dev")
    for path, question in ((asked, "asked"), (examples, "shown")):
        path.parent.mkdir(exist_ok=True)
        write_lines(path, [{**SKY, "id": question, "question": question}])
    language = "de" if "language" in files else None
    (subject,) = load(str(task), asked, shots=1, language=language)
    assert [example.text for example in subject.examples] == ["shown"]


# --- Requests that a task cannot answer ---


def test_examples_must_be_given_and_must_leave_questions(tmp_path):
    only = write_lines(tmp_path / "q.jsonl", [SKY])
    with pytest.raises(
        InputError, match=r"jsonl: 5 solved examples before each .* --examples FILE, or --shots 0"
    ):
        load("jsonl", only, shots=5)
    with pytest.raises(InputError, match="every question is an example as well"):
        load("jsonl", only, shots=1, examples=str(only))


def test_a_task_of_a_file_per_subject_without_examples_takes_a_file_of_them(tmp_path):
    """It was told to give --examples, and then refused them as its None split's."""
    rows = [{"question": f"Q{i}?", "choices": ["a", "b"], "answer": 0} for i in range(3)]
    (tmp_path / "test").mkdir()
    write_lines(tmp_path / "test" / "light.jsonl", rows[:1])
    solved = write_lines(tmp_path / "solved.jsonl", rows[1:])
    task = tmp_path / "t.yaml"
    task.write_text('data: {files: "{{ split }}/{{ subject }}.jsonl"}')
    with pytest.raises(InputError, match="give --examples FILE"):
        load(str(task), tmp_path, shots=1)
    (subject,) = load(str(task), tmp_path, shots=2, examples=str(solved))
    assert [example.text for example in subject.examples] == ["Q1?", "Q2?"]


def test_a_folder_whose_file_has_no_split_in_its_name_has_none_to_choose(tmp_path):
    """Each split had the same questions, without a word."""
    columns = "Question,Best Answer,Correct Answers,Incorrect Answers"
    (tmp_path / "TruthfulQA.csv").write_text(f"{columns}\nWhich?,a,a,b; c\n")
    with pytest.raises(InputError, match=r"TruthfulQA\.csv, so --split train chooses nothing"):
        load("truthfulqa_mc1", tmp_path, split="train")
    assert load("truthfulqa_mc1", tmp_path, split="validation")


@pytest.mark.parametrize(
    ("task", "options", "key"),
    [
        ("truthfulqa_mc1", {"scoring": "letters"}, "truthfulqa_mc1"),
        ("mmlu", {"examples": "x"}, "--examples x"),
        ("hellaswag", {"data": "h.jsonl", "split": "val"}, "--split val"),
    ],
)
def test_what_a_task_cannot_be_asked_is_refused(tmp_path, task, options, key):
    write_lines(tmp_path / "h.jsonl", [{"ctx": "c", "endings": ["a", "b"], "label": 0}])
    options = dict(options)
    data = tmp_path / options.pop("data", "")
    with pytest.raises(InputError, match=key):
        load(task, data, **options)


def test_ids_may_be_numbers(tmp_path):
    (subject,) = load("jsonl", write_lines(tmp_path / "q.jsonl", [{**SKY, "id": 7}]))
    assert subject.questions[0].id == "7"


def test_hellaswags_markers_are_taken_out():
    assert (
        task_files.clean_markers("Ski: [header] How [title] Go  on. [step] Now")
        == "Ski: How. Go on. Now"
    )
