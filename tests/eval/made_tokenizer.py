"""A byte-level BPE of some texts' own pieces."""

from collections.abc import Iterable
from pathlib import Path


def write_tokenizer(out: Path, texts: Iterable[str], size: int) -> int:
    """Write a tokenizer of at most `size` pieces and the start token <s>; returns their number."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    pieces = {"special_tokens": ["<s>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, **pieces)
    bpe.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>").save_pretrained(out)
    return bpe.get_vocab_size()
