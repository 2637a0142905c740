"""The paper's claims on a real model, on this machine's GPUs.

    python -m studies.gguf; python -m sweeps prefetch studies/claims/config.yaml
    python -m studies.claims MODEL [PART …] [key=value …]

MODEL is a folder of models/. Those parts, or all of them, one after another, and then what rests on
them; the records of each run are packed into records/MODEL/ as it ends, and `report` merges them
into records/MODEL.parquet. What is there is not run again, on whatever machine:

    grid          4 learning rates at β = 0; the lowest held-out loss chooses that of other parts
    seeds         the base model; β of 0, 0.1, 0.2, 0.3 and 0.5, five seeds
    high          the same of MMLU at 2e-4, the top of the paper's grid
    harm          the same at 5e-5, two epochs of the summed, unclipped loss
    sum           the summed loss, clipped
    filtered      the filtered gradient, at β = 0.1
    equal         β = 0 at the learning rate whose held-out loss is that of `seeds` at β = 0.1
    script        β of 0 and 0.1 through open-instruct's finetune.py (OPEN_INSTRUCT_DIR)
    unigram       β spread over tokens as often as they are learnt, at β = 0.1
    base-mean     β spread as the base model predicts them in the mean, at β = 0.1
    half, twice   half the conversations, and all of them twice, at β = 0
    after         a temperature fitted on MMLU's val questions after β = 0
    averaged      weights averaged with the base model's after β = 0
    price         entropy less NLL of each model that is still there, and the temperature that
                  pays it back
    report        what smoothing does in each setting, as the records tell, and to all models
                  in forest.png

An interrupted run goes on where its folder is. key=value overrides the sweep of every part, for
example workers=6 for six runs at a time, or grid.seed=[0,1,2].
"""

import itertools
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm import tqdm

from calibeval import measures, scaling, stats
from calibeval.figures import GREY, INK, STYLE
from calibeval.io import InputError, atomic_write, finish, json_lines, write_rows, write_text
from calibeval.measures import Sample
from calibeval.records import meta
from calibeval.records import read as read_records
from studies.claims.records import RecordStore, RunRecord
from studies.demo.report import at_temperature
from sweeps.results.selection import held_out_loss
from sweeps.runs.conversations import conversations
from sweeps.runs.files import read_rows
from sweeps.runs.grid import SweepPlan, plan_sweep
from sweeps.runs.run import Run

HERE = Path(__file__).parent
FILE, RECORDS, RUNS = HERE / "config.yaml", HERE / "records", Path("runs/claims")
MESSAGES = Path("data/alpaca/messages.jsonl")  # which finetune.py reads
# What the verdicts rest on. Parts without it are asked all tasks; harm's texts are not kept.
TASKS = "score.tasks=[{task: mmlu, data: data/mmlu, shots: 5, scoring: letters}]"
BETAS = (0.0, 0.1, 0.2, 0.3, 0.5)
TABLE = [f"grid.label_smoothing={[*BETAS]}", "grid.seed=[0,1,2,3,4]"]
PAIR = ["grid.label_smoothing=[0.0,0.1]", "grid.seed=[0,1,2]", TASKS]
HARM = "grid.learning_rate=[5.0e-5]", "grid.num_train_epochs=[2]", "grid.reduce_loss=[sum]"
SCRIPT = f"""train={{
    train_file: {MESSAGES}, max_train_samples: 25600, max_seq_length: 1024,
    per_device_train_batch_size: 8, gradient_accumulation_steps: 8, checkpointing_steps: null,
    preprocessing_num_workers: 8, attn_implementation: sdpa, use_slow_tokenizer: false}}"""
ZERO2 = "backend=open-instruct", "world.deepspeed=configs/deepspeed/zero2.json"
# part → what its sweep changes in config.yaml
PARTS = {
    "grid": ["keep=all", "score=null"],
    "seeds": ["keep=all", *TABLE],
    "high": [*TABLE, TASKS, "grid.learning_rate=[2.0e-4]"],
    "harm": [*TABLE, *HARM],
    "sum": [*PAIR, "grid.reduce_loss=[sum]", "grid.clip_grad_norm=[1.0]"],
    "filtered": [*PAIR, "grid.label_smoothing=[0.1]", "grid.filter_eps=[auto]"],
    "equal": [*PAIR, "grid.label_smoothing=[0.0]"],
    "script": [*PAIR, SCRIPT, *ZERO2, "score.select_on=null"],
    "unigram": ["keep=all", *PAIR, "grid.label_smoothing=[0.1]", "grid.smoothing_target=[unigram]"],
    "base-mean": ["keep=all", *PAIR, "grid.label_smoothing=[0.1]"],
    "half": [*PAIR, "train.max_train_samples=12800", "grid.label_smoothing=[0.0]"],
    "twice": [*PAIR, "grid.num_train_epochs=[2]", "grid.label_smoothing=[0.0]"],
}
VARIED = ("learning_rate", "label_smoothing")  # in a part, beside the seed
SETTING = (*VARIED, "seed")  # what tells a part's runs apart
PLAIN, SMOOTHED = ({"label_smoothing": beta} for beta in (0.0, 0.1))


