"""Seconds for all of MMLU through a model of 7.2 billion parameters on one GPU with vLLM.

    python tests/eval/vllm_speed.py --data MMLU [--limit N] [--hidden 4096 --layers 32]

The weights are vLLM's dummies, the shape is Mistral 7B's, the prompts are the official ones of five
shots, and the tokenizer is a byte-level BPE of 32,000 pieces at most made of the data's own words.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from made_tokenizer import write_tokenizer


def make_folder(out: Path, data: Path, hidden: int, layers: int) -> None:
    """A model folder with config and tokenizer and without weights."""
    from transformers import LlamaConfig

    from calibeval import prompts, tasks

    subjects = tasks.load("mmlu", tasks.Source(str(data), 0, split="val"))
    write_tokenizer(out, (prompts.body(q) for s in subjects for q in s.questions), 32_000)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        max_position_embeddings=32_768,
        architectures=["LlamaForCausalLM"],
        torch_dtype="bfloat16",
        bos_token_id=0,
        eos_token_id=None,
    )
    config.save_pretrained(out)


def main() -> None:
    """Make, load, score, print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--limit", type=int, help="questions a subject; default: all")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=32)
    a = parser.parse_args()
    from calibeval import score, tasks
    from calibeval.engines import load_tokenizer
    from calibeval.engines.vllm import VllmEngine

    with tempfile.TemporaryDirectory() as name:
        make_folder(Path(name), a.data, a.hidden, a.layers)
        began = time.perf_counter()
        subjects = tasks.load("mmlu", tasks.Source(str(a.data), 5))
        subjects = [replace(s, questions=s.questions[: a.limit]) for s in subjects]
        items = score.fit_prompts(subjects, score.Style(), load_tokenizer(name), 32_767)
        read = time.perf_counter()
        longest = max(item.longest for item in items)
        engine = VllmEngine(name, longest=longest, dtype="bfloat16", load_format="dummy")
        loaded = time.perf_counter()
        for start in range(0, len(items), score.SHARD):
            indices = list(range(start, min(start + score.SHARD, len(items))))
            list(engine.score(score.groups_of(items, indices)))
        found = {
            "questions": len(items),
            "tokenising": round(read - began, 1),
            "start-up": round(loaded - read, 1),
            "scoring": round(time.perf_counter() - loaded, 1),
            "prompt_tokens": engine.usage.prompt_tokens,
            "computed_tokens": engine.usage.computed_tokens,
            "longest": longest,
        }
        print(json.dumps(found | engine.versions() | engine.describe()))


if __name__ == "__main__":
    main()
