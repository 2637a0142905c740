"""Does reinforcement learning keep pass@k? `python -m studies.countdown [--config FILE]`.

Problems and a supervised model to start from, then every setting and seed of the config, then the
tables. What is finished is kept: a second call goes on where the first was stopped.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
from pydantic import Field, PositiveFloat, PositiveInt
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import studies
from calibeval.io import read_text, write_text
from calibeval.request import Strict
from studies.countdown import passk, policy, problems
from studies.countdown.policy import Method
from studies.countdown.problems import Problem
from studies.demo.pretrain import IGNORE, fit

STEPS, BATCH, SEED = 1500, 128, 0  # of the supervised model
SHAPE = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "max_position_embeddings": 32, "tie_word_embeddings": True}


class Config(Strict):
    """The keys of config.yaml."""

    output: Path
    test: str = Field(pattern="^(validation|test)$")
    samples: PositiveInt
    learning_rate: PositiveFloat
    steps: PositiveInt
    problems_per_step: PositiveInt
    answers_per_problem: int = Field(ge=2)
    seeds: list[int]
    settings: dict[str, Method]


def study(config: Config) -> None:
    """Problems, start, runs, tables."""
    start, draw = config.output / "start", np.random.default_rng(SEED)
    solved = problems.problems()
    pools, sets = problems.split(solved), {}
    for name, size in problems.SIZES.items():
        chosen = sorted(draw.permutation(len(pools[name]))[:size])
        sets[name] = [pools[name][i] for i in chosen]
    if not (start / "DONE").exists():
        begin(start, pools["train"], solved, draw)
    runs = [("start", None, None)]
    runs += [(name, of, seed) for name, of in config.settings.items() for seed in config.seeds]
    found: dict[str, list[list[int]]] = {}
    for name, method, seed in tqdm(runs, "runs"):
        found.setdefault(name, []).append(run(config, sets, method, seed))
    text = passk.tables(found, config.samples)
    write_text(config.output / "passk.md", text)
    print(text, end="")


def run(config: Config, sets: dict, method: Method | None, seed: int | None) -> list[int]:
    """Train with a setting, or take the start; the right answers to each of the test's problems."""
    asked = config.model_dump_json(exclude={"output", "seeds", "settings"})
    digest = hashlib.sha256(f"{asked} {method!r} {seed}".encode()).hexdigest()[:12]
    file, rewards = config.output / "runs" / f"{digest}.json", []
    if not file.exists():
        torch.set_num_threads(1)
        model = LlamaForCausalLM.from_pretrained(config.output / "start")
        if method is not None:
            rewards = policy.train(model, sets["train"], method, seed, config)
        about = {"method": method and method.model_dump(), "seed": seed, "rewards": rewards}
        about["correct"] = policy.solved(model, sets[config.test], config.samples)
        write_text(file, json.dumps(about) + "\n")
    return json.loads(read_text(file))["correct"]


def begin(out: Path, pool: list[Problem], solved: dict, draw: np.random.Generator) -> None:
    """Train a small Llama on one random answer to each problem drawn."""
    drawn = [pool[i] for i in draw.integers(0, len(pool), STEPS * BATCH)]
    texts = [f"{problem.prompt} {draw.choice(solved[problem])} </s>" for problem in drawn]
    ids = policy.encoded(texts)
    targets = ids.clone()
    targets[:, : len(drawn[0].prompt.split())] = IGNORE
    torch.manual_seed(SEED)
    ends = {"bos_token_id": None, "eos_token_id": policy.END, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(policy.WORDS), **ends, **SHAPE))
    fit(model, ids, targets, BATCH)
    model.save_pretrained(out)
    write_text(out / "DONE", "")


if __name__ == "__main__":
    sys.exit(studies.command(__doc__, Config, study, Path(__file__).parent))
