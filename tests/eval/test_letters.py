"""The letters' token ids come from the tokenized context, whatever the tokenizer does to them."""

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from calibeval.ask.prompts import Branches, encode, find_letters
from calibeval.ask.questions import LETTERS
from calibeval.io import InputError

CONTEXT = "light mass\nAnswer:"
# What a SentencePiece-like tokenizer needs to spell the context and four letters.
ALPHABET = sorted(set("light mass\nAnswer:ABCD".replace(" ", "▁")))


def word_tokenizer(vocabulary: list[str], **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer that splits at white space."""
    ids = {word: index for index, word in enumerate(vocabulary)}
    raw = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", **special)


def piece_tokenizer(
    merged_pieces: list[str], merges: list[tuple[str, str]]
) -> PreTrainedTokenizerFast:
    """A SentencePiece-like BPE, where a space is "▁"; its ids are those of this list, in order:
    "<unk>", the alphabet, the merged pieces."""
    vocabulary = ["<unk>", *ALPHABET, *merged_pieces]
    ids = {piece: index for index, piece in enumerate(vocabulary)}
    raw = Tokenizer(models.BPE(ids, merges, unk_token="<unk>"))
    raw.normalizer = normalizers.Replace(" ", "▁")
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


def letter_branches(tokenizer: PreTrainedTokenizerFast, text: str, n_choices: int) -> Branches:
    """The ids of " A", " B", … after a plain prompt."""
    letters = [f" {letter}" for letter in LETTERS[:n_choices]]
    return find_letters(tokenizer, text, letters).branches


def test_letters_that_are_words():
    tokenizer = word_tokenizer(["<unk>", "light", "mass", "Answer:", "A", "B", "C"])
    assert letter_branches(tokenizer, CONTEXT, 3) == ((4,), (5,), (6,))


def test_a_letter_that_is_no_word_is_refused():
    tokenizer = word_tokenizer(["<unk>", "light", "mass", "Answer:", "A", "B", "C"])
    with pytest.raises(InputError, match=r"letter ' D'.*'<unk>'\]"):
        letter_branches(tokenizer, CONTEXT, 4)


def test_some_letters_split_and_some_not():
    tokenizer = piece_tokenizer(["▁B"], [("▁", "B")])
    space, a, c = (tokenizer.convert_tokens_to_ids(piece) for piece in "▁AC")
    whole_b = tokenizer.convert_tokens_to_ids("▁B")
    assert letter_branches(tokenizer, CONTEXT, 3) == ((space, a), (whole_b,), (space, c))


def test_letters_that_merge_with_the_contexts_end_are_refused():
    tokenizer = piece_tokenizer([":▁", ":▁A", ":▁B"], [(":", "▁"), (":▁", "A"), (":▁", "B")])
    with pytest.raises(InputError, match="cannot score the letter ' A'"):
        letter_branches(tokenizer, CONTEXT, 2)


def test_letters_that_become_the_same_tokens_are_refused():
    tokenizer = piece_tokenizer([], [])
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(" ", "▁"), normalizers.Replace("▁B", "▁A")]
    )
    with pytest.raises(InputError, match=r"letter ' A'.* tokens of its own for each letter"):
        letter_branches(tokenizer, CONTEXT, 2)


def test_appended_end_token_is_left_out():
    vocabulary = ["<unk>", "<s>", "</s>", "x", "Answer:", "A", "B"]
    tokenizer = word_tokenizer(vocabulary, eos_token="</s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert encode(tokenizer, ["x Answer:"]) == [[1, 3, 4]]
    assert letter_branches(tokenizer, "x Answer:", 2) == ((5,), (6,))
