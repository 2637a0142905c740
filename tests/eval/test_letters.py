"""The letters' token ids come from the tokenised context, whatever the tokenizer does to them."""

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from calibeval.io import InputError
from calibeval.prompts import encode, letters

CONTEXT = "light mass\nAnswer:"


def words(vocabulary: list[str], **special) -> PreTrainedTokenizerFast:
    """A tokenizer that splits at white space."""
    ids = {word: i for i, word in enumerate(vocabulary)}
    raw = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", **special)


def pieces(vocabulary: list[str], merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """A SentencePiece-like BPE, where a space is "▁"."""
    raw = Tokenizer(models.BPE({w: i for i, w in enumerate(vocabulary)}, merges, unk_token="<unk>"))
    raw.normalizer = normalizers.Replace(" ", "▁")
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


def test_white_space_split():
    tokenizer = words(["<unk>", "light", "mass", "Answer:", "A", "B", "C"])
    assert letters(tokenizer, CONTEXT, 3) == ((4,), (5,), (6,))
    with pytest.raises(InputError, match=r"letter ' D'.*'<unk>'\]"):
        letters(tokenizer, CONTEXT, 4)


def test_some_letters_split_and_some_not():
    alphabet = sorted(set("light mass\nAnswer:ABCD".replace(" ", "▁")))
    tokenizer = pieces(["<unk>", *alphabet, "▁B"], [("▁", "B")])
    space, a, c = (1 + alphabet.index(x) for x in "▁AC")
    whole = 1 + len(alphabet)
    assert letters(tokenizer, CONTEXT, 3) == ((space, a), (whole,), (space, c))


def test_letters_that_merge_with_the_contexts_end_or_look_alike_are_refused():
    alphabet = sorted(set("light mass\nAnswer:ABCD".replace(" ", "▁")))
    merges = [(":", "▁"), (":▁", "A"), (":▁", "B")]
    merged = pieces(["<unk>", *alphabet, ":▁", ":▁A", ":▁B"], merges)
    alike = pieces(["<unk>", *alphabet], [])
    alike.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(" ", "▁"), normalizers.Replace("▁B", "▁A")]
    )
    for tokenizer, said in (
        (merged, "cannot score the letter ' A'"),
        (alike, r"letter ' A'.* tokens of its own for each letter"),
    ):
        with pytest.raises(InputError, match=said):
            letters(tokenizer, CONTEXT, 2)


def test_appended_end_token_is_left_out():
    tokenizer = words(["<unk>", "<s>", "</s>", "x", "Answer:", "A", "B"], eos_token="</s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert encode(tokenizer, ["x Answer:"]) == [[1, 3, 4]]
    assert letters(tokenizer, "x Answer:", 2) == ((5,), (6,))
