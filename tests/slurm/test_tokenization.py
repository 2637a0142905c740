"""Conversations become tokens and labels: where the loss lies, what is refused, what is cached."""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import psutil
import pytest
from sweep_tools import wait_for
from tokenizers.processors import TemplateProcessing
from training_runs import own_token_cache, tiny_options, turns, write_conversations
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase

from calibeval.io import InputError
from sweeps.runs.files import is_locked
from sweeps.training import tokenization
from sweeps.training.micro_batches import Updates
from sweeps.training.tokenization import IGNORE, make_tokenizer, tokenize_file

token_cache = pytest.fixture(autouse=True, scope="module")(own_token_cache)


def tokenized(tiny: Path, path: Path, **options: Any) -> tuple[list[dict], PreTrainedTokenizerBase]:
    """The rows of a tokenized file, and its tokenizer."""
    train_options = tiny_options(tiny, train_file=str(path), **options)
    tokenizer = make_tokenizer(train_options)
    return tokenize_file(train_options, tokenizer).to_list(), tokenizer


def learned_text(row: dict, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a row's targets."""
    return tokenizer.decode([token for token in row["labels"] if token != IGNORE])


SYSTEM = {"role": "system", "content": "w1 w2"}
DIALOG = [SYSTEM, *turns("what is w3?", "A w4", "B?", "C w5")]


def test_loss_lies_on_what_the_template_writes_for_the_assistant(tiny, tmp_path):
    path = write_conversations(tmp_path / "a.jsonl", DIALOG)
    (row,), tokenizer = tokenized(tiny, path)
    # The newline after an intermediate turn is the template's, written after the assistant's text.
    assert learned_text(row, tokenizer).replace("\n", "") == "A w4</s>C w5</s>"
    text = tokenizer.decode(row["input_ids"])
    assert text.startswith("<|system|>\nw1 w2\n<|user|>\nwhat is w3?")
    assert row["length"] == len(row["input_ids"]) == len(row["labels"])
    assert row["targets"] == sum(label != IGNORE for label in row["labels"])


def test_where_the_assistant_speaks_first_its_head_is_learned_too(tiny, tmp_path):
    path = write_conversations(tmp_path / "a.jsonl", DIALOG[2:])
    (row,), tokenizer = tokenized(tiny, path)
    assert learned_text(row, tokenizer).replace("\n", "") == "|assistant|>A w4</s>C w5</s>"


def test_a_templates_generation_marks_say_where_the_loss_lies(tiny, tmp_path):
    path = write_conversations(tmp_path / "a.jsonl", DIALOG)
    (unmarked_row,), tokenizer = tokenized(tiny, path)
    answer = "{{- message['content'] + eos_token }}"
    marked_answer = f"{{% generation %}}{answer}{{% endgeneration %}}"
    tokenizer.chat_template = tokenizer.chat_template.replace(answer, marked_answer)
    assert "{% generation %}" in tokenizer.chat_template
    (row,) = tokenize_file(tiny_options(tiny, train_file=str(path)), tokenizer).to_list()
    assert row["input_ids"] == unmarked_row["input_ids"]
    assert learned_text(row, tokenizer) == "A w4</s>C w5</s>"


def test_alpacas_rows_read_as_its_own_prompt(tiny, tmp_path):
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Say A.", "input": "", "output": "A"},
    ]
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps(rows))
    tokens, tokenizer = tokenized(tiny, path, chat_template_name="alpaca")
    assert [tokenizer.decode(row["input_ids"]) for row in tokens] == [
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:3</s>",
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nSay A.\n\n### Response:A</s>",
    ]
    assert [learned_text(row, tokenizer) for row in tokens] == ["3</s>", "A</s>"]


MISSPELT_ROLE = json.dumps({"messages": [*turns("B", "A"), {"role": "usr", "content": "B"}]})


@pytest.mark.parametrize(
    "bad_row", ["{", "[]", '{"messages": []}', '{"messages": [{"role": "user"}]}', MISSPELT_ROLE]
)
def test_a_bad_row_is_named(tiny, tmp_path, bad_row):
    path = write_conversations(tmp_path / "a.jsonl", turns("B", "A"))
    path.write_text(path.read_text() + bad_row + "\n")
    with pytest.raises(InputError, match=r"a\.jsonl, line 2: "):
        tokenized(tiny, path)


def test_a_template_that_hides_the_assistants_part_is_refused(tiny, tmp_path):
    path = write_conversations(tmp_path / "chats.jsonl", turns("a", "b", "c", "d"))
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    tokenizer.chat_template = "{{ messages | length }}{{ messages[-1]['content'] }}"
    with pytest.raises(InputError, match="rewrites earlier messages"):
        tokenize_file(tiny_options(tiny, train_file=str(path)), tokenizer)


