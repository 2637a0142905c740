"""Entropy calibration: is a model's own text as random as reference text is surprising to it?

    L = E Σ_t −log p(Y_t | x, Y_<t)      log loss of the references Y
    H = E Σ_t H(p(· | x, Ŷ_<t))          entropy along the model's own texts Ŷ ~ p
    EntCE = H − L                        nats; above 0: the model's own text is the more random

("On the Entropy Calibration of Language Models", arXiv 2511.11966.) Sums run over a document, its
end-of-text included, both cut at the same number of tokens; a document that has ended adds 0 to
every later position, so that no position's mean is of the survivors alone.
"""

import hashlib
import itertools
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from calibeval import __version__, models, records
from calibeval.io import InputError, counted, json_lines, read_text
from calibeval.store import Store

EXPECTED = (
    '{"prompt": …, "reference": …}, {"instruction": …, "input": …, "output": …} or '
    '{"messages": […, {"role": "assistant", "content": …}]}'
)
# Stanford Alpaca's prompt (train.py, PROMPT_DICT), for tokenizers without a chat template.
ALPACA = (
    "Below is an instruction that describes a task{further}. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{content}\n\n### Response:"
)
FURTHER = ", paired with an input that provides further context"
RESAMPLES = 2000


class Document(NamedTuple):
    """A prompt and its reference, end-of-text included unless it was cut, as tokens."""

    number: int  # of its line or row in the file
    context: list[int]
    reference: list[int]


def read_rows(path: Path) -> Iterator[tuple[int, str, dict]]:
    """(number, place, row) of JSON lines or of one JSON list."""
    text = read_text(path)
    if not text.lstrip().startswith("["):
        yield from ((n, f"{path}, line {n}", row) for n, row in json_lines(path))
        return
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from error
    yield from ((n, f"{path}, row {n}", row) for n, row in enumerate(rows, 1))


def pair(row: dict, where: str, tokenizer) -> tuple[str, str, bool] | None:
    """(prompt, reference, whether both are plain text); None where the reference is empty.

    Alpaca's rows and `messages` go through the tokenizer's chat template, which also writes their
    special tokens; without one, Alpaca's have Stanford's prompt.
    """
    turns = None
    match row:
        case {"prompt": str(prompt), "reference": str(reference)}:
            pass
        case {"instruction": str(content), "output": str(reference)}:
            given = row.get("input")
            content += f"\n\n### Input:\n{given}" if given else ""
            prompt = ALPACA.format(content=content, further=FURTHER if given else "")
            turns = [{"role": "user", "content": content}]
            turns.append({"role": "assistant", "content": reference})
        case {"messages": [_, *_, {"role": "assistant", "content": str(reference)}] as turns}:
            prompt = None
        case _:
            raise InputError(f"{where}: expected {EXPECTED}, found {json.dumps(row)[:80]}")
    if not reference.strip():
        return None
    if not (turns and tokenizer.chat_template):
        if prompt is None:
            lacks = "its tokenizer has none; give prompts with references"
            raise InputError(f"{where}: `messages` need the model's chat template, and {lacks}")
        return prompt, reference, True
    try:
        chat = tokenizer.apply_chat_template
        prompt = chat(turns[:-1], tokenize=False, add_generation_prompt=True)
        whole = chat(turns, tokenize=False)
    except Exception as error:  # whatever a template raises
        raise InputError(f"{where}: the chat template refuses it: {error}") from error
    if not whole.startswith(prompt):
        raise InputError(f"{where}: the chat template rewrites the prompt when the answer follows")
    return prompt, whole[len(prompt) :], False


