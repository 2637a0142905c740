"""Conversations, and prompts with reference texts: the rows of a file, and their tokens."""

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from calibeval.io import InputError, counted, json_lines, read_text, reading

EXPECTED = (
    '{"messages": [{"role": …, "content": …}, …]} or {"instruction": …, "input": …, "output": …}'
)
# The Tulu format, for tokenizers without a template of their own.
TULU = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
# The prompt of Stanford Alpaca (train.py, PROMPT_DICT), which its own rows were published with; a
# row's input stands in the user's message under its heading, as `alpaca` writes it.
ALPACA = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'Below is an instruction that describes a task' }}"
    "{% if '\n\n### Input:\n' in message['content'] %}"
    "{{ ', paired with an input that provides further context' }}{% endif %}"
    "{{ '. Write a response that appropriately completes the request.\n\n### Instruction:\n' }}"
    "{{ message['content'] + '\n\n### Response:' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% if not loop.last %}{{ '\n\n' }}{% endif %}"
    "{% else %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
)
TEMPLATES = {"tulu": TULU, "alpaca": ALPACA}


class Document(NamedTuple):
    """A prompt and its reference as tokens, end-of-text included unless it was cut."""

    number: int  # of its line or row in the file
    context: tuple[int, ...]
    reference: tuple[int, ...]


def rows(path: Path, skip: int = 0) -> Iterator[tuple[int, str, dict]]:
    """(number, place, row) behind the first `skip`, of JSON lines or of one JSON list."""
    with reading(path) as lines:
        first = next(filter(str.strip, lines), "")
    if not first.lstrip().startswith("["):
        found = ((n, f"{path}, line {n}", row) for n, row in json_lines(path))
    else:
        try:
            listed = enumerate(json.loads(read_text(path)), 1)
        except ValueError as error:
            raise InputError(f"{path}: not JSON ({error})") from error
        found = ((n, f"{path}, row {n}", row) for n, row in listed)
    yield from itertools.islice(found, skip, None)


def alpaca(row: dict) -> list[dict]:
    """The conversation of a row of Alpaca's."""
    given = f"\n\n### Input:\n{row['input']}" if row.get("input") else ""
    return [
        {"role": "user", "content": row["instruction"] + given},
        {"role": "assistant", "content": row["output"]},
    ]


def conversation(row: dict, where: str, expected: str = EXPECTED) -> list[dict]:
    """The turns of `messages`, or of Alpaca's row; another one raises `InputError`."""
    match row:
        case {"messages": [_, *_] as turns} if all(map(is_turn, turns)):
            return turns
        case {"instruction": str(), "output": str()} if isinstance(row.get("input") or "", str):
            return alpaca(row)
    raise InputError(f"{where}: expected {expected}, found {json.dumps(row)[:80]}")


def is_turn(value: object) -> bool:
    """Whether it is a conversation's turn."""
    match value:
        case {"role": str(), "content": str()}:
            return True
    return False


def conversations(path: Path, limit: int | None = None) -> list[list[dict]]:
    """The first `limit` conversations of a file; the first bad row raises `InputError`."""
    found = [conversation(row, where) for _, where, row in itertools.islice(rows(path), limit)]
    if not found:
        raise InputError(f"{path}: no examples in this file")
    return found


def parse(row: dict, where: str) -> tuple[str | None, list[dict], str]:
    """(prompt, conversation, reference): a row has a prompt, or a conversation that the reference
    ends; another one raises `InputError`."""
    match row:
        case {"prompt": str(prompt), "reference": str(reference)}:
            return prompt, [], reference
    turns = conversation(row, where, f'{{"prompt": …, "reference": …}}, {EXPECTED}')
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        expected = "an assistant's turn at the end, behind a user's"
        raise InputError(f"{where}: expected {expected}, found {json.dumps(row)[:80]}")
    return None, turns, turns[-1]["content"]


def texts(row: dict, where: str, tokenizer) -> tuple[str, str, bool]:
    """(prompt, reference, whether both are without the tokenizer's start token).

    Conversations go through the tokenizer's chat template, which writes that token itself. Without
    one Alpaca's rows have Stanford's prompt, `messages` the Tulu format.
    """
    prompt, turns, reference = parse(row, where)
    if not turns or not reference.strip():
        return prompt or "", reference, True
    own = tokenizer.chat_template
    options = {"chat_template": own or TEMPLATES["alpaca" if "instruction" in row else "tulu"]}
    chat = partial(tokenizer.apply_chat_template, tokenize=False, **options)
    try:
        prompt, whole = chat(turns[:-1], add_generation_prompt=True), chat(turns)
    except Exception as error:  # whatever a template raises
        raise InputError(f"{where}: the chat template refuses it: {error}") from error
    if not whole.startswith(prompt):
        raise InputError(f"{where}: the chat template rewrites the prompt when the answer follows")
    return prompt, whole[len(prompt) :], not own


def documents(
    path: Path,
    tokenizer,
    ends: Sequence[int],  # tokens that end a text
    *,
    most: int,  # tokens of a reference
    longest: int | None,  # tokens that the model takes
    skip: int = 0,
    limit: int | None = None,
) -> list[Document]:
    """The first `limit` documents behind `skip` rows.

    Empty references, and prompts that leave no room for `most` tokens, are left out with a warning.
    Prompt and reference are tokenised together; a token belongs to where its text begins.
    """
    if not tokenizer.is_fast:
        lacks = "no tokenizer.json, without which no token's place in the text is known"
        raise InputError(f"{tokenizer.name_or_path}: {lacks}")
    found, left_out = [], {}
    for number, where, row in rows(path, skip):
        if len(found) == limit:
            break
        prompt, reference, plain = texts(row, where, tokenizer)
        if not reference.strip():
            left_out.setdefault("empty reference", []).append(where)
            continue
        both = {"add_special_tokens": plain, "return_offsets_mapping": True}
        encoded = tokenizer(prompt + reference, **both)
        ids, places = encoded["input_ids"], encoded["offset_mapping"]
        begins = (i for i, (start, end) in enumerate(places) if len(prompt) <= start < end)
        first = next(begins, len(ids))
        text = until(ids[first:], ends)
        if not text or text[-1] not in ends:
            if not plain:
                raise InputError(f"{where}: the chat template ends the answer without end-of-text")
            text.append(tokenizer.eos_token_id)
        if not first:
            raise InputError(f"{where}: the prompt is empty, and the tokenizer has no start token")
        if longest and first + most > longest:
            why = f"prompt and {most} tokens exceed the model's {longest}"
            left_out.setdefault(why, []).append(where)
            continue
        found.append(Document(number, tuple(ids[:first]), tuple(text[:most])))
    for why, places in left_out.items():
        dropped = counted(len(places), "row")
        print(f"warning: {dropped} left out, the first {places[0]}: {why}", file=sys.stderr)
    if not found:
        raise InputError(f"{path}: no usable row behind the first {skip}; expected {EXPECTED}")
    return found


def until(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The tokens up to and including the first that is one of `ends`."""
    length = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[:length])


def end_tokens(model: str, tokenizer) -> list[int]:
    """The tokens that end a text: the tokenizer's, and those of generation_config.json."""
    from transformers import GenerationConfig

    if tokenizer.eos_token_id is None:
        raise InputError(f"{model}: tokenizer_config.json has no end-of-text (eos_token)")
    try:
        more = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # no such file
        more = None
    more = more if isinstance(more, list) else [more]
    return sorted({tokenizer.eos_token_id, *more} - {None})
