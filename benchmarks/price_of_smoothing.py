"""What smoothing costs a TRL user: three trainers that take turns in one process.

    python benchmarks/price_of_smoothing.py --alpaca alpaca_data.json --out FOLDER --models llama-1b

The trainers are those of training.py: TRL with packed attention and compiled layers (`compiled`),
the same with smoothce.patch_trainer (`compiled-ours`), and with TRL's own smoothing
(`compiled-theirs`), each with a model of its own. A round trains each for --steps updates of 64
conversations, in turn, and the next round goes backwards. A pace is the median of a round's updates
after the third, in tokens a second; a price is the share of the first trainer's pace in the same
round that is lost. Runs of one trainer differ by some 5 % from process to process, its rounds by
less. The models of all three stay in memory: 60 GiB for llama-1b, 90 GiB for qwen-1.5b.
"""

import json
import os
import statistics
import sys
from argparse import Namespace
from typing import Any

import training

ROUNDS = 6


def main() -> int:
    """Let the trainers take turns, and print each one's pace and price for each model."""
    arguments = training.parse()
    for package in training.PACKAGES:
        sys.path.insert(0, package)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    names = [name for name in arguments.trainers if training.TRAINERS[name].in_one_pass]
    print("| model | trainer | tokens/s, each round | price, median (least, most) |")
    print("|---|---|---|---|")
    for model_name in arguments.models:
        folder = training.model_folder(model_name, arguments)
        training.write_tokenizer(model_name, arguments, folder)
        trainers = {name: trainer_of(model_name, name, arguments) for name in names}
        paces: dict[str, list[float]] = {name: [] for name in names}
        for number in range(ROUNDS):
            for name in names if number % 2 == 0 else reversed(names):
                paces[name].append(pace_of(*trainers[name]))
        for name in names:
            pairs = zip(paces[names[0]], paces[name], strict=True)
            prices = sorted(1 - ours / plain for plain, ours in pairs)
            cells = " ".join(f"{pace:,.0f}" for pace in paces[name])
            price = f"{statistics.median(prices):.1%} ({prices[0]:.1%}, {prices[-1]:.1%})"
            print(f"| {model_name} | {name} | {cells} | {price} |", flush=True)
    return 0


def trainer_of(model_name: str, trainer_name: str, arguments: Namespace) -> tuple[Any, Any]:
    """A trainer with a model of random weights of its own, and the clock of its updates."""
    import torch
    import transformers
    from datasets import Dataset

    benchmark_model = training.MODELS[model_name]
    model_class = getattr(transformers, f"{benchmark_model.architecture}ForCausalLM")
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = model_class(benchmark_model.config())
    folder = training.model_folder(model_name, arguments)
    file = folder / "tokens.jsonl"
    with open(file, "w", encoding="utf-8") as out:
        for row in training.tokenized(model_name, arguments):
            out.write(f"{json.dumps(row)}\n")
    rows = Dataset.from_json(str(file), cache_dir=str(folder / "cache"))
    clock = training.stopwatch()
    config = training.trl_config(model_name, trainer_name, arguments)
    trainer = training.trl_trainer(model, config, rows, clock, model_name, trainer_name, arguments)
    return trainer, clock


def pace_of(trainer: Any, clock: Any) -> float:
    """Tokens a second of a round's updates."""
    clock.marks.clear()
    trainer.train()
    return training.median_pace(clock.marks)


if __name__ == "__main__":
    sys.exit(main())
