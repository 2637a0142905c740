"""Train and score the runs of a model and their temperature heads; pack the records."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd

import calibeval
from calibeval.ask import adaptive
from calibeval.io import atomic_write, json_lines, parse_json, read_text, write_text
from sweeps.runs.grid import SweepPlan, plan_sweep
from sweeps.runs.run import Run

HERE = Path(__file__).parent
CONFIG = HERE / "config.yaml"
RECORDS = HERE / "records"
LEARNING_RATES = {"qwen2.5-coder-1.5b": 5e-6, "qwen2.5-coder-0.5b": 2e-5}
# Of TriviaQA and of NQ-open at most: fewer of the small model's answers are right.
QUESTIONS = {"qwen2.5-coder-1.5b": 2000, "qwen2.5-coder-0.5b": 4000}
# Conversations that no run was trained on.
HEAD_CONVERSATIONS = slice(30_000, 38_000)
HEAD_TASKS = ("trivia_qa", "mmlu", "truthfulqa_mc1")
HEAD_BETAS = (None, 0.0, 0.1)  # None: before fine-tuning
HEADS: tuple[adaptive.Kind, ...] = ("transformer", "linear")
# What a run's answers change in a record; the rest is the question's.
OF_ANSWER = ("label", "logprobs", "letter_mass", "tokens", "cut", "p_true", "agreement")
OF_QUESTION = (
    *("id", "subject", "prompt_sha256", "shots", "scoring", "normalise", "bytes", "characters"),
)


def plan_of(model: str) -> tuple[SweepPlan, list[str]]:
    """Return a model's sweep, and what it changes in config.yaml."""
    overrides = [
        f"name={model}",
        f"grid.model_name_or_path=[./models/{model}]",
        f"grid.learning_rate=[{LEARNING_RATES[model]}]",
        f"score.tasks.0.limit={QUESTIONS[model]}",
        f"score.tasks.1.limit={QUESTIONS[model]}",
    ]
    return plan_sweep(CONFIG, overrides), overrides


def train(model: str) -> int:
    """Train and score what is missing, then the heads, and pack all; returns the exit code."""
    plan, overrides = plan_of(model)
    command = [sys.executable, "-m", "sweeps", "launch", str(CONFIG), "--executor", "local"]
    code = subprocess.run([*command, *overrides], check=False).returncode
    if code:
        return code
    for run in (*plan.baselines, *plan.runs):
        for kind in heads_of(run):
            add_head(run, kind)
    pack(model)
    return 0


def beta_of(run: Run) -> float | None:
    """Return a run's label smoothing; None before fine-tuning."""
    config = run.config()
    return None if config.is_baseline else config.train["label_smoothing"]


def heads_of(run: Run) -> tuple[adaptive.Kind, ...]:
    """Return the kinds of a run's heads."""
    return HEADS if beta_of(run) in HEAD_BETAS else ()


def add_head(run: Run, kind: adaptive.Kind) -> None:
    """Train a run's temperature head and score the run with it, unless that is done."""
    config = run.config()
    model = config.train["model_name_or_path"] if config.is_baseline else str(run.model)
    head = run.path / f"{kind}.pt"
    if not head.exists():
        conversations = head_conversations(run.path.parent)
        adaptive.train(model, conversations, head, kind=kind)
    assert config.score is not None
    tasks = []
    for task in config.score.tasks:
        if task.key in HEAD_TASKS:
            tasks.append(task.model_copy(update={"samples": None}))
    out = run.path / kind
    if not all((out / f"{task.key}.jsonl").exists() for task in tasks):
        batch_size = config.score.batch_size
        calibeval.score(
            model, tasks=tasks, out=out, batch_size=batch_size, temperature_head=str(head)
        )


def head_conversations(folder: Path) -> Path:
    """Return a file of the conversations that heads are trained on, which is made if needed."""
    path = folder / "head_conversations.json"
    if not path.exists():
        rows = parse_json(read_text(Path("data/alpaca/alpaca_data.json")))
        write_text(path, json.dumps(rows[HEAD_CONVERSATIONS]))
    return path


def pack(model: str) -> None:
    """Write what there is of a model's records, a row an answer, and add its questions."""
    plan, _ = plan_of(model)
    answers: list[dict[str, Any]] = []
    questions: dict[tuple[str, int], dict[str, Any]] = {}
    for run in (*plan.baselines, *plan.runs):
        seed = None if beta_of(run) is None else run.config().train["seed"]
        about = {"label_smoothing": beta_of(run), "seed": seed}
        for calibrator in (None, *HEADS):
            folder = run.scores if calibrator is None else run.path / calibrator
            for path in sorted(folder.glob("*.jsonl")):
                for number, (_, row) in enumerate(json_lines(path)):
                    place = {"task": path.stem, "question": number}
                    answer = {key: row.get(key) for key in OF_ANSWER}
                    answers.append({**about, "calibrator": calibrator, **place, **answer})
                    asked = {key: row.get(key) for key in OF_QUESTION}
                    questions.setdefault((path.stem, number), {**place, **asked})
    all_questions = pd.DataFrame([*questions.values()])
    path = RECORDS / "questions.parquet"
    if path.exists():
        all_questions = pd.concat([all_questions, pd.read_parquet(path)])
        all_questions = all_questions.drop_duplicates(["task", "question"])
    for name, table in ((model, pd.DataFrame(answers)), ("questions", all_questions)):
        with atomic_write(RECORDS / f"{name}.parquet", "wb") as file:
            table.to_parquet(file, compression="zstd", index=False)