def effect(part: str, label_smoothing: float = 0.1) -> list[tuple]:
    """Smoothing's: what is added (1) and taken away (−1), that factor and none."""
    return [(1, part, {"label_smoothing": label_smoothing}), (-1, part, PLAIN)]


TUNED = {"β = 0": "seeds", "harm": "harm", "twice": "twice"}
ROWS = {f"{name} less base": [(1, part, PLAIN), (-1, "base", {})] for name, part in TUNED.items()}
ROWS["two epochs less one"] = [(1, "twice", PLAIN), (-1, "seeds", PLAIN)]
ROWS |= {
    f"{part}: β = {beta} less 0": effect(part, beta)
    for part in ("seeds", "high", "harm")
    for beta in BETAS[1:]
}
for name, part in {"sum, clipped": "sum", "open-instruct's script": "script"}.items():
    ROWS[f"{name}: 0.1 less 0"] = effect(part)
    other = [(-1, "seeds", SMOOTHED), (1, "seeds", PLAIN)]
    ROWS["– less that of `seeds`, " + name] = effect(part) + other
ROWS["equal held-out loss: 0.1 less 0"] = [(1, "seeds", SMOOTHED), (-1, "equal", PLAIN)]
BASELINES = {"temperature after β = 0": "after", "averaged with base": "averaged"}
BASELINES["half the conversations"] = "half"
for name, part in BASELINES.items():
    for beta, tuned in ((0, PLAIN), (0.1, SMOOTHED)):
        ROWS[f"{name}, less β = {beta}"] = [(1, part, {}), (-1, "seeds", tuned)]
OTHERS = {"filtered less exact": "filtered", "unigram less uniform": "unigram"}
OTHERS["base mean less uniform"] = "base-mean"
for name, part in OTHERS.items():
    ROWS[f"{name}, β = 0.1"] = [(1, part, SMOOTHED), (-1, "seeds", SMOOTHED)]
# Readings: a task, whose probabilities (among the choices or all tokens), and by what length.
READINGS = [("mmlu", "choices", None), ("mmlu", "vocabulary", None)]
for task in ("arc", "hellaswag"):
    READINGS += [(f"{task}-letters", "choices", None), (f"{task}-letters", "vocabulary", None)]
    READINGS += [(f"{task}-continuation", "choices", by) for by in (None, "sum")]
LETTERS = {"mmlu": "MMLU", "arc-letters": "ARC-Easy", "hellaswag-letters": "HellaSwag"}
GUARDS = {n: ("choices", None, n) for n in ("accuracy", "nll", "brier", "auroc", "aurc")}
GUARDS["nll, all tokens"] = ("vocabulary", None, "nll")
GUARDS["aurc, logits normalised"] = ("choices", "logits", "aurc")
PRICES = ["nll", "entropy", "entce", "temperature", "outside"]


def main(words: list[str]) -> int:
    """Do the parts named, or all; returns the exit code."""
    named = [word for word in words if "=" not in word]
    if not named or "-h" in words or "--help" in words:
        return finish(lambda: print(__doc__)) or 2 * (not named)
    return finish(lambda: study(named[0], named[1:], [w for w in words if "=" in w]))


def study(model: str, parts: list[str], overrides: list[str]) -> None:
    """Do the parts named, or all; raises InputError naming those that failed."""
    os.chdir(HERE.parents[1])  # where paths in config.yaml begin
    others = {"after": after, "averaged": averaged, "price": price, "report": report}
    failed = []
    known = [*PARTS, *others]
    if unknown := [part for part in parts if part not in known]:
        raise InputError(f"{', '.join(unknown)}: no such part; known: {', '.join(known)}")
    for part in known:
        if part not in (parts or known) or "grid" in failed:  # whose rate is that of all others
            continue
        if part in others:
            others[part](model)
        elif train(model, part, arguments(model, part, overrides)):
            failed.append(part)
    if failed:
        then = "why is said above; once that is mended, the same command goes on"
        raise InputError(f"not whole: {', '.join(failed)}; {then}")


