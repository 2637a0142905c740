"""CountDown's problems and the supervised model that reinforcement learning starts from.

    python -m countdown                                       # makes runs/countdown
    python -m sweeps launch configs/sweeps/countdown.yaml

A second call goes on where the first was stopped.
"""

import sys
import zlib
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np

from demo.pretrain import fit
from sweeps.files import make_folder, write_rows, write_text
from sweeps.trainer.countdown import OPERATORS, Problem, expressions, value

ROOT = Path("runs/countdown")
LARGEST, TARGETS = 20, 100  # numbers of 1 to 20, targets of 1 to 99
# Disjoint problems: models are trained on the first, γ is chosen on the second.
SIZES = {"train": 14_000, "validation": 200, "test": 200}
STEPS, BATCH, SEED, SAMPLES = 1500, 128, 0, 64
SHAPE = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "max_position_embeddings": 32, "tie_word_embeddings": True}


def main() -> None:
    """Write what is not there yet."""
    start = ROOT / "start"
    make_folder(start)
    if not (start / "DONE").exists():
        solved, draw = problems(), np.random.default_rng(SEED)
        pools: dict[str, list[Problem]] = {name: [] for name in SIZES}
        for problem in solved:  # sets by a hash of the prompt
            place = zlib.crc32(problem.prompt.encode()) % 20
            pools[("test", "validation")[place] if place < 2 else "train"].append(problem)
        for name, size in SIZES.items():
            chosen = sorted(draw.permutation(len(pools[name]))[:size])
            write_rows(ROOT / f"{name}.jsonl", (vars(pools[name][i]) for i in chosen))
        train(start, pools["train"], solved, draw)
    from transformers import AutoModelForCausalLM

    from sweeps.trainer.policy_gradient import Policy

    policy = Policy(AutoModelForCausalLM.from_pretrained(start), str(start))
    policy.measure(ROOT / "test.jsonl", start / "passk.jsonl", SAMPLES, 6, {})
    print(f"{ROOT} is there; next: python -m sweeps launch configs/sweeps/countdown.yaml")


def problems() -> dict[Problem, list[str]]:
    """Every problem of three numbers, with all of its answers."""
    found: dict[Problem, list[str]] = {}
    for numbers in combinations_with_replacement(range(1, LARGEST + 1), 3):
        for words in expressions(numbers):
            target = value(words)
            if target is not None and target.denominator == 1 and 1 <= target < TARGETS:
                found.setdefault(Problem(numbers, int(target)), []).append(" ".join(words))
    return found


def train(out: Path, pool: list[Problem], solved: dict, draw: np.random.Generator) -> None:
    """Train a small Llama on one random answer to each problem drawn."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from sweeps.trainer.data import IGNORE

    entries = ["<pad>", "</s>", "=", *OPERATORS, *map(str, range(TARGETS))]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(entries)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "unk_token": "<pad>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    drawn = [pool[i] for i in draw.integers(0, len(pool), STEPS * BATCH)]
    texts = [f"{problem.prompt} {draw.choice(solved[problem])} </s>" for problem in drawn]
    ids = torch.tensor(tokenizer(texts)["input_ids"])
    targets = ids.clone()
    targets[:, : len(drawn[0].prompt.split())] = IGNORE
    torch.manual_seed(SEED)
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **ends, **SHAPE))
    fit(model, ids, targets, BATCH, out / "checkpoint.pt")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    write_text(out / "DONE", "")


if __name__ == "__main__":
    sys.exit(main())
