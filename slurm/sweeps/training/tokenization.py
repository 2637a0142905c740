"""A file of conversations becomes token ids and labels.

`sweeps.runs.conversations` reads the file, which launching does too, to refuse a bad one early.
`datasets` keeps the result in its cache, so that it is made once for a file, tokenizer, template,
length and number of conversations (max_train_samples + held_out), and all runs and ranks share it.
`sweeps.training.micro_batches` deals it out.
"""

import hashlib
import json
import math
import multiprocessing
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Features, List, Value, concatenate_datasets
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase

from calibeval.ask.engines import load_tokenizer
from calibeval.io import InputError, read_text, sha256
from sweeps.runs.conversations import conversations
from sweeps.runs.files import locked
from sweeps.runs.processes import end_with_parent_and_ignore_warnings
from sweeps.training.options import TrainOptions

IGNORE = -100  # the label of a token that is not learned
# The format of what is cached. Raise it whenever the same file becomes other rows: by a change of
# `sweeps.runs.conversations`, of the functions below or of the columns. All caches are then made
# anew, and checkpoints that were written with the former rows are refused.
FORMAT = 1
COLUMNS: dict[str, Any] = {
    "input_ids": List(Value("int32")),
    "labels": List(Value("int32")),
    "length": Value("int32"),
    "targets": Value("int32"),
}
# A template's text, with its comments, is part of the tokens' fingerprint, so that it stays as it
# is. alpaca.jinja tells a row that has an `input` by the words "### Input:", which
# `sweeps.runs.conversations` writes between the instruction and the input.
TEMPLATES = Path(__file__).parent / "chat_templates"
TOKENIZING_PATIENCE = 12 * 3600  # seconds of waiting for another process that tokenizes the file


