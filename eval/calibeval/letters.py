"""Which token ids stand for the answer letters after a given context.

A letter's ids come from tokenising context and letter together: many tokenizers give " A" another
id in text than alone, and some split it (SentencePiece without a piece "▁A": "▁", "A").
"""

from collections.abc import Sequence
from dataclasses import dataclass

from calibeval.io import InputError
from calibeval.tasks import LETTERS


@dataclass(frozen=True)
class Plan:
    """How to read the letters in one forward: feed the context, then the spine.

    Letter i is the spine's first `depth_i` tokens, then `id_i`:
    log P(letter i) = Σ_{j < depth_i} log P(spine_j | context, spine_{<j})
                      + log P(id_i | context, spine_{<depth_i}).
    Most tokenizers have a token for each letter: an empty spine and depth 0.
    """

    merged: int  # tokens at the context's end that the letter changes; left out of the context
    spine: tuple[int, ...]
    letters: tuple[tuple[int, int], ...]  # (depth, id) of each letter


def encode(tokenizer, texts: Sequence[str], special: bool = True) -> list[list[int]]:
    """Token ids, by default with the tokenizer's own start token; never with an end token."""
    ids = tokenizer(list(texts), add_special_tokens=special)["input_ids"]
    end = tokenizer.eos_token_id
    probe = tokenizer("x", add_special_tokens=special)["input_ids"]
    appended = end is not None and probe[-1:] == [end]
    return [row[:-1] for row in ids] if appended else ids


def plan(tokenizer, context: str, n_choices: int, space: str = " ", special: bool = True) -> Plan:
    """Derive the letters' ids after `context`; letters that one forward cannot tell are refused."""
    letters = [space + letter for letter in LETTERS[:n_choices]]
    texts = [context, *(context + letter for letter in letters)]
    bare, *full = encode(tokenizer, texts, special)
    base = common_prefix([bare, *full])
    rest = [tuple(ids[base:]) for ids in full]
    spine = max((ids[:-1] for ids in rest), key=len)
    for letter, ids in zip(letters, rest, strict=True):
        unknown = not ids or tokenizer.unk_token_id in ids
        if unknown or rest.count(ids) > 1 or spine[: len(ids) - 1] != ids[:-1]:
            pieces = tokenizer.convert_ids_to_tokens(list(ids))
            raise InputError(
                f"the tokenizer cannot score the letter {letter!r}: after {context[-12:]!r} it "
                f"becomes {pieces}, "
                + ("the unknown token" if unknown else "expected tokens that tell it from the rest")
            )
    return Plan(len(bare) - base, spine, tuple((len(ids) - 1, ids[-1]) for ids in rest))


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """Length of the longest prefix that all rows share."""
    low, high = min(rows), max(rows)  # the rest lie between them in dictionary order
    for i, (a, b) in enumerate(zip(low, high, strict=False)):
        if a != b:
            return i
    return min(len(low), len(high))
