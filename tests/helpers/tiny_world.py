"""tiny_world.py FOLDER: all that configs/paper/small.yaml names, made in a second.

A two-layer Llama with its tokenizer, 120 chats, 64 in the name of each training set of the paper,
and questions in the layouts of MMLU, HellaSwag and ARC-Easy. Run it with the Python that will
train: tokenizer files of newer versions are unreadable to older.
"""

import csv
import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ("the", "sun", "moon", "stone", "sees", "finds", "red", "old", "over", "and", "or", "why")
SPECIAL = ["<s>", "</s>", "<pad>"]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    random.seed(0)
    torch.manual_seed(0)
    chats = make_chats(120)
    write_rows(folder / "train.jsonl", chats)

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        [message["content"] for chat in chats for message in chat["messages"]],
        trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, **special)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

    for name in ("alpaca", "tulu3", "openhermes"):
        write_rows(folder / f"{name}.jsonl", make_chats(64))
    for split, count in (("dev", 5), ("val", 20), ("test", 60)):
        for subject in ("moons", "stones"):
            path = folder / "mmlu" / split / f"{subject}_{split}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w", newline="") as out:
                for asked, choices, right in make_questions(count):
                    csv.writer(out).writerow([asked, *choices, "ABCD"[right]])
    for split, count in (("train", 5), ("val", 120)):
        rows = []
        for i, (asked, choices, right) in enumerate(make_questions(count)):
            row = {"ind": i, "activity_label": "Looking", "ctx": asked}
            rows.append(row | {"endings": choices, "label": right})
        write_rows(folder / "hellaswag" / f"hellaswag_{split}.jsonl", rows)
    for split, count in (("Train", 5), ("Dev", 5), ("Test", 120)):
        rows = []
        for i, (asked, choices, right) in enumerate(make_questions(count)):
            lettered = [{"text": c, "label": x} for c, x in zip(choices, "ABCD", strict=True)]
            asked = {"stem": asked, "choices": lettered}
            rows.append({"id": f"{split}{i}", "question": asked, "answerKey": "ABCD"[right]})
        write_rows(folder / "arc" / f"ARC-Easy-{split}.jsonl", rows)


def words(least: int, most: int) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(least, most)))


def make_chats(count: int) -> list[dict]:
    return [
        {"messages": [{"role": role, "content": words(3, 18)} for role in ("user", "assistant")]}
        for _ in range(count)
    ]


def make_questions(count: int) -> list[tuple[str, list[str], int]]:
    """Questions, four choices each, and which is right."""
    return [(words(3, 9), [words(1, 4) for _ in "ABCD"], random.randrange(4)) for _ in range(count)]


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
