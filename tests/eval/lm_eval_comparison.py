"""Questions a second and answers against lm-evaluation-harness, on one model, machine and run.

    python tests/eval/lm_eval_comparison.py --data MMLU --model MODEL [--subjects a,b] [--limit N]

Needs lm-eval beside calibeval. Its own mmlu template is read from the installed package; only the
data set is replaced by local files, so that no hub is asked. Loading is outside the time.
"""

import argparse
import json
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import lm_eval
import torch
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from calibeval import score, tasks
from calibeval.engines import load_max_length
from calibeval.engines.transformers import TransformersEngine

TEMPLATE = Path(lm_eval.__file__).parent / "tasks" / "mmlu" / "default" / "_default_template_yaml"


def write_tasks(subjects: list[tasks.Subject], folder: Path) -> list[str]:
    """Their template with our rows; returns the tasks' names."""
    names = []
    for subject in subjects:
        files = {}
        for split, questions in (("test", subject.questions), ("dev", subject.shots)):
            path = folder / f"{subject.name}_{split}.json"
            rows = [
                {"question": q.text, "choices": list(q.choices), "answer": q.label}
                for q in questions
            ]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            files[split] = str(path)
        config = yaml.safe_load(TEMPLATE.read_text())
        config |= {"task": f"local_{subject.name}", "dataset_path": "json"}
        config["dataset_kwargs"] = {"data_files": files}
        topic = subject.name.replace("_", " ")
        config["description"] = (
            f"The following are multiple choice questions (with answers) about {topic}.\n\n"
        )
        (folder / f"{subject.name}.yaml").write_text(yaml.safe_dump(config))
        names.append(config["task"])
    return names


def theirs(model: str, subjects: list[tasks.Subject], batch: int) -> tuple[list[bool], float]:
    """Whether each question was answered right, and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        names = write_tasks(subjects, Path(folder))
        language_model = HFLM(pretrained=model, batch_size=batch, dtype="float32", device="cpu")
        manager = TaskManager(include_path=folder, include_defaults=False)
        began = time.perf_counter()
        found = lm_eval.simple_evaluate(
            model=language_model,
            tasks=names,
            num_fewshot=len(subjects[0].shots),
            task_manager=manager,
            log_samples=True,
            bootstrap_iters=0,
            verbosity="ERROR",
        )
        seconds = time.perf_counter() - began
    right = []
    for name in names:
        samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
        right += [bool(sample["acc"]) for sample in samples]
    return right, seconds


def ours(model: str, subjects: list[tasks.Subject], batch: int) -> tuple[list[bool], float]:
    """Whether each question was answered right, and seconds, prompts included."""
    max_length = load_max_length(model)
    engine = TransformersEngine(model, device="cpu", batch_size=batch, max_length=max_length)
    began = time.perf_counter()
    style = score.Style(len(subjects[0].shots), "lm-eval")
    items = score.fit_prompts(subjects, style, engine.tokenizer, max_length)
    found = dict(engine.score(score.groups_of(items, list(range(len(items))))))
    seconds = time.perf_counter() - began
    return [
        max(range(4), key=found[i].__getitem__) == item.prompt.question.label
        for i, item in enumerate(items)
    ], seconds


def main() -> None:
    """Print both speeds, their ratio and how many questions were answered alike."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--subjects", default="astronomy,college_physics")
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8)
    a = parser.parse_args()
    source = tasks.Source(a.data, 5, tuple(a.subjects.split(",")))
    subjects = [
        tasks.Subject(s.name, s.topic, s.shots, s.questions[: a.limit])
        for s in tasks.load("mmlu", source)
    ]
    torch.manual_seed(0)
    lm_right, lm_seconds = theirs(a.model, subjects, a.batch_size)
    right, seconds = ours(a.model, subjects, a.batch_size)
    n = len(right)
    alike = sum(x == y for x, y in zip(right, lm_right, strict=True))
    print(f"lm-eval {version('lm-eval')} (hf): {n / lm_seconds:.2f} questions/s")
    print(f"calibeval (transformers): {n / seconds:.2f} questions/s, {lm_seconds / seconds:.1f}x")
    print(f"right or wrong alike: {alike} of {n}; accuracy {sum(right) / n:.4f}")


if __name__ == "__main__":
    main()