def documents(
    path: Path,
    tokenizer,
    ends: Sequence[int],
    *,
    most: int,  # tokens of a reference
    longest: int | None,  # tokens of prompt and text that the model takes
    skip: int = 0,
    limit: int | None = None,
) -> list[Document]:
    """The first `limit` documents behind `skip` rows; empty references and prompts that leave no
    room for `most` tokens are left out, with a warning that names the first.

    Prompt and reference are tokenised together; a token belongs to where its text begins.
    """
    from calibeval.engines.sampling import until

    found, left_out = [], {}
    for number, where, row in itertools.islice(read_rows(path), skip, None):
        if len(found) == limit:
            break
        parts = pair(row, where, tokenizer)
        if parts is None:
            left_out.setdefault("an empty reference", []).append(where)
            continue
        prompt, reference, plain = parts
        both = {"add_special_tokens": plain, "return_offsets_mapping": True}
        encoded = tokenizer(prompt + reference, **both)
        ids, places = encoded["input_ids"], encoded["offset_mapping"]
        begins = (i for i, (start, end) in enumerate(places) if len(prompt) <= start < end)
        first = next(begins, len(ids))
        text = until(ids[first:], ends)
        if not text or text[-1] not in ends:
            if not plain:
                raise InputError(f"{where}: the chat template ends no answer with end-of-text")
            text.append(tokenizer.eos_token_id)
        if not first:
            raise InputError(f"{where}: the prompt is empty, and the tokenizer has no start token")
        if longest and first + most > longest:
            left_out.setdefault(f"{most} tokens would exceed the model's", []).append(where)
            continue
        found.append(Document(number, ids[:first], text[:most]))
    for why, places in left_out.items():
        rows = counted(len(places), "row")
        print(f"warning: left out {rows}, the first {places[0]}: {why}", file=sys.stderr)
    if not found:
        raise InputError(f"{path}: no document to measure behind row {skip}; expected {EXPECTED}")
    return found


def end_tokens(model: str, tokenizer) -> list[int]:
    """The tokens that end a text: the tokenizer's, and those of generation_config.json."""
    from transformers import GenerationConfig

    if tokenizer.eos_token_id is None:
        raise InputError(f"{model}: the tokenizer has no end-of-text (eos_token): no text ends")
    try:
        more = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # no such file
        more = None
    more = more if isinstance(more, list) else [more]
    return sorted({tokenizer.eos_token_id, *(token for token in more if token is not None)})


def measure(
    model: str,
    data: Path,
    out: Path,
    settings: Sequence,  # of `Setting`
    *,
    skip: int = 0,
    limit: int | None = None,
    max_new_tokens: int = 128,
    seed: int = 0,
    batch_size: int = 128,
    device: str = "auto",
    dtype: str = "auto",
    overwrite: bool = False,
) -> None:
    """Write a record for each document and setting; a second call makes those that lack.

    A document's random numbers are the same in every setting and for every model, which makes
    differences between them less noisy.
    """
    from calibeval.engines import load_max_length, load_tokenizer
    from calibeval.engines.hf import TransformersEngine
    from calibeval.engines.sampling import Sampler

    models.check_model(model)
    tokenizer, longest = load_tokenizer(model), load_max_length(model)
    if not tokenizer.is_fast:
        raise InputError(f"{model}: a fast tokenizer (tokenizer.json) is needed")
    ends, longest = end_tokens(model, tokenizer), longest and longest + 1
    room = {"most": max_new_tokens, "longest": longest, "skip": skip, "limit": limit}
    texts = documents(data, tokenizer, ends, **room)
    asked = {"model_digest": models.digest(model), "data": str(data), "skip": skip, "limit": limit}
    asked |= {"max_new_tokens": max_new_tokens, "seed": seed, "dtype": dtype}
    asked["prompts_sha256"] = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    store = Store(out, asked, overwrite)
    finished = store.finished() | ({row["id"]: row for row in read(out)} if out.exists() else {})
    pending = [(s, d) for s in settings for d in texts if name(d, s) not in finished]
    if not pending:
        print(f"{out}: complete already, {counted(len(finished), 'record')}", file=sys.stderr)
        return
    engine = TransformersEngine(model, device=device, dtype=dtype)
    sampler = Sampler.of(engine.model)
    store.engine(engine.describe() | {"batch_size": batch_size})
    versions = {"calibeval": __version__, **engine.versions()}
    total = len(settings) * len(texts)
    progress = tqdm(total=total, initial=total - len(pending), unit="text", mininterval=0.5)
    for setting, group in itertools.groupby(pending, key=lambda entry: entry[0]):
        of = sorted((d for _, d in group), key=lambda d: len(d.context) + len(d.reference))
        for start in range(0, len(of), batch_size):
            batch, began = of[start : start + batch_size], time.perf_counter()
            contexts = [d.context for d in batch]
            random = [np.random.default_rng([seed, d.number]).random(max_new_tokens) for d in batch]
            own = sampler.sample(contexts, setting, np.stack(random), ends)
            seen = sampler.read(contexts, [d.reference for d in batch], setting)
            along = sampler.read(contexts, own, setting)
            rows = []
            for d, tokens, (reference, _), (log_p, entropy) in zip(
                batch, own, seen, along, strict=True
            ):
                if not (np.isfinite(entropy).all() and not np.isnan(reference).any()):
                    raise InputError(f"{data}, {d.number}: the model's output is not finite")
                row = {"id": name(d, setting), "document": d.number} | vars(setting)
                row |= {"reference_logprobs": [x if x > -math.inf else None for x in reference]}
                row |= {"logprobs": log_p.tolist(), "entropies": entropy.tolist()}
                rows.append(row | {"text": tokenizer.decode(tokens), "ended": tokens[-1] in ends})
            seconds = time.perf_counter() - began
            tokens = {"generated_tokens": sum(map(len, own))}
            store.add(len(finished), rows, tokens, seconds)
            finished |= {row["id"]: row for row in rows}
            progress.update(len(rows))
    progress.close()
    rows = sorted(finished.values(), key=lambda row: (key(row), row["document"]))
    store.finish(rows, {"model": model, "versions": versions, "training": models.training(model)})


