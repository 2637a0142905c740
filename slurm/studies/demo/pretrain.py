"""Pre-training of a small Llama on the world's corpus, each document read once.

The corpus is one stream of tokens in blocks of CONTEXT. The loss leaves out names, which are drawn
at random: nothing predicts them.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from calibeval.io import json_lines, read_text, write_text

CONTEXT, BATCH, IGNORE, THREADS = 136, 16, -100, 2
LEARNING_RATE, WARMUP, SEED = 3e-3, 100, 1
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": False}
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
# A conversation reads like an exam of one question: fine-tuning need not teach a new layout.
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token }}{% else %}{{ bos_token + message['content'] + '\n' }}"
    "{% endif %}{% endfor %}"
)


def pretrain(world: Path, out: Path) -> None:
    """Train on `world`/corpus.jsonl and save model and tokenizer to `out`, DONE last."""
    if (out / "DONE").exists():
        return
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    documents = [row["text"] for _, row in json_lines(world / "corpus.jsonl")]
    conversations = [row["messages"] for _, row in json_lines(world / "messages.jsonl")]
    words = tokenizer([*documents, *(turn["content"] for of in conversations for turn in of)])
    words.save_pretrained(out)
    encoded = words(documents, return_attention_mask=False)["input_ids"]
    stream = torch.tensor([token for ids in encoded for token in ids])
    blocks = stream[: len(stream) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    names = [f" {name}" for name in read_text(world / "names.txt").split()]
    drawn = torch.tensor(words.convert_tokens_to_ids(names))
    targets = blocks.masked_fill(torch.isin(blocks, drawn), IGNORE)
    torch.manual_seed(SEED)
    torch.set_num_threads(THREADS)
    ids = {f"{name}_token_id": getattr(words, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **ids, **SHAPE))
    fit(model, blocks, targets, BATCH)
    torch.set_num_threads(1)  # as scoring has it where this was done before
    model.save_pretrained(out)
    write_text(out / "DONE", "")


def tokenizer(texts: Iterable[str]):
    """A word of `texts` with the space before it is a token, and so is a mark."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    piece = Regex(r" ?\w+|\n\n|\n|[^\w\s]|\s")
    words.pre_tokenizer = pre_tokenizers.Split(piece, behavior="isolated")
    words.decoder = decoders.Fuse()
    options = {"special_tokens": SPECIAL, "show_progress": False}
    words.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=100_000, **options))
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", words.token_to_id("<s>"))]
    )
    names = zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True)
    more = {"chat_template": TEMPLATE, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=words, **dict(names), **more)


def fit(model, blocks, targets, batch: int) -> None:
    """Train on (rows, tokens) ids, each row once."""
    import torch
    from tqdm import tqdm

    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    steps = len(blocks) // batch
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, (s + 1) / WARMUP) * (1 - s / steps)
    )
    often = 0.1 if sys.stderr.isatty() else 15  # seconds; in a file each is a line
    progress = tqdm(range(steps), "pre-training", mininterval=often)
    for step in progress:
        rows = slice(step * batch, (step + 1) * batch)
        loss = model(input_ids=blocks[rows], labels=targets[rows]).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