def test_cut_conversations_without_a_target_are_dropped(tiny, tmp_path):
    path = write_conversations(tmp_path / "a.jsonl", turns("w1 " * 50, "A"), turns("B", "A"))
    train_options = tiny_options(tiny, train_file=str(path), max_seq_length=64)
    tokens = tokenize_file(train_options, make_tokenizer(train_options))
    assert max(tokens["length"]) == 64
    data = Updates(train_options, tokens, ranks=1)
    assert data.summary.startswith("data: 1 conversations, ")
    assert data.summary.endswith(", 1 dropped")
    assert data.conversations_of(0).tolist() == [1]


def test_data_without_any_target_is_refused(tiny, tmp_path):
    path = write_conversations(tmp_path / "a.jsonl", turns("w1 " * 50, "A"), turns("B", "A"))
    train_options = tiny_options(tiny, train_file=str(path), max_seq_length=3)
    tokens = tokenize_file(train_options, make_tokenizer(train_options))
    with pytest.raises(InputError, match="max_seq_length=3"):
        Updates(train_options, tokens, ranks=1)


def test_tokens_are_cached_by_file_template_length_and_number(tiny, tmp_path, monkeypatch):
    path = tmp_path / "chat.jsonl"
    path.write_bytes((tiny / "chat.jsonl").read_bytes())
    settings: list[dict[str, Any]] = [
        {},
        {"max_seq_length": 48},
        {"max_train_samples": 9},
        {"chat_template_name": "alpaca"},
    ]
    plain, cut, first_nine, alpaca = (tokenized(tiny, path, **options)[0] for options in settings)
    assert max(row["length"] for row in cut) == 48
    assert len(first_nine) == 9
    assert alpaca != plain

    with monkeypatch.context() as patch:  # What is cached is not made again.
        patch.setattr(tokenization, "encode_conversations", None)
        again = [tokenized(tiny, path, **options)[0] for options in settings]
    assert again == [plain, cut, first_nine, alpaca]

    path.write_text(path.read_text().replace("moon ", "sun "))
    assert tokenized(tiny, path)[0] != plain


def test_several_processes_tokenize_as_one_does(tiny, tmp_path, monkeypatch):
    """And tokenizers are left as parallel as they were found, for the prompts of scoring."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    one_process, tokenizer = tokenized(tiny, tiny / "chat.jsonl")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "empty"))
    several = tokenize_file(tiny_options(tiny), tokenizer, conversations_per_shard=10)
    assert several.to_list() == one_process
    # Python's os.environ is not where the tokenizers, written in Rust, look.
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    assert getenv(b"TOKENIZERS_PARALLELISM") is None


TOKENIZE_FOREVER = """
import json, os, pathlib, sys, time
from sweeps.training import callbacks, options, tokenization

def encode_conversations(*_):
    pathlib.Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(600)