def arguments(model: str, part: str, overrides: list[str]) -> list[str]:
    """What a part of a model's study changes in config.yaml."""
    asked = [f"name={model}-{part}", f"grid.model_name_or_path=[./models/{model}]"]
    if model.startswith("gemma"):  # not instruct-tuned; without <bos> it writes nonsense
        asked += ["train.add_bos=true", "train.chat_template_name=alpaca"]
    if part != "grid" and not any("learning_rate" in change for change in PARTS[part]):
        rate = equal_rate(model) if part == "equal" else chosen_rate(model)
        asked.append(f"grid.learning_rate=[{rate}]")
    if part == "base-mean":
        asked.append(f"grid.smoothing_target=[{RUNS}/targets/{model}.npy]")
    return [*asked, *PARTS[part], *overrides]


def train(model: str, part: str, asked: list[str]) -> int:
    """Train and score what of a part has no records, packing each run as it ends; returns the
    exit code."""
    for lacking in without_records(model, part, asked):
        if part == "script" and not MESSAGES.exists():
            turns = conversations(MESSAGES.with_name("alpaca_data.json"))
            write_rows(MESSAGES, ({"messages": of} for of in turns))
        if part == "base-mean":
            from studies.claims import baselines  # which takes torch along

            baselines.base_mean(plan_sweep(FILE, asked).runs[0].config().train_options)
        launch = [sys.executable, "-m", "sweeps", "launch", str(FILE), "--executor", "local"]
        with subprocess.Popen([*launch, *asked, *lacking]) as process:
            running = True
            while running:
                running = process.poll() is None
                pack(model, part, plan_sweep(FILE, [*asked, *lacking]))
                time.sleep(2 * running)
        if process.returncode:
            return process.returncode
    return 0


def without_records(model: str, part: str, asked: list[str]) -> list[list[str]]:
    """Overrides that leave the runs without records: seeds that lack the same together."""
    of, alike = plan_sweep(FILE, asked), {}
    there = store().keys(model)
    cells = [c.config().train for c in of.runs if key(part, c) not in there]
    for seed, of_seed in pd.DataFrame(cells, columns=SETTING).groupby("seed"):
        changes = tuple(f"grid.{key}={of_seed[key].unique().tolist()}" for key in VARIED)
        alike.setdefault(changes, []).append(int(seed))
    scored = of.baselines and all(key(part, cell) in there for cell in of.baselines)
    base = ["score.base=false"] if scored else []
    return [[*changes, f"grid.seed={seeds}", *base] for changes, seeds in alike.items()]


def store() -> RecordStore:
    """The records of all models."""
    return RecordStore(RECORDS)


def key(part: str, cell: Run) -> tuple[str, str]:
    """What tells a run's records apart; those of the base model are no part's own."""
    return (part if cell.config().backend else "base"), cell.name


def chosen_rate(model: str) -> float:
    """The learning rate of the lowest held-out loss at β = 0."""
    runs = [record for record in store().runs(model) if record.part == "grid"]
    if not runs:
        raise InputError(f"{model}, grid: no run is trained; the part grid comes first")
    return min(runs, key=lambda record: record.held_out_loss).learning_rate


def equal_rate(model: str) -> float:
    """The learning rate with the held-out loss at β = 0 that `seeds` has at β = 0.1: between those
    of the grid, by their logarithms, on that side of the chosen one where losses grow most."""
    of = pd.DataFrame(store().runs(model))
    grid = of[of.part == "grid"].groupby("learning_rate").held_out_loss.mean()
    loss = of[(of.part == "seeds") & (of.label_smoothing == 0.1)].held_out_loss.mean()
    best = grid.idxmin()
    side = max(grid[:best][::-1], grid[best:], key=lambda losses: losses.iloc[-1])
    return float(f"{np.exp(np.interp(loss, side, np.log(side.index))):.2g}")


def pack(model: str, part: str, of: SweepPlan) -> None:
    """Pack the records of the runs that have ended."""
    there = store().keys(model)
    for cell in (*of.baselines, *of.runs):
        if cell.done and key(part, cell) not in there:
            setting = {name: cell.config().train.get(name) for name in SETTING}
            record = RunRecord(*key(part, cell), held_out_loss=held_out_loss(cell), **setting)
            tasks = cell.config().score.tasks if cell.config().score else ()
            files = {task.key: cell.scores / f"{task.key}.jsonl" for task in tasks}
            store().add(model, record, files)