def name(document: Document, setting) -> str:
    """A record's id."""
    return f"{document.number} at {setting.temperature:g}, {setting.top_p:g}, {setting.min_p:g}"


def key(row: dict) -> tuple[float, float, float]:
    """What orders settings: the hottest and least truncated first."""
    return -row["temperature"], -row["top_p"], row["min_p"]


def read(path: Path) -> list[dict]:
    """The records of a file; a damaged line raises `InputError` with its number."""
    records.require(path)
    rows = []
    for number, row in json_lines(path):
        match row:
            case {
                "id": str(),
                "temperature": float() | int(),
                "top_p": float() | int(),
                "min_p": float() | int(),
                "reference_logprobs": [_, *_],
                "logprobs": [_, *_] as own,
                "entropies": [_, *_] as entropies,
            } if len(own) == len(entropies):
                rows.append(row)
            case _:
                raise InputError(f"{path}, line {number}: is no record of `calibeval entropy`")
    if not rows or len(rows) != records.meta(path).get("questions", len(rows)):
        raise InputError(f"{path}: {counted(len(rows), 'record')}, fewer than were made")
    return rows


def curve(rows: Iterable[dict], of: str, positions: int) -> np.ndarray:
    """(documents, positions) of −"reference_logprobs", −"logprobs" or "entropies"; 0 after the end,
    +∞ where a reference token is cut."""
    rows = list(rows)
    found = np.zeros((len(rows), positions))
    for i, row in enumerate(rows):
        values = row[of]
        found[i, : len(values)] = [-np.inf if x is None else x for x in values]
    return found if of == "entropies" else -found


