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
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import studies
from calibeval.io import read_text, write_text
from calibeval.validation import Strict
from studies.countdown import passk, policy, problems
from studies.countdown.policy import Method
from studies.countdown.problems import Problem
from studies.pretraining import IGNORE, train_once

START = "start"  # the row of the supervised model in the tables, and its folder
# Of the supervised model
STEPS = 1500
BATCH_SIZE = 128
SEED = 0


class Config(Strict):
    """The keys of config.yaml."""

    output: Path
    test: str = Field(pattern="^(validation|test)$")  # which problems are asked at the end
    samples: PositiveInt  # sampled answers to each of them
    learning_rate: PositiveFloat
    steps: PositiveInt
    problems_per_step: PositiveInt
    answers_per_problem: int = Field(ge=2)
    seeds: list[int]
    settings: dict[str, Method]  # what is added to GRPO, by the name of the tables' row

    @model_validator(mode="after")
    def _no_setting_is_the_start(self) -> "Config":
        if START in self.settings:
            raise ValueError(
                f"settings.{START}: the tables have a row of this name for the supervised model; "
                "call the setting otherwise"
            )
        return self


def study(config: Config) -> None:
    """Problems, start, runs, tables."""
    folder = Path(__file__).parent
    sources = [*sorted(folder.glob("*.py")), folder.parent / "pretraining.py"]
    studies.refuse_other_versions(config.output, sources, "this study")
    # One generator draws the problems and then what the start learns: their order matters.
    rng = np.random.default_rng(SEED)
    solutions = problems.problems()
    pools = problems.split(solutions)
    problem_sets: dict[str, list[Problem]] = {}
    for name, size in problems.SIZES.items():
        chosen = sorted(rng.permutation(len(pools[name]))[:size])
        problem_sets[name] = [pools[name][index] for index in chosen]
    start = config.output / START
    if not (start / "DONE").exists():
        train_start(start, pools["train"], solutions, rng)
    runs: list[tuple[str, Method | None, int]] = [(START, None, 0)]
    for name, added in config.settings.items():
        runs += [(name, added, seed) for seed in config.seeds]
    correct_by_setting: dict[str, list[list[int]]] = {}
    for name, method, seed in tqdm(runs, "runs"):
        correct = run(config, problem_sets, method, seed)
        correct_by_setting.setdefault(name, []).append(correct)
    text = passk.tables(correct_by_setting, config.samples)
    write_text(config.output / "passk.md", text)
    print(text, end="")


def run(
    config: Config, problem_sets: dict[str, list[Problem]], method: Method | None, seed: int
) -> list[int]:
    """Train the start by a method, or take it as it is; what is finished is read.

    Returns the number of right answers to each of the test's problems.
    """
    seed_of_result = None if method is None else seed  # the start has none
    decisive = config.model_dump_json(exclude={"output", "seeds", "settings"})
    text = f"{decisive} {method!r} {seed_of_result}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    file = config.output / "runs" / f"{digest}.json"
    if not file.exists():
        # A run from a given start has the same bits however many cores a machine has. The start's
        # own bits depend on them, since `train_start` takes PyTorch's number of threads.
        torch.set_num_threads(1)
        model = LlamaForCausalLM.from_pretrained(config.output / START)
        rewards: list[float] = []
        if method is not None:
            schedule = policy.Schedule(
                learning_rate=config.learning_rate,
                steps=config.steps,
                problems_per_step=config.problems_per_step,
                answers_per_problem=config.answers_per_problem,
            )
            rewards = policy.train(model, problem_sets["train"], method, seed, schedule)
        result = {
            "method": None if method is None else method.model_dump(),
            "seed": seed_of_result,
            "rewards": rewards,
            "correct": policy.count_correct(model, problem_sets[config.test], config.samples),
        }
        write_text(file, json.dumps(result) + "\n")
    correct: list[int] = json.loads(read_text(file))["correct"]
    return correct


def train_start(
    out: Path,
    pool: list[Problem],
    solutions: dict[Problem, list[str]],
    rng: np.random.Generator,
) -> None:
    """Train a small Llama on one random solution to each problem drawn from `pool`."""
    drawn = [pool[index] for index in rng.integers(0, len(pool), STEPS * BATCH_SIZE)]
    texts = [f"{problem.prompt} {rng.choice(solutions[problem])} </s>" for problem in drawn]
    ids = policy.encoded(texts)
    labels = ids.clone()
    prompt_length = len(drawn[0].prompt.split())
    labels[:, :prompt_length] = IGNORE
    torch.manual_seed(SEED)
    model = small_llama()
    train_once(model, ids, labels, BATCH_SIZE)
    model.save_pretrained(out)
    write_text(out / "DONE", "")


def small_llama() -> LlamaForCausalLM:
    """The model, with random weights."""
    config = LlamaConfig(
        vocab_size=len(policy.WORDS),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=policy.END,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    sys.exit(studies.command(__doc__, Config, study, Path(__file__).parent, goes_on=True))