def after(model: str) -> None:
    """Fit a temperature to each of the runs of `seeds` at β = 0."""
    folder, out = RUNS / f"{model}-seeds" / "results", RUNS / f"{model}-after"
    every = [entry for _, entry in json_lines(folder / "index.jsonl")]
    plain = [e for e in every if e["dataset"] == "mmlu" and e["label_smoothing"] == 0]
    for entry in at_temperature(plain, folder, Path("data/mmlu"), out):
        file = Path(entry["records"])
        setting = {name: entry[name] for name in SETTING}
        temperature = meta(file)["temperature"]["temperature"]
        store().add(model, RunRecord("after", file.stem, temperature=temperature, **setting), {})


def trained(model: str, part: str) -> list[Run]:
    """The runs of a part whose models are still there."""
    return [Run(folder.parent) for folder in sorted(RUNS.glob(f"{model}-{part}/*/model"))]


def averaged(model: str) -> None:
    """Average the weights of each of the runs of `seeds` at β = 0 with the base model's."""
    from studies.claims import baselines  # which takes torch along

    there = store().keys(model)
    for run in tqdm(trained(model, "seeds"), "averages", unit="model"):
        setting = {name: run.config().train[name] for name in SETTING}
        record = RunRecord("averaged", run.name, **setting)
        if record.label_smoothing == 0 and record.key not in there:
            folder = RUNS / f"{model}-averaged" / run.name
            record.alpha = baselines.averaged(run, folder)
            store().add(model, record, {"mmlu": folder / "mmlu.jsonl"})


def price(model: str) -> None:
    """Measure each model that is still there, but for those that only chose a rate."""
    from studies.claims import baselines

    rows = read_rows(out := RECORDS / model / "price.jsonl")
    runs = [(part, run) for part in PARTS if part != "grid" for run in trained(model, part)]
    for part, run in tqdm(runs, "prices", unit="model"):
        if run.name not in [row["run"] for row in rows]:
            setting = {key: run.config().train[key] for key in (*SETTING, "smoothing_target")}
            rows.append({"run": run.name, "part": part, **setting, **baselines.price(run)})
            write_rows(out, rows)