def make_tokenizer(train_options: TrainOptions) -> PreTrainedTokenizerBase:
    """The run's tokenizer, with the chat template that the options ask for.

    Raises InputError where the tokenizer is not one of the library `tokenizers`, where it has
    several templates and none is its default, and where it lacks a token that the template, padding
    or `add_bos` needs.
    """
    tokenizer = load_tokenizer(train_options.tokenizer_name or train_options.model_name_or_path)
    name = tokenizer.name_or_path
    # `tokenize_file` needs `backend_tokenizer`: its settings, as a text, go into the fingerprint of
    # the cached tokens. And only a tokenizer that has one tells where in a conversation each token
    # begins, by which `encode_conversations` finds the assistant's tokens.
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise InputError(
            f"{name}: the tokenizer is a {type(tokenizer).__name__}, which is not of the library "
            "tokenizers and does not tell where a token's text begins; set train.tokenizer_name to "
            "a folder or owner/name with the same tokens and a tokenizer.json"
        )
    templates = tokenizer.chat_template
    if isinstance(templates, dict) and train_options.chat_template_name is None:
        if "default" not in templates:
            names = ", ".join(sorted(templates))
            raise InputError(
                f"{name}: the tokenizer has several chat templates ({names}) and none is called "
                "default; set train.chat_template_name=tulu, or leave one of them in it"
            )
        tokenizer.chat_template = templates["default"]
    if train_options.chat_template_name or not tokenizer.chat_template:
        if tokenizer.eos_token is None and train_options.chat_template_name:
            raise InputError(
                f"train.chat_template_name={train_options.chat_template_name}: {name} has no "
                "end-of-sequence token, which the template writes; set eos_token in its "
                "tokenizer_config.json"
            )
        if tokenizer.eos_token is None:
            raise InputError(
                f"{name}: the tokenizer has neither a chat template nor an end-of-sequence token; "
                "set one in its tokenizer_config.json"
            )
        template_name = train_options.chat_template_name or "tulu"
        tokenizer.chat_template = read_text(TEMPLATES / f"{template_name}.jinja")
    if train_options.add_bos:
        if tokenizer.bos_token is None:
            raise InputError(f"train.add_bos: {name} has no such token")
        template = tokenizer.chat_template
        if "bos_token" in template or tokenizer.bos_token in template:
            raise InputError("train.add_bos: the chat template already adds that token")
        tokenizer.chat_template = "{{ bos_token }}" + template
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise InputError(
                f"{name}: the tokenizer has neither a padding token nor an end-of-sequence token; "
                "set one in its tokenizer_config.json"
            )
        # Padding has no target and nothing sees it, so that any token will do.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenize_file(
    train_options: TrainOptions,
    tokenizer: PreTrainedTokenizerBase,
    conversations_per_shard: int = 5000,
) -> Dataset:
    """The conversations of `train_file` as rows of token ids, from the cache or made on all cores.

    Columns: `input_ids`; `labels`, which are −100 where nothing is learned; `length`, the number of
    tokens; `targets`, the number of labels that are not −100. The cache has a file for every
    `conversations_per_shard` conversations, which one process makes. Ranks and runs that begin
    together wait for the first of them.

    Raises InputError for a file that cannot be read, for a template that hides the assistant's
    part, where one of the processes is killed, and after twelve hours of waiting.
    """
    path = Path(train_options.train_file)
    limit = None
    if train_options.max_train_samples is not None:
        limit = train_options.max_train_samples + train_options.held_out
    data_fingerprint = fingerprint(sha256(path), limit)
    messages_fingerprint = fingerprint(data_fingerprint, FORMAT)
    tokens_fingerprint = fingerprint(
        data_fingerprint,
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        train_options.max_seq_length,
        FORMAT,
    )
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    busy = f"{path}: another process is tokenizing it"
    with locked(cache / f"{tokens_fingerprint}.lock", TOKENIZING_PATIENCE, busy):
        try:
            conversations_as_json = Dataset.from_generator(
                messages_as_json,
                gen_kwargs={"path": path, "limit": limit},
                fingerprint=messages_fingerprint,
            )
        except DatasetGenerationError as error:
            raise error.__cause__ or error from None
        count = math.ceil(len(conversations_as_json) / conversations_per_shard)
        shards = {}
        for index in range(count):
            file = cache / f"{tokens_fingerprint}-{index:05}-of-{count:05}.arrow"
            shards[file] = conversations_as_json.shard(count, index, contiguous=True)
        lacking = {file: shard for file, shard in shards.items() if not file.exists()}
        encode_shards(lacking, path, tokenizer, train_options.max_seq_length)
        tokens = concatenate_datasets([Dataset.from_file(str(file)) for file in shards])
    tokens._fingerprint = tokens_fingerprint
    return tokens


def encode_shards(
    shards: Mapping[Path, Dataset],
    train_file: Path,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
) -> None:
    """Write the tokens of each shard into its file, on all cores; a file appears whole.

    Raises what a process raises, and InputError where one is killed.
    """
    processes = min(len(os.sched_getaffinity(0)), len(shards))
    if processes <= 1:
        for file, shard in shards.items():
            encode_shard(shard, file, tokenizer, max_length)
        return
    # Processes of a run that is killed must end with it.
    os.register_at_fork(after_in_child=end_with_parent_and_ignore_warnings)
    # An executor notes when one of its processes dies. `Dataset.map` with several processes hangs
    # then, also in datasets 5.2.
    executor = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("fork"),
        initializer=os.putenv,
        initargs=("TOKENIZERS_PARALLELISM", "false"),  # one core each
    )
    with executor:
        futures = [
            executor.submit(encode_shard, shard, file, tokenizer, max_length)
            for file, shard in shards.items()
        ]
        try:
            for future in as_completed(futures):
                future.result()
        except BrokenProcessPool:
            raise InputError(
                f"{train_file}: one of the {processes} processes that tokenize it was killed: out "
                "of memory, perhaps; give the run more memory (memory_per_node), or fewer cores "
                "(cpus_per_process, or taskset), and launch again"
            ) from None
        finally:
            executor.shutdown(cancel_futures=True)


