"""The letters' token ids come from the tokenised context, whatever the tokenizer does to them."""

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from calibeval.io import InputError
from calibeval.prompts import Plan, common_prefix, encode, plan

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


def test_byte_level(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer.convert_tokens_to_ids(["ĠA", "ĠB", "ĠC", "ĠD"])
    assert plan(tokenizer, CONTEXT, 4) == Plan(0, tuple((i,) for i in ids))
    assert ids != tokenizer.convert_tokens_to_ids(["A", "B", "C", "D"])


def test_white_space_split():
    tokenizer = words(["<unk>", "light", "mass", "Answer:", "A", "B", "C"])
    assert plan(tokenizer, CONTEXT, 3) == Plan(0, ((4,), (5,), (6,)))
    with pytest.raises(InputError, match=r"letter ' D'.*\['<unk>'\], the unknown token"):
        plan(tokenizer, CONTEXT, 4)


def test_letters_split_in_two():
    alphabet = sorted(set("light mass\nAnswer:ABCD".replace(" ", "▁")))
    tokenizer = pieces(["<unk>", *alphabet], [])
    space, *letters = (1 + alphabet.index(c) for c in "▁ABC")
    assert plan(tokenizer, CONTEXT, 3) == Plan(0, tuple((space, i) for i in letters))


def test_some_letters_split_and_some_not():
    alphabet = sorted(set("light mass\nAnswer:ABCD".replace(" ", "▁")))
    tokenizer = pieces(["<unk>", *alphabet, "▁B"], [("▁", "B")])
    space, a, c = (1 + alphabet.index(x) for x in "▁AC")
    whole = 1 + len(alphabet)
    assert plan(tokenizer, CONTEXT, 3) == Plan(0, ((space, a), (whole,), (space, c)))


def test_context_end_that_merges_with_the_letter():
    alphabet = sorted(set("light mass\nAnswer:ABCD".replace(" ", "▁")))
    merged = [":▁", ":▁A", ":▁B"]
    merges = [(":", "▁"), (":▁", "A"), (":▁", "B")]
    tokenizer = pieces(["<unk>", *alphabet, *merged], merges)
    n = len(alphabet)
    assert plan(tokenizer, CONTEXT, 2) == Plan(1, ((n + 2,), (n + 3,)))


def test_letters_on_two_branches():
    alphabet = sorted(set("light mass\nAnswer:AB".replace(" ", "▁")))
    tokenizer = pieces(["<unk>", *alphabet, "▁B"], [("▁", "B")])
    # " A" becomes "▁", "A" but " B" becomes "▁B", ":".
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(" ", "▁"), normalizers.Replace("▁B", "▁B:")]
    )
    ids = tokenizer.get_vocab()
    expected = tuple((ids[a], ids[b]) for a, b in (("▁", "A"), ("▁B", ":")))
    assert plan(tokenizer, CONTEXT, 2) == Plan(0, expected)


def test_letters_that_look_alike_are_refused():
    tokenizer = pieces(["<unk>", *sorted(set("light mass\nAnswer:AB".replace(" ", "▁")))], [])
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(" ", "▁"), normalizers.Replace("▁B", "▁A")]
    )
    with pytest.raises(InputError, match="expected tokens that tell it from the rest"):
        plan(tokenizer, CONTEXT, 2)


def test_appended_end_token_is_left_out():
    tokenizer = words(["<unk>", "<s>", "</s>", "x", "Answer:", "A", "B"], eos_token="</s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert encode(tokenizer, ["x Answer:"]) == [[1, 3, 4]]
    assert plan(tokenizer, "x Answer:", 2).branches == ((5,), (6,))


@pytest.mark.parametrize(
    ("rows", "length"),
    [([[1, 2, 3]], 3), ([[1, 2], [1, 3]], 1), ([[1], [1, 2]], 1), ([[2], [1]], 0), ([[], [1]], 0)],
)
def test_common_prefix(rows, length):
    assert common_prefix(rows) == length
