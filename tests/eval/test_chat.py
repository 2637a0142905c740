"""Chats: what the records say, what is refused, and where the answer is read."""

import json
import shutil
from pathlib import Path

import pytest
from made_records import read_lines
from test_letters import piece_tokenizer

from calibeval.ask import chat, prompts, tasks
from calibeval.ask.prompts import find_letters
from calibeval.ask.request import Task
from calibeval.io import InputError

ROOT = Path(__file__).resolve().parents[2]
TULU = ROOT / "slurm" / "sweeps" / "training" / "chat_templates" / "tulu.jinja"
# Begins an assistant's turn with a space, writes no start token and knows no system text.
SPACE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ message.role + ': ' + message.content + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture
def chat_model(tiny_model, tmp_path) -> Path:
    """The model with Tulu's template in its tokenizer."""
    from transformers import AutoTokenizer

    folder = shutil.copytree(tiny_model, tmp_path / "chat-model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TULU.read_text()
    tokenizer.eos_token = "<s>"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(chat_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(chat_model)


def prompt(tokenizer, mmlu, **options) -> str:
    """The first prompt of a chat with one example."""
    task = Task(task="mmlu", data=str(mmlu), shots=1, **options)
    subject = tasks.load(task)[0]
    chat_format = chat.of_task(task, tokenizer)
    mode = prompts.SCORING_MODES[task.scoring or "letters"]
    return mode.build(subject, subject.questions[0], 1, chat_format).text


def test_turns(tokenizer, mmlu):
    plain = prompt(tokenizer, mmlu)
    header, example, question = plain.split("\n\n")
    example, _, letter = example.rpartition(" ")
    assert prompt(tokenizer, mmlu, chat_template="tokenizer", system="Be brief.") == (
        f"<|system|>\nBe brief.\n\n{header.replace('  ', ' ')}\n\n\n"
        f"<|user|>\n{example}\n<|assistant|>\n{letter}<s>\n<|user|>\n{question}\n<|assistant|>\n"
    )


def test_examples_in_one_turn(tokenizer, mmlu):
    header, example, question = prompt(tokenizer, mmlu).split("\n\n")
    assert prompt(tokenizer, mmlu, chat_template=str(TULU), few_shot="one_turn") == (
        f"<|system|>\n{header.replace('  ', ' ')}\n\n\n"
        f"<|user|>\n{example}\n\n{question}\n<|assistant|>\n"
    )


THINKING = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)


@pytest.mark.parametrize("given", ["enable_thinking=False", {"enable_thinking": False}])
def test_a_templates_own_variables(tokenizer, mmlu, tmp_path, given):
    """Qwen 3 thinks before it answers unless its template is told otherwise."""
    template = tmp_path / "thinking.jinja"
    template.write_text(THINKING)
    asked = {"chat_template": str(template)}
    assert not prompt(tokenizer, mmlu, **asked).endswith("<think></think>")
    asked["chat_template_arguments"] = given
    assert prompt(tokenizer, mmlu, **asked).endswith("<think></think>")


@pytest.mark.parametrize("expression", ["message.content + none", "1 / 0"])
def test_a_template_that_fails_is_named(tokenizer, mmlu, tmp_path, expression):
    """An error that is not Jinja's own was a traceback."""
    template = tmp_path / "t.jinja"
    template.write_text("{% for message in messages %}{{ " + expression + " }}{% endfor %}")
    expected = r"--chat-template \S*t.jinja: this chat template cannot be filled: "
    with pytest.raises(InputError, match=expected):
        prompt(tokenizer, mmlu, chat_template=str(template))


def test_records_say_so(run, command, chat_model, mmlu, tmp_path):
    plain = tmp_path / "r.jsonl"
    in_chat = tmp_path / "chat.jsonl"
    run(*command, "--model", chat_model)
    printed = run(
        *command, "--model", chat_model, "--chat-template", "tokenizer", "--out", in_chat, "--json"
    )
    assert "letter_mass" in json.loads(printed.out)
    digest = chat.ChatFormat(None, TULU.read_text(), "", "turns", None).sha256
    assert {row["chat_template"] for row in read_lines(in_chat)} == {digest}
    assert not any("chat_template" in row for row in read_lines(plain))
    settings = json.loads((tmp_path / "chat.jsonl.meta.json").read_text())["settings"]
    assert settings["chat_template"] == "tokenizer"


def test_the_start_token_is_not_added_twice(tokenizer):
    begun = chat.ChatFormat(tokenizer, "{{ bos_token }}", "", "turns", None)
    assert begun.begins_with_start_token("<s>x")
    assert not begun.begins_with_start_token("x")


def test_the_date_is_the_same_every_day(tokenizer):
    template = "{{ strftime_now('%d %b %Y') }} {{ messages[-1].content }}"
    dated = chat.ChatFormat(tokenizer, template, "", "turns", None)
    assert dated.prompt("", [], "question") == "26 Jul 2024 question"


def test_a_template_that_ends_in_a_space():
    """Its space becomes one token with the letter, and the letter's probability is the token's."""
    tokenizer = piece_tokenizer(["▁A", "▁B"], [("▁", "A"), ("▁", "B")])
    ids = [tokenizer.convert_tokens_to_ids(piece) for piece in ("▁A", "▁B")]
    letters = find_letters(tokenizer, "light: ", ["A", "B"], in_chat=True)
    assert letters.branches == ((ids[0],), (ids[1],))
    assert letters.replaced == 1
    with pytest.raises(InputError, match="cannot score the letter 'A'"):
        find_letters(tokenizer, "light: ", ["A", "B"])


def test_a_template_without_system_texts(run, refused, command, chat_model, tmp_path):
    template = tmp_path / "space.jinja"
    template.write_text(SPACE)
    printed = run(*command, "--model", chat_model, "--chat-template", template)
    assert "has no place for a system text, so the task's header is left out" in printed.err
    message = refused(
        *command, "--model", chat_model, "--chat-template", template, "--system", "Be brief."
    )
    assert "so --system cannot be shown" in message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--system", "x"], "error: --system: is for a chat; give chat_template as well"),
        (
            ["--chat-template", "mine.jinja", "--chat-template-arguments", "enable_thinkin=False"],
            "mine.jinja: has no variable 'enable_thinkin', which --chat-template-arguments sets",
        ),
        (
            ["--chat-template", "mine.jinja", "--chat-template-arguments", "messages=1"],
            "--chat-template-arguments messages: is set by calibeval",
        ),
        (["--chat-template", "bad.jinja"], "bad.jinja: this chat template cannot be filled"),
        (["--chat-template", "own.jinja"], "own.jinja: leaves out the user's turn"),
    ],
)
def test_refused(refused, command, tmp_path, monkeypatch, options, expected):
    monkeypatch.chdir(tmp_path)
    Path("bad.jinja").write_text("{% for %}")
    Path("mine.jinja").write_text("{{ messages[-1].content }}{{ enable_thinking }}")
    Path("own.jinja").write_text("You answer a question. A system text comes first.")
    assert expected in refused(*command, *options)
