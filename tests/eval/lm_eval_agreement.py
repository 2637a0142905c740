"""Continuation scoring against lm-evaluation-harness, question by question.

    tests/eval/lm_eval_env.sh .venv-lm-eval
    .venv-lm-eval/bin/python tests/eval/lm_eval_agreement.py --model MODEL --task hellaswag --data hellaswag_val.jsonl

The tasks are the installed package's own (prompt, cleaning, metrics); only their data sets are
replaced by local files, so that no hub is asked. HellaSwag rows that have `ctx` alone are parted at
their last sentence into the hub's ctx_a and ctx_b, for both programs.
"""  # noqa: E501

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def rows_of(task: str, data: Path, limit: int) -> list[dict]:
    """The first rows of the task in the hub's columns."""
    path = data / "ARC-Easy-Test.jsonl" if task == "arc_easy" else data
    rows = [json.loads(line) for line in path.read_text().splitlines()[:limit]]
    for i, row in enumerate(rows):
        if task == "arc_easy":
            stem, choices = row["question"]["stem"], row["question"]["choices"]
            row |= {"question": stem, "choices": {k: [c[k] for c in choices] for k in choices[0]}}
        else:
            first, stop, last = row["ctx"].rpartition(". ")
            row |= {"ctx_a": first + "." if stop else last, "ctx_b": last if stop else ""}
            row |= {"ind": i, "label": str(row["label"])}
    return rows


def theirs(model: str, task: str, file: Path, folder: Path) -> tuple[list[dict], float]:
    """lm-eval's samples, in the file's order, and the processor seconds it took."""
    import lm_eval
    import yaml
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    name = {"arc_easy": "arc/arc_easy.yaml", "hellaswag": "hellaswag/hellaswag.yaml"}[task]
    split = "test" if task == "arc_easy" else "validation"
    metrics = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info")
    config = {
        "include": str(Path(lm_eval.__file__).parent / "tasks" / name),
        "task": "local",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(file)}},
        "training_split": None,
        "validation_split": None if split == "test" else split,
        "test_split": split if split == "test" else None,
        "metric_list": [{"metric": metric} for metric in metrics],
    }
    (folder / "local.yaml").write_text(yaml.safe_dump(config))
    began = time.process_time()
    language_model = HFLM(pretrained=model, batch_size=16, dtype="float32", device="cpu")
    found = lm_eval.simple_evaluate(
        model=language_model,
        tasks=["local"],
        num_fewshot=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["local"], key=lambda sample: sample["doc_id"])
    return samples, time.process_time() - began


def ours(model: str, task: str, data: Path, engine: str, out: Path) -> tuple[list[dict], float]:
    """Our records, by the command line, and the processor seconds it took."""
    from calibeval.__main__ import main

    command = ["score", "--task", task, "--data", data, "--model", model, "--engine", engine]
    began = time.process_time()
    if main([str(c) for c in [*command, "--out", out, "--unconditional"]]):
        raise SystemExit("calibeval failed")
    seconds = time.process_time() - began
    return [json.loads(line) for line in out.read_text().splitlines()], seconds


def compare(records: list[dict], samples: list[dict]) -> str:
    """How many questions are right or wrong alike, and the largest difference."""
    alike = {"acc": 0, "acc_norm": 0, "acc_bytes": 0}
    largest = 0.0
    for row, sample in zip(records, samples, strict=True):
        n = len(row["logprobs"])
        given = [float(response[0]) for response in sample["filtered_resps"]]
        pairs = list(zip(row["logprobs"], given[:n], strict=True))
        if row["id"].startswith("hellaswag"):  # lm-eval's unconditional context is always empty
            pairs += zip(row["unconditional"], given[n:], strict=True)
        largest = max(largest, *(abs(a - b) for a, b in pairs))
        for metric, units in zip(alike, (None, "characters", "bytes"), strict=True):
            lengths = row[units] if units else [1] * n
            scores = [p / length for p, length in zip(row["logprobs"], lengths, strict=True)]
            alike[metric] += (scores.index(max(scores)) == row["label"]) == bool(sample[metric])
    means = ", ".join(f"{m} {sum(s[m] for s in samples) / len(samples):.3f}" for m in alike)
    same = ", ".join(f"{m} {count}" for m, count in alike.items())
    return f"| {same} of {len(samples)} | {largest:.1e} | {means} |"


def main() -> None:
    """Score with both and print one line an engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--task", required=True, choices=("arc_easy", "hellaswag"))
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--engines", default="transformers,vllm")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, rows = Path(name), rows_of(a.task, a.data, a.limit)
        file = folder / ("ARC-Easy-Test.jsonl" if a.task == "arc_easy" else "hellaswag_val.jsonl")
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        samples, seconds = theirs(a.model, a.task, file, folder)
        print("| engine | right or wrong as lm-eval | largest difference, nats | lm-eval ", end="")
        print(f"| processor seconds (lm-eval: {seconds:.1f}) |")
        print("|---|---|---|---|---|")
        for engine in a.engines.split(","):
            data = folder if a.task == "arc_easy" else file
            records, seconds = ours(a.model, a.task, data, engine, folder / f"{engine}.jsonl")
            print(f"| {engine} {compare(records, samples)} ", end="")
            # vLLM computes in a process of its own, whose time this one does not see.
            print("|" if engine == "vllm" else f"{seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