def encode_shard(
    shard: Dataset, file: Path, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> None:
    """Write the tokens of some conversations, as `messages_as_json` yields them, into a file."""
    shard.map(
        encode_batch,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer, "max_length": max_length},
        remove_columns="messages",
        features=Features(COLUMNS),  # type: ignore[arg-type]
        cache_file_name=str(file),
        new_fingerprint=file.stem,
    )


def fingerprint(*parts: object) -> str:
    """16 hexadecimal digits that change with any of the parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def messages_as_json(path: Path, limit: int | None) -> Iterator[dict[str, str]]:
    """The messages of the first `limit` conversations of a file, before any chat template.

    They are JSON, because their roles and keys differ, and a table's column has one type.
    """
    for messages in conversations(path, limit):
        yield {"messages": json.dumps(messages)}


def encode_batch(
    batch: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> dict[str, list]:
    """The columns of `tokenize_file` for a batch of conversations."""
    columns: dict[str, list] = {"input_ids": [], "labels": [], "length": [], "targets": []}
    batch_of_messages = [json.loads(messages) for messages in batch["messages"]]
    for all_ids, assistant_mask in encode_conversations(batch_of_messages, tokenizer):
        ids = np.asarray(all_ids[:max_length], dtype=np.int32)
        learned = np.asarray(assistant_mask[:max_length], dtype=bool)
        learned[:1] = False  # No token comes before the first one to predict it.
        columns["input_ids"].append(ids)
        columns["labels"].append(np.where(learned, ids, IGNORE))
        columns["length"].append(len(ids))
        columns["targets"].append(int(learned.sum()))
    return columns


def encode_conversations(
    batch_of_messages: list[list[dict]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[list[int], Sequence[bool] | np.ndarray]]:
    """Each conversation's token ids, and for each token whether the assistant wrote it.

    A template with {% generation %} marks says so itself. Without them the assistant wrote what the
    template adds for each of its messages, and a token belongs to where its text begins.
    """
    encoded: Any
    if re.search(r"{%-?\s*generation", tokenizer.chat_template):
        encoded = tokenizer.apply_chat_template(
            batch_of_messages, return_dict=True, return_assistant_tokens_mask=True
        )
        yield from zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        return
    rendered = [render(messages, tokenizer) for messages in batch_of_messages]
    texts = [text for text, _ in rendered]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    for index, (_, assistant_spans) in enumerate(rendered):
        offsets = np.asarray(encoded["offset_mapping"][index]).reshape(-1, 2)
        token_starts = offsets[:, 0]
        assistant_mask = np.zeros(len(token_starts), dtype=bool)
        for start, end in assistant_spans:
            assistant_mask |= (token_starts >= start) & (token_starts < end)
        yield encoded["input_ids"][index], assistant_mask


def render(
    messages: list[dict], tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[tuple[int, int]]]:
    """A conversation's text, and which spans of characters the assistant wrote.

    Raises InputError for a template whose text of a conversation does not begin with its text of
    the conversation's beginning.
    """

    def apply_template(some: list[dict], add_generation_prompt: bool = False) -> str:
        rendered = tokenizer.apply_chat_template(
            some, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        assert isinstance(rendered, str)  # the ids only with tokenize=True
        return rendered

    text = apply_template(messages)
    assistant_spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # Templates refuse an empty conversation. If the assistant speaks first, the head of its
        # message is therefore learned too.
        before = apply_template(messages[:i], add_generation_prompt=True) if i > 0 else ""
        is_last = i + 1 == len(messages)
        up_to_message = text if is_last else apply_template(messages[: i + 1])
        if not (up_to_message.startswith(before) and text.startswith(up_to_message)):
            raise InputError(
                f"{tokenizer.name_or_path}: its chat template rewrites earlier messages, so the "
                "assistant's part cannot be told apart; use train.chat_template_name=tulu"
            )
        assistant_spans.append((len(before), len(up_to_message)))
    return text, assistant_spans
