"""tiny_world.py FOLDER: a two-layer Llama, its tokenizer and 120 chats, made in a second.

Run it with the Python that will train: tokenizer files of newer versions are unreadable to older.
"""

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
    chats = []
    for _ in range(120):
        question, answer = (" ".join(random.choices(WORDS, k=random.randint(3, 18))) for _ in "qa")
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        chats.append({"messages": messages})
    (folder / "train.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))

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
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
