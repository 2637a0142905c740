"""Pre-training of a small Llama on the world's corpus, each document read once.

The corpus is one stream of tokens in blocks of CONTEXT. The loss leaves out names, which are drawn
at random: nothing predicts them.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from calibeval.io import write_text
from studies.demo import files
from studies.demo.world import SOURCES, TOWNS, asked

DOCUMENTS, CONTEXT, BATCH, IGNORE, THREADS = 11_000, 136, 16, -100, 2
LEARNING_RATE, WARMUP, SEED = 3e-3, 100, 1
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": False}
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
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
    documents = [*files.corpus(DOCUMENTS)]
    turns = [turn for q in asked("new") for turn in files.conversation(q)["messages"]]
    words = tokenizer([*documents, *(turn["content"] for turn in turns)])
    words.save_pretrained(out)
    stream = torch.tensor([token for ids in words(documents)["input_ids"] for token in ids])
    blocks = stream[: len(stream) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    names = [*SOURCES, *(town.name for towns in TOWNS.values() for town in towns)]
    drawn = torch.tensor(words.convert_tokens_to_ids([f" {name}" for name in names]))
    targets = blocks.masked_fill(torch.isin(blocks, drawn), IGNORE)
    torch.manual_seed(SEED)
    torch.set_num_threads(THREADS)
    ids = {f"{name}_token_id": getattr(words, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **ids, **SHAPE))
    fit(model, blocks, targets, BATCH)
    torch.set_num_threads(1)  # as scoring has it where this was done before
    model.save_pretrained(out)
    write_text(out / "DONE", "")


def tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A word of `texts` with the space before it is a token, and so is a mark."""
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    piece = Regex(r" ?\w+|\n\n|\n|[^\w\s]|\s")
    words.pre_tokenizer = pre_tokenizers.Split(piece, behavior="isolated")
    words.decoder = decoders.Fuse()
    known = {"special_tokens": [*SPECIAL.values()], "show_progress": False}
    words.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=100_000, **known))
    begin = ("<s>", words.token_to_id("<s>"))
    words.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[begin])
    more = {"chat_template": TEMPLATE, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL, **more)


def fit(model: LlamaForCausalLM, blocks: torch.Tensor, targets: torch.Tensor, batch: int) -> None:
    """Train on (rows, tokens) ids, each row once."""
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    steps = len(blocks) // batch
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, (s + 1) / WARMUP) * (1 - s / steps)
    )
    for step in tqdm(range(steps), "pre-training", mininterval=5):
        rows = slice(step * batch, (step + 1) * batch)
        loss = model(input_ids=blocks[rows], labels=targets[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