tokenization.encode_conversations = encode_conversations
stop_signal = callbacks.StopSignal(pathlib.Path("absent"))
train_options = options.TrainOptions(**json.loads(sys.argv[2]))
tokenizer = tokenization.make_tokenizer(train_options)
tokenization.tokenize_file(train_options, tokenizer, conversations_per_shard=1)
"""


@dataclass
class TokenizingRun:
    """A run that is at its tokenizing, and the processes below it."""

    process: subprocess.Popen[str]
    workers: list[int]
    children: list[psutil.Process]

    def wait(self) -> int:
        """The exit code; nobody may be left, nor the lock be held."""
        exit_code = self.process.wait(timeout=60)
        wait_for(lambda: not any(psutil.pid_exists(child.pid) for child in self.children), 20)
        return exit_code


@pytest.fixture
def tokenizing_run(tiny, tmp_path) -> Iterator[TokenizingRun]:
    """A run whose workers, one a core, will not end by themselves."""
    workers = tmp_path / "workers"  # a file for each process that tokenizes
    workers.mkdir()
    process = start_tokenizing(tiny, tmp_path)
    wait_for(lambda: len(list(workers.iterdir())) == len(os.sched_getaffinity(0)))
    children = psutil.Process(process.pid).children(recursive=True)
    yield TokenizingRun(process, [int(path.name) for path in workers.iterdir()], children)
    process.kill()
    process.communicate()


def start_tokenizing(tiny: Path, folder: Path) -> subprocess.Popen[str]:
    """A process that tokenizes into the cache `folder`, forever."""
    options = tiny_options(tiny).model_dump_json(exclude_unset=True)
    return subprocess.Popen(
        [sys.executable, "-c", TOKENIZE_FOREVER, str(folder / "workers"), options],
        env={**os.environ, "HF_DATASETS_CACHE": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_run_leaves_nobody_tokenizing(tokenizing_run, tmp_path):
    """Neither its workers nor the process that datasets has beside them."""
    tokenizing_run.process.kill()
    assert tokenizing_run.wait() == -signal.SIGKILL
    assert not any(is_locked(lock) for lock in tmp_path.glob("*.lock"))


def test_a_killed_worker_ends_the_tokenizing(tokenizing_run, tiny):
    """With words that say what died; nobody waits for the part that is lost."""
    os.kill(tokenizing_run.workers[0], signal.SIGKILL)
    assert tokenizing_run.wait() == 1
    _, errors = tokenizing_run.process.communicate()
    cores = len(tokenizing_run.workers)
    killed = f"InputError: {tiny / 'chat.jsonl'}: one of the {cores} processes that tokenize it was"
    assert f"{killed} killed: out of memory, perhaps; give the run more memory" in errors


def test_who_waits_for_a_tokenizing_run_says_so_and_both_can_be_stopped(
    tokenizing_run, tiny, tmp_path, monkeypatch
):
    """With the exit code of a stop, as nothing is lost; nor does anybody wait for ever."""
    waiting = start_tokenizing(tiny, tmp_path)
    line = waiting.stderr.readline()
    assert line == f"waiting: {tiny / 'chat.jsonl'}: another process is tokenizing it\n"
    waiting.terminate()
    assert waiting.wait(timeout=10) == 75
    waiting.communicate()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(tokenization, "TOKENIZING_PATIENCE", 1)
    with pytest.raises(InputError, match=r"chat\.jsonl: another process is tokenizing it"):
        tokenized(tiny, tiny / "chat.jsonl")
    tokenizing_run.process.terminate()
    assert tokenizing_run.wait() == 75
    output, _ = tokenizing_run.process.communicate()
    assert output == "stopped: SIGTERM came before the first update; nothing is lost\n"


@pytest.fixture
def tokenizer_that_adds_bos(tiny, tmp_path) -> PreTrainedTokenizerBase:
    """A tokenizer that puts a beginning-of-sequence token before every text by itself."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(tmp_path)
    return tokenizer


def test_add_bos_begins_conversations_once(tiny, tmp_path, tokenizer_that_adds_bos):
    plain, _ = tokenized(tiny, tiny / "chat.jsonl")
    begun, tokenizer = tokenized(
        tiny,
        tiny / "chat.jsonl",
        tokenizer_name=str(tmp_path),
        chat_template_name="tulu",
        add_bos=True,
    )
    assert all(row["input_ids"][0] == tokenizer.bos_token_id for row in begun)
    assert [row["length"] - 1 for row in begun] == [row["length"] for row in plain]
    assert [row["targets"] for row in begun] == [row["targets"] for row in plain]


def saved_tokenizer(tiny: Path, folder: Path, **changes: Any) -> str:
    """A folder with the tiny tokenizer after these changes of its attributes."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    return str(folder)


BARE = {"chat_template": "{{ messages }}", "eos_token": None}


@pytest.mark.parametrize(
    ("changes", "options", "named"),
    [
        ({"chat_template": {"rag": "a", "tool_use": "b"}}, {}, r"templates \(rag, tool_use\)"),
        # A tokenizer without a template is told from one whose template is replaced.
        ({**BARE, "chat_template": None}, {}, "neither a chat template nor an end-of-sequence"),
        (
            BARE,
            {"chat_template_name": "alpaca"},
            "train.chat_template_name=alpaca: .*no end-of-",
        ),
        ({**BARE, "pad_token": None}, {}, "neither a padding token nor an end-of-sequence token"),
        ({"bos_token": None}, {"add_bos": True}, "has no such token"),
        ({"chat_template": "{{ bos_token }}{{ messages }}"}, {"add_bos": True}, "already adds"),
    ],
)
def test_a_tokenizer_that_cannot_serve_is_refused(tiny, tmp_path, changes, options, named):
    name = saved_tokenizer(tiny, tmp_path / "changed", **changes)
    with pytest.raises(InputError, match=named):
        tokenized(tiny, tiny / "chat.jsonl", tokenizer_name=name, **options)


def test_a_tokenizer_that_is_not_of_the_tokenizers_library_is_refused(tiny, tmp_path):
    """Such as one that is written in Python, which does not tell where a token's text begins."""
    ByT5Tokenizer().save_pretrained(tmp_path)
    expected = f"{tmp_path}: the tokenizer is a ByT5Tokenizer, .*; set train.tokenizer_name to "
    with pytest.raises(InputError, match=expected):
        make_tokenizer(tiny_options(tiny, tokenizer_name=str(tmp_path)))
