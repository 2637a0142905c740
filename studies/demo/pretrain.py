"""Pre-training of a small Llama on the world's corpus, each document read once.

The corpus is one stream of tokens in blocks of CONTEXT. The loss leaves out names, which are drawn
at random: nothing predicts them.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from calibeval.io import write_text
from studies.demo import files
from studies.demo.world import SOURCES, TOWNS, asked
from studies.pretraining import IGNORE, train_once

DOCUMENTS = 11_000
CONTEXT = 136  # tokens of a block
BATCH_SIZE = 16  # blocks of an update
THREADS = 2
SEED = 1
# A conversation reads like an exam of one question: fine-tuning need not teach a new layout.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token }}{% else %}{{ bos_token + message['content'] + '\n' }}"
    "{% endif %}{% endfor %}"
)


def pretrain(out: Path) -> None:
    """Train on the corpus and save model and tokenizer to `out`, DONE last."""
    if (out / "DONE").exists():
        return
    documents = list(files.corpus(DOCUMENTS))
    # The corpus never tells of new towns, whose names the vocabulary needs all the same.
    turns = []
    for question in asked("new"):
        turns += [turn["content"] for turn in files.conversation(question)["messages"]]
    tokenizer = word_tokenizer([*documents, *turns])
    tokenizer.save_pretrained(out)
    ids = blocks_of(documents, tokenizer)
    labels = ids.masked_fill(torch.isin(ids, name_tokens(tokenizer)), IGNORE)
    torch.manual_seed(SEED)
    torch.set_num_threads(THREADS)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    train_once(model, ids, labels, BATCH_SIZE)
    # Later this very process scores models for the report. A call that finds pre-training done does
    # so on one thread (OMP_NUM_THREADS), and so must this one: on more its scores would have other
    # bits.
    torch.set_num_threads(1)
    model.save_pretrained(out)
    write_text(out / "DONE", "")


def blocks_of(documents: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """The documents as one stream of tokens, cut into blocks, (blocks, CONTEXT)."""
    stream: list[int] = []
    for ids_of_document in tokenizer(documents)["input_ids"]:
        stream += ids_of_document
    whole_blocks = len(stream) // CONTEXT
    return torch.tensor(stream[: whole_blocks * CONTEXT]).view(-1, CONTEXT)


def name_tokens(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """The ids of the names of sources and towns within a sentence."""
    names = list(SOURCES)
    for towns in TOWNS.values():
        names += [town.name for town in towns]
    return torch.tensor(tokenizer.convert_tokens_to_ids([f" {name}" for name in names]))


def word_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the words of `texts`, with the space before them, and marks."""
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    piece = Regex(r" ?\w+|\n\n|\n|[^\w\s]|\s")
    words.pre_tokenizer = pre_tokenizers.Split(piece, behavior="isolated")
    words.decoder = decoders.Fuse()
    trainer = trainers.WordLevelTrainer(
        vocab_size=100_000,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>"],
        show_progress=False,
    )
    words.train_from_iterator(texts, trainer)
    begin = ("<s>", words.token_to_id("<s>"))
    words.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[begin])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
