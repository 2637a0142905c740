"""A byte-level BPE of some texts' own pieces."""

from collections.abc import Iterable
from pathlib import Path


def write_tokenizer(out: Path, texts: Iterable[str], size: int, **special: str) -> int:
    """Write a tokenizer of at most `size` pieces; returns their number. `special` tokens, <s> as
    the start unless others are given, have the first ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = special or {"bos_token": "<s>"}
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    first = {"special_tokens": [*special.values()]}
    first["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, **first)
    bpe.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, **special).save_pretrained(out)
    return bpe.get_vocab_size()
