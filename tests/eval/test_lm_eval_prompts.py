"""Prompts, plain and in chats, against what lm-evaluation-harness sends for the same rows.

Runs where lm_eval and TRL are (tests/eval/peers_env.sh), whose tasks and chat templates are used;
needs no hub.
"""

import csv
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_records import read_lines, write_lines

from calibeval.ask import chat, prompts, tasks
from calibeval.ask.request import Task
from calibeval.ask.scoring import fit_prompts

pytestmark = pytest.mark.slow
for name in ("lm_eval", "trl"):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
lm_eval_task = pytest.importorskip("lm_eval.api.task")
yaml_loader = pytest.importorskip("lm_eval.tasks._yaml_loader")


def folder_of(package: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    return Path(spec.submodule_search_locations[0])


TASKS = folder_of("lm_eval") / "tasks"
TEMPLATES = folder_of("trl") / "chat_templates"

Pair = tuple[str, str]  # context and continuation
Rows = list[dict[str, Any]]


def requests(
    file: str, splits: dict[str, Rows], shots: int = 0, limit: int | None = None, **asked: Any
) -> list[Pair]:
    """What lm-evaluation-harness sends to a model for a task's file.

    Few-shot examples are the first ones. `asked` are arguments of its `build_all_requests`.
    """
    from datasets import Dataset

    config = yaml_loader.load_yaml(TASKS / file, resolve_func=True)
    rows = {split: Dataset.from_list(documents) for split, documents in splits.items()}
    config["custom_dataset"] = lambda **_: rows
    config["num_fewshot"] = shots
    config["fewshot_config"] = {**(config.get("fewshot_config") or {}), "sampler": "first_n"}
    task = lm_eval_task.ConfigurableTask(config=config)
    task.build_all_requests(limit=limit, **asked)
    return [request.args for request in task.instances]


def ours(task: Task, tokenizer: Any = None, subject_name: str | None = None) -> list[Pair]:
    """The same of our prompts, of one subject."""
    found = []
    chat_format = chat.of_task(task, tokenizer)
    task = tasks.resolved(task)
    for subject in tasks.load(task):
        if subject_name not in (None, subject.name):
            continue
        for question in subject.questions:
            mode = prompts.SCORING_MODES[task.scoring]
            prompt = mode.build(subject, question, task.shots, chat_format)
            endings = prompt.endings or prompts.LETTERS[: len(question.choices)]
            found += [(prompt.text, prompt.separator + ending) for ending in endings]
    return found


# --- Data ---


def arc_rows(file: Path) -> Rows:
    """AI2's rows as the hub has them."""
    rows = []
    for row in read_lines(file):
        choices = row["question"]["choices"]
        columns = {key: [choice[key] for choice in choices] for key in ("text", "label")}
        rows.append({**row, "question": row["question"]["stem"], "choices": columns})
    return rows


@pytest.fixture(scope="session")
def arc_easy(shared_data) -> tuple[Path, dict[str, Rows]]:
    folder = shared_data("arc_easy.tar.xz")
    files = {"train": "Train", "validation": "Dev", "test": "Test"}
    return folder, {
        split: arc_rows(folder / f"ARC-Easy-{name}.jsonl") for split, name in files.items()
    }


@pytest.fixture
def hellaswag(shared_data, tmp_path) -> tuple[Path, dict[str, Rows]]:
    rows = read_lines(shared_data("hellaswag_val.jsonl.xz"))
    for number, row in enumerate(rows):
        # Markers as the original file has them.
        first, _, last = row["ctx"].rpartition(". ")
        row["ind"] = number
        row["ctx_a"] = f"{first}.  [title] x"
        row["ctx_b"] = last
        row["label"] = str(row["label"])
        row["endings"] = [f"[step] {ending}" for ending in row["endings"]]
    splits = {"train": rows[:5], "validation": rows[5:]}
    write_lines(tmp_path / "hellaswag_val.jsonl", splits["validation"])
    write_lines(tmp_path / "hellaswag_train.jsonl", splits["train"])
    return tmp_path, splits


@pytest.fixture(scope="session")
def mmlu_rows(shared_data) -> Callable[[str], dict[str, Rows]]:
    """mmlu_rows(subject) → its splits, in the hub's columns."""
    folder = shared_data("mmlu.tar.xz")

    def read(subject: str) -> dict[str, Rows]:
        splits = {}
        for split in ("dev", "test"):
            with open(folder / split / f"{subject}_{split}.csv", newline="") as file:
                splits[split] = [
                    {
                        "question": row[0],
                        "choices": row[1:5],
                        "answer": "ABCD".index(row[5]),
                        "subject": subject,
                    }
                    for row in csv.reader(file)
                ]
        return splits

    return read


# --- Plain prompts ---


def test_arc_easy(arc_easy):
    folder, splits = arc_easy
    expected = requests("arc/arc_easy.yaml", splits)
    assert len(expected) > 4 * 2350
    assert ours(Task(task="arc_easy", data=str(folder))) == expected
    expected = requests("arc/arc_easy.yaml", splits, shots=3)
    assert ours(Task(task="arc_easy", data=str(folder), shots=3)) == expected


def test_hellaswag(hellaswag):
    folder, splits = hellaswag
    expected = requests("hellaswag/hellaswag.yaml", splits)
    assert len(expected) == 4 * 10037
    assert ours(Task(task="hellaswag", data=str(folder))) == expected


# --- Chats ---


@pytest.fixture(params=["qwen2_5", "llama3", "gemma"])
def chat_model(request, tiny_model):
    """lm-evaluation-harness's model, whose tokenizer adds a start token and has a real template.

    Qwen 2.5's has a newline at its end; Llama 3's writes the start token itself and trims what it
    is given; Gemma's refuses a system text.
    """
    from lm_eval.models.huggingface import HFLM
    from tokenizers import processors
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.eos_token = "<s>"
    tokenizer.chat_template = (TEMPLATES / f"{request.param}.jinja").read_text()
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    return HFLM(pretrained=model, tokenizer=tokenizer, backend="causal")


CHATS = [
    {"shots": 0},
    {"shots": 4},
    {"shots": 4, "few_shot": "one_turn", "system": "Answer with one letter."},
]


def chats(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `build_all_requests` for the options of a `Task`."""
    return {
        "apply_chat_template": True,
        "fewshot_as_multiturn": options.get("few_shot") != "one_turn",
        "chat_template": model.apply_chat_template,
        "system_instruction": options.get("system"),
    }


def chat_options(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a `Task`, without those that the model's template does not know."""
    options = {**options, "chat_template": "tokenizer"}
    if "System role not supported" in model.tokenizer.chat_template:
        options.pop("system", None)
    return options


def assert_same_tokens(task: Task, model: Any, pairs: list[Pair]) -> None:
    """Our token ids, put together, are the model's; texts are parted where it parts them."""
    items = fit_prompts(tasks.load(task), task, model.tokenizer, None)
    expected = iter(pairs)
    for item in items:
        for branch in item.job.branches:
            context, ending = model._encode_pair(*next(expected))
            assert [*item.job.context, *branch] == [*context, *ending]
            if item.scoring == "continuation":
                assert list(branch) == ending


@pytest.mark.parametrize("options", CHATS)
def test_mmlu_in_a_chat(chat_model, mmlu_rows, shared_data, options):
    data = str(shared_data("mmlu.tar.xz"))
    for subject in ("anatomy", "high_school_us_history", "moral_disputes"):
        expected = requests(
            f"mmlu/default/mmlu_{subject}.yaml",
            mmlu_rows(subject),
            options["shots"],
            **chats(chat_model, options),
        )
        asked = chat_options(chat_model, options)
        task = Task(task="mmlu", data=data, subjects=(subject,), **asked)
        assert ours(task, chat_model.tokenizer) == expected
        task = task.model_copy(update={"limit": 5})
        assert_same_tokens(task, chat_model, expected)


@pytest.mark.parametrize("options", CHATS)
def test_hellaswag_in_a_chat(chat_model, hellaswag, options):
    folder, splits = hellaswag
    expected = requests(
        "hellaswag/hellaswag.yaml", splits, options["shots"], 300, **chats(chat_model, options)
    )
    asked = chat_options(chat_model, options)
    task = Task(task="hellaswag", data=str(folder), limit=300, **asked)
    assert ours(task, chat_model.tokenizer) == expected
    assert_same_tokens(task, chat_model, expected)


# --- The other built-in tasks, on rows in their hub's columns ---


def written(folder: Path, splits: dict[str, Rows]) -> str:
    """A folder with a file of JSON lines for each split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        write_lines(folder / f"{split}.jsonl", rows)
    return str(folder)


def in_splits(row_of: Callable[[int], dict[str, Any]], *names: str) -> dict[str, Rows]:
    """Six rows of each split, all different."""
    return {
        name: [row_of(10 * place + number) for number in range(6)]
        for place, name in enumerate(names)
    }


def piqa_row(number: int) -> dict[str, Any]:
    goal = f"To open jar {number}, "
    return {"goal": goal, "sol1": "turn  it.", "sol2": f"eat {number}", "label": number % 2}


def boolq_row(number: int) -> dict[str, Any]:
    passage = f"Cats -- {number} cats sat.\nThey {{{{ sat }}}}."
    return {
        "passage": passage,
        "question": f"did {number} cats sit",
        "idx": number,
        "label": number % 2,
    }


def labeled_choices(number: int, count: int) -> dict[str, list[str]]:
    return {
        "text": [f"choice {number + step}" for step in range(count)],
        "label": list("ABCDE"[:count]),
    }


def openbookqa_row(number: int) -> dict[str, Any]:
    return {
        "id": f"7-{number}",
        "question_stem": f"The sun {number}" + " " * (number % 2),  # as some rows end
        "choices": labeled_choices(number, 4),
        "answerKey": "ABCD"[number % 4],
    }


def commonsense_row(number: int) -> dict[str, Any]:
    return {
        "id": str(number),
        "question": f" Where is {number}? ",
        "choices": labeled_choices(number, 5),
        "answerKey": "ABCDE"[number % 5],
    }


def mmlu_pro_row(number: int) -> dict[str, Any]:
    return {
        "question_id": number,
        "question": f" Which is {number}?\n",
        "options": [f"o{number + step}" for step in range(4 + number % 7)],
        "answer": "ABCD"[number % 4],
        "answer_index": number % 4,
        "category": ["law", "computer science"][number % 2],
    }


MADE = {
    "piqa": ("piqa/piqa.yaml", in_splits(piqa_row, "train", "validation")),
    "boolq": ("super_glue/boolq/default.yaml", in_splits(boolq_row, "train", "validation")),
    "openbookqa": (
        "openbookqa/openbookqa.yaml",
        in_splits(openbookqa_row, "train", "validation", "test"),
    ),
    "commonsense_qa": (
        "commonsense_qa/default.yaml",
        in_splits(commonsense_row, "train", "validation"),
    ),
}


@pytest.mark.parametrize("shots", [0, 3])
@pytest.mark.parametrize("task", MADE)
def test_made_rows(tmp_path, task, shots):
    file, splits = MADE[task]
    expected = requests(file, splits, shots)
    data = written(tmp_path / task, splits)
    assert ours(Task(task=task, data=data, shots=shots)) == expected


@pytest.mark.parametrize("shots", [0, 5])
def test_mmlu_pro(tmp_path, shots):
    splits = in_splits(mmlu_pro_row, "validation", "test")
    expected = requests("leaderboard/mmlu_pro/mmlu_pro.yaml", splits, shots)
    data = written(tmp_path / "mmlu_pro", splits)
    found = ours(Task(task="mmlu_pro", data=data, shots=shots))
    assert sorted(found) == sorted(expected)  # ours are by subject
    assert len(found) == len(expected)


@pytest.mark.parametrize("shots", [0, 5])
def test_global_mmlu(mmlu_rows, tmp_path, shots):
    splits = {}
    for split, rows in mmlu_rows("anatomy").items():
        splits[split] = [
            {
                "sample_id": f"anatomy/{split}/{number}",
                "subject": "anatomy",
                "question": row["question"],
                **{f"option_{letter}": row["choices"]["abcd".index(letter)] for letter in "abcd"},
                "answer": "ABCD"[row["answer"]],
            }
            for number, row in enumerate(rows)
        ]
    expected = requests("global_mmlu/full/de/global_mmlu_full_de_anatomy.yaml", splits, shots)
    written(tmp_path / "global" / "de", splits)
    data = str(tmp_path / "global")
    task = Task(task="global_mmlu", data=data, language="de", shots=shots)
    assert ours(task) == expected


def test_truthfulqa(shared_data, tmp_path):
    """On the authors' file, and on rows as the hub has them."""
    file = shared_data("TruthfulQA.csv.xz")
    with open(file, newline="", encoding="utf-8") as lines:
        table = list(csv.DictReader(lines))
    rows = []
    for row in table:
        wrong = [text.strip() for text in row["Incorrect Answers"].strip("; ").split(";")]
        choices = [row["Best Answer"].strip(), *wrong]
        targets = {"choices": choices, "labels": [1] + [0] * len(wrong)}
        rows.append({"question": row["Question"], "mc1_targets": targets})
    expected = requests("truthfulqa/truthfulqa_mc1.yaml", {"validation": rows})
    assert len(rows) == 817
    data = tmp_path / "TruthfulQA.csv"
    data.write_bytes(file.read_bytes())
    assert ours(Task(task="truthfulqa_mc1", data=str(data))) == expected
    hub_rows = write_lines(tmp_path / "validation.jsonl", rows)
    assert ours(Task(task="truthfulqa_mc1", data=str(hub_rows))) == expected
