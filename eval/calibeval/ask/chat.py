"""Chat templates: a question as a user's turn, its answer as the beginning of the assistant's.

The turns where `few_shot` is "turns":

    system      the system text, then the task's header
    user        an example's question
    assistant   the example's answer
    …           the other examples, two turns each
    user        the question
    assistant   (the answer is read here)

and where it is "one_turn":

    system      the system text, then the task's header
    user        all examples with their answers, then the question
    assistant   (the answer is read here)

Without system text and header there is no system turn, though some templates write a system text
of their own then.

The turns are those of lm-evaluation-harness's `--apply_chat_template`, byte for byte.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from calibeval.ask.request import FewShotForm, Task
from calibeval.ask.task_files import FILLING_ERRORS
from calibeval.io import InputError, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OF_TOKENIZER = "tokenizer"  # the value of `chat_template` that asks for the model's own
PARAGRAPH = "\n\n"
# Some templates write today's date into every prompt, which would make other prompts of the same
# questions on another day. They get this one, which Llama 3.1's own has where it knows no date.
DATE = datetime(2024, 7, 26)
# Variables of a template, and arguments of transformers' method, that have a value here already.
SET_HERE = (
    *("messages", "conversation", "chat_template", "tokenize", "add_generation_prompt"),
    *("continue_final_message", "strftime_now", "return_dict", "return_tensors"),
)
# Show whether a template has a place for a text. No template has these words of its own.
SYSTEM_PROBE = "systemprobe6b1f"
USER_PROBE = "userprobe6b1f"


class Exchange(NamedTuple):
    """A few-shot example as it is shown."""

    question: str
    answer: str
    delimiter: str = " "

    @property
    def text(self) -> str:
        """Question and answer as one text."""
        return f"{self.question}{self.delimiter}{self.answer}"


Turn = dict[str, str]  # {"role": …, "content": …}


@dataclass(frozen=True)
class ChatFormat:
    """How a tokenizer's model is asked in its chat's form."""

    tokenizer: "PreTrainedTokenizerBase"
    template: str  # in Jinja
    source: str  # of the template, for messages
    few_shot: FewShotForm
    system: str | None
    arguments: Mapping[str, Any] = field(default_factory=dict)  # values of its own variables

    @cached_property
    def sha256(self) -> str:
        """Digest of the template's text; lm-evaluation-harness keeps the same one."""
        return hashlib.sha256(self.template.encode()).hexdigest()

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template shows a system text; some raise an error instead, or drop it."""
        try:
            turns = [_turn("system", SYSTEM_PROBE), _turn("user", USER_PROBE)]
            return SYSTEM_PROBE in self._render(turns)
        except FILLING_ERRORS:
            return False

    def prompt(self, header: str, examples: Sequence[Exchange], question: str) -> str:
        """The chat up to the first token of the answer.

        A template without a place for a system text loses the header, as in
        lm-evaluation-harness.
        """
        turns = []
        system = as_paragraphs(self.system or "", header)
        if system and self.takes_system:
            turns.append(_turn("system", system))
        if self.few_shot == "one_turn":
            shown = [example.text for example in examples]
            turns.append(_turn("user", PARAGRAPH.join([*shown, question])))
        else:
            for example in examples:
                turns.append(_turn("user", example.question))
                turns.append(_turn("assistant", example.answer))
            turns.append(_turn("user", question))
        try:
            return self._render(turns)
        except FILLING_ERRORS as error:
            raise InputError(
                f"{self.source}: this chat template cannot be filled: {error}"
            ) from error

    def begins_with_start_token(self, text: str) -> bool:
        """Whether the template wrote the tokenizer's start token, which must not be added then."""
        start = self.tokenizer.bos_token
        return bool(start) and text.startswith(str(start))

    def _render(self, turns: list[Turn]) -> str:
        text = self.tokenizer.apply_chat_template(
            turns,
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=True,
            strftime_now=DATE.strftime,
            **self.arguments,
        )
        return str(text)


def of_task(task: Task, tokenizer: "PreTrainedTokenizerBase") -> ChatFormat | None:
    """The task's chat format; None where its questions are plain text.

    Raises `InputError` for a template that is not there, or cannot be filled, or has no place for
    the task's system text.
    """
    if task.chat_template is None:
        return None
    if task.chat_template == OF_TOKENIZER:
        source = "--chat-template tokenizer"
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise InputError(
                f"{source}: {tokenizer.name_or_path or 'the tokenizer'} has no chat template; "
                "give --chat-template FILE.jinja, or leave it out for a base model"
            ) from error
    else:
        source = f"--chat-template {task.chat_template}"
        if not Path(task.chat_template).is_file():
            raise InputError(f"{source}: no such file; expected one in Jinja, or {OF_TOKENIZER!r}")
        template = read_text(task.chat_template)
    arguments = task.chat_template_arguments or {}
    _refuse_arguments_without_use(arguments, template, source)
    few_shot = task.few_shot or "turns"
    chat = ChatFormat(tokenizer, template, source, few_shot, task.system, arguments)
    if USER_PROBE not in chat.prompt("", [], USER_PROBE):
        raise InputError(f"{source}: leaves out the user's turn; expected a chat template in Jinja")
    if task.system and not chat.takes_system:
        raise InputError(f"{source}: has no place for a system text, so --system cannot be shown")
    return chat


def _refuse_arguments_without_use(arguments: Mapping[str, Any], template: str, source: str) -> None:
    for name in arguments:
        if name in SET_HERE:
            raise InputError(f"--chat-template-arguments {name}: is set by calibeval; leave it out")
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise InputError(
                f"{source}: has no variable {name!r}, which --chat-template-arguments sets"
            )


def as_paragraphs(first: str, second: str) -> str:
    """Two texts as paragraphs, without a gap where either has its own."""
    if not first or not second:
        return first + second
    if first[-1].isspace() or second[0].isspace():
        return first + second
    return first + PARAGRAPH + second


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}