def report(model: str) -> None:
    """Write and print differences of squared calibration errors, ×1000, in every reading, and of
    MMLU's guards, ×100; and what each target of β costs, means over seeds in nats a token. Draw
    what β does to every model."""
    store().merge(model)
    runs = unpacked(model)
    heads = [", ".join(filter(None, reading)) for reading in READINGS]
    tables = [
        (heads, [(*reading, "rms_debiased", 1000) for reading in READINGS]),
        (GUARDS, [("mmlu", *guard, 100) for guard in GUARDS.values()]),
    ]
    lines = []
    for names, columns in tables:
        lines += [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
        for name, terms in ROWS.items():
            cells = [difference(runs, terms, *column) for column in columns]
            if any(cells):
                lines.append(f"| {name} | {' | '.join(map(shown, cells))} |")
        lines.append("")
    if rows := read_rows(RECORDS / model / "price.jsonl"):
        by = pd.DataFrame(rows).groupby(["part", "label_smoothing"])
        means = by[PRICES].mean().assign(seeds=by.size()).reset_index()
        lines += [means.to_markdown(index=False, floatfmt=".4f"), ""]
    write_text(RUNS / f"{model}.md", "\n".join(lines))
    print(*lines, sep="\n")
    forest(RUNS / "forest.png")


def forest(out: Path) -> None:
    """Draw what β does by letters to every model with three seeds, with its intervals: filled
    among the choices, hollow among all tokens."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names, rows = plan_sweep(FILE, []).sweep.model_labels, {}
    by_letters = [reading for reading in READINGS if reading[0] in LETTERS]
    for model in store().models():
        runs = unpacked(model)
        for part, beta in itertools.product(("seeds", "harm"), BETAS[1:]):
            columns = [(*reading, "rms_debiased", 1000) for reading in by_letters]
            cells = [difference(runs, effect(part, beta), *column) for column in columns]
            if cells[0] and cells[0][1] > 2:
                name = names.get(f"models/{model}", model) + ", harm" * (part == "harm")
                rows[f"{name}: {beta}"] = cells
    with rc_context(STYLE):
        canvas = Figure((5.5, 0.8 + 0.2 * len(rows)), layout="constrained")
        axes = canvas.subplots(1, len(LETTERS), sharey=True)
        for column, (task, among, _) in enumerate(by_letters):
            axis = axes[[*LETTERS].index(task)]
            axis.set_title(LETTERS[task])
            shift, fill = (-0.15, INK) if among == "choices" else (0.15, "white")
            for at, cells in enumerate(rows.values()):
                if cells[column]:
                    of, _ = cells[column]
                    axis.plot([of.low, of.high], [at + shift] * 2, "|-", color=INK, lw=0.8, ms=4)
                    axis.plot(of.value, at + shift, "o", color=INK, mfc=fill, ms=2.6)
        for axis in axes:
            axis.axvline(0, color=GREY, lw=0.6)
            axis.set_xscale("symlog", linthresh=1)
            axis.set_xticks((-100, -5, 0, 5, 100), ("−100", "−5", "0", "5", "100"))
            axis.set_xlim(-250, 250)
            axis.minorticks_off()
        axes[0].set_yticks(range(len(rows)), rows)
        axes[0].invert_yaxis()
        canvas.supxlabel(
            "squared calibration error at β less at 0, ×1000 (logarithmic beyond ±1)\n"
            "filled: among the choices; hollow: among all tokens; left: better calibrated",
            fontsize=7.5,
        )
        with atomic_write(out, "wb") as file:
            canvas.savefig(file, format="png", dpi=200)


def unpacked(model: str) -> list[tuple[RunRecord, Path]]:
    """Every run of a model that was scored, and the folder of its records."""
    runs, every = [], store().runs(model)
    if not every:
        raise InputError(f"{RECORDS}: no records of {model}")
    asked = store().questions()
    for record in every:
        out = RUNS / "unpacked" / model / record.part / record.run
        if record.tasks and not (out / "DONE").exists():
            store().unpack(model, record, asked, out)
            (out / "DONE").touch()
        if record.tasks or record.part == "after":
            runs.append((record, out))
    for record, out in runs:
        if record.part == "after":
            tempered(runs, record, out)
    return runs


def tempered(runs: list, record: RunRecord, out: Path) -> None:
    """Write what a run of `seeds` answers by letters with the temperature that was fitted to it on
    MMLU's val questions, also elsewhere."""
    for task in LETTERS:
        if plain := records(runs, "seeds", task, PLAIN).get(record.seed):
            rows = [scaling.scaled(row, record.temperature) for _, row in json_lines(plain)]
            write_rows(out / f"{task}.jsonl", rows)
            record.tasks[task] = len(rows)


def difference(
    runs: list, terms: list, task: str, confidence: str, normalise: str | None,
    metric: str, times: int,
) -> tuple[stats.Estimate, int] | None:  # fmt: skip
    """One difference over the seeds that are in all terms, and their number; None without any."""
    found = [(weight, records(runs, part, task, match)) for weight, part, match in terms]
    tuned = [set(paths) for _, paths in found if None not in paths]
    seeds = sorted(set.intersection(*tuned))
    if not all(paths for _, paths in found) or not seeds:
        return None
    load = normalised if normalise == "logits" else partial(stats.load, normalise=normalise)
    sides = [
        (weight, [load(paths.get(seed) or paths[None]) for seed in seeds])
        for weight, paths in found
    ]
    of = stats.contrast(sides, metric, confidence)
    if of.value is None:
        return None
    scaled = {key: times * getattr(of, key) for key in ("value", "low", "high")}
    return replace(of, **scaled), len(seeds)


def shown(cell: tuple[stats.Estimate, int] | None) -> str:
    """A difference with its interval and seeds, bold if the interval leaves out 0."""
    if cell is None:
        return "–"
    of, seeds = cell
    bold = "**" * of.significant
    return f"{bold}{of.value:+.2f}{bold} [{of.low:+.2f}, {of.high:+.2f}] ({seeds})"


@cache
def normalised(path: Path) -> stats.Run:
    """A run with the AURC of the confidences max_k (s_k − s̄) / ‖s − s̄‖₂ alone, s the choices'
    log-probabilities: logits but for a constant (Cattelan & Silva 2024; Xia et al. 2025)."""
    of = stats.in_order(read_records(path))
    scores = measures.scores(of, "choices")
    centred = of.logprobs - of.logprobs.mean(1, keepdims=True)
    # Of choices that are all alike nothing is sure.
    scores.confidence = centred.max(1) / np.maximum(np.linalg.norm(centred, axis=1), 1e-12)
    drawn = measures.resamples(len(of), stats.RESAMPLES)
    draws = np.concatenate([measures.aurc(Sample(scores, times)) for times in drawn])
    (value,) = measures.aurc(Sample(scores))
    values, draws = ({"choices": {"aurc": x}} for x in (value, draws))
    return replace(stats.load(path), values=values, draws=draws)


def records(runs: list, part: str, task: str, match: dict) -> dict[int | None, Path]:
    """The record files of a part's runs in a setting, by seed; of a base model by None."""
    wanted = {"part": part} | match
    return {
        record.seed: folder / f"{task}.jsonl"
        for record, folder in runs
        if task in record.tasks and all(getattr(record, k) == v for k, v in wanted.items())
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