def summary(rows: Sequence[dict], positions: int, resamples: int = RESAMPLES) -> dict:
    """Figures of one setting in nats, [low, high] from a bootstrap of whole documents, 95 %.

    A token: the sum over all documents over the number of their tokens. A document: the mean sum.
    By position: the mean over all documents, ended ones included, and the share still alive.
    """
    loss, own, entropy = (
        curve(rows, of, positions) for of in ("reference_logprobs", "logprobs", "entropies")
    )
    lengths = [
        np.array([len(row[of]) for row in rows]) for of in ("reference_logprobs", "logprobs")
    ]
    cut = np.isinf(loss).sum() / lengths[0].sum()
    sums = np.stack([loss.sum(1), lengths[0], entropy.sum(1), lengths[1], own.sum(1)], 1)
    n = len(rows)
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=resamples)
    with np.errstate(invalid="ignore"):  # 0 × ∞, of references that are cut
        replicas = drawn @ sums
    by = np.vstack([sums.sum(0), replicas]).T
    loss_token, entropy_token, own_token = by[0] / by[1], by[2] / by[3], by[4] / by[3]
    found = {"documents": n, "log_loss": float("inf") if cut else float(loss_token[0]), "cut": cut}
    found |= {"entropy": float(entropy_token[0]), "surprisal": float(own_token[0])}
    found["surprisal_less_entropy"] = interval(own_token - entropy_token)
    found["entce"] = None if cut else interval(entropy_token - loss_token)
    found["entce_document"] = None if cut else interval((by[2] - by[0]) / n)
    quarter = max(positions // 4, 1)
    for part, at in {"first": slice(quarter), "last": slice(positions - quarter, None)}.items():
        found[f"entce_{part}_quarter"] = float((entropy - loss)[:, at].mean()) if not cut else None
        alive = [float((np.arange(positions)[at] < x[:, None]).mean()) for x in lengths]
        found[f"alive_{part}_quarter"] = dict(zip(("reference", "own"), alive, strict=True))
    return found


def interval(values: np.ndarray) -> dict[str, float]:
    """The first value, and the middle 95 % of the others."""
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return {"value": float(values[0]), "low": float(low), "high": float(high)}


def zero(settings: Sequence[dict], of: str) -> tuple[float, float] | None:
    """(temperature, log loss) at which the EntCE `of` is 0, between two settings; or None."""
    plain = [s for s in settings if s["top_p"] == 1 and s["min_p"] == 0]
    for hot, cold in itertools.pairwise(plain):
        above, below = hot[of]["value"], cold[of]["value"]
        if above * below <= 0 and above != below:
            share = above / (above - below)
            mix = (hot[k] + share * (cold[k] - hot[k]) for k in ("temperature", "log_loss"))
            return tuple(mix)
    return None


def summaries(path: Path) -> list[dict]:
    """A record file's settings, each with its `summary`."""
    rows, about = sorted(read(path), key=key), records.meta(path)
    positions = about.get("settings", {}).get("max_new_tokens")
    positions = positions or max(
        len(r[k]) for r in rows for k in ("reference_logprobs", "logprobs")
    )
    found = []
    for _, group in itertools.groupby(rows, key=key):
        group = list(group)
        of = {k: group[0][k] for k in ("temperature", "top_p", "min_p")}
        found.append(of | summary(group, positions))
    return found


def report(path: Path) -> str:
    """The table of a record file, and the temperature to choose."""
    found = summaries(path)
    lines = [f"{path}: {counted(found[0]['documents'], 'document')}; nats"]
    heading = ("temperature", "top-p", "min-p", "log loss", "entropy", "surprisal", "EntCE a token")
    heading += ("EntCE a document", "first quarter", "last quarter", "alive", "cut")
    cells = [heading, *map(row_of, found)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        lines.append("  ".join(f"{c:>{w}}" for c, w in zip(row, widths, strict=True)))
    lines.append("alive: share of references, of own texts at a position of the last quarter")
    for of, what in (("entce", "a token"), ("entce_document", "a document")):
        text = f"EntCE {what} is 0 at none of these temperatures, nor between two of them"
        if at := zero(found, of):
            text = f"EntCE {what} is 0 at temperature {at[0]:.3f}, log loss there {at[1]:.4f}"
        lines.append(text)
    return "\n".join(lines) + "\n"


def row_of(s: dict) -> tuple[str, ...]:
    """A setting's cells of the table."""

    def given(of: dict | None) -> str:
        return "–" if of is None else f"{of['value']:+.3f} [{of['low']:+.3f}, {of['high']:+.3f}]"

    def at(part: str) -> str:
        value = s[f"entce_{part}_quarter"]
        return "–" if value is None else f"{value:+.3f}"

    alive = s["alive_last_quarter"]
    return (
        *(f"{s[k]:g}" for k in ("temperature", "top_p", "min_p")),
        *(f"{s[k]:.3f}" for k in ("log_loss", "entropy", "surprisal")),
        *(given(s[k]) for k in ("entce", "entce_document")),
        *(at(part) for part in ("first", "last")),
        f"{alive['reference']:.2f}, {alive['own']:.2f}",
        f"{s['cut']:.2%}",
    )
