"""The trainer in one process: labels, updates, losses, a resume, what it saves."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from real import equal, logs, prepare, wait_for
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaForCausalLM,
    get_scheduler,
)
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs

from calibeval.io import InputError
from smoothce import patch_model
from sweeps.launch import preflight
from sweeps.runs.files import is_locked, read_rows
from sweeps.runs.grid import plan_sweep
from sweeps.runs.run import Run
from sweeps.training import attention, checkpoint, hf_trainer
from sweeps.training import data as data_module
from sweeps.training.data import IGNORE, Updates, tokenised
from sweeps.training.options import Train


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """A cache of tokens of these tests, in their processes too."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("datasets"))
        patch.setenv("HF_DATASETS_CACHE", folder)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        yield


def write(path: Path, *conversations: list[dict]) -> Path:
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in conversations))
    return path


def turns(*texts: str) -> list[dict]:
    """A conversation of a user and the assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def keys_of(tiny: Path, **more: object) -> Train:
    given = {"model_name_or_path": str(tiny / "model"), "train_file": str(tiny / "chat.jsonl")}
    return Train.model_validate(given | more)


def read(tiny: Path, path: Path, **more: object) -> tuple[list[dict], object]:
    """The rows of a tokenised file, and its tokenizer."""
    keys = keys_of(tiny, train_file=str(path), **more)
    tokenizer = data_module.make_tokenizer(keys)
    return tokenised(keys, tokenizer).to_list(), tokenizer


def learnt(row: dict, tokenizer) -> str:
    return tokenizer.decode([token for token in row["labels"] if token != IGNORE])


def test_loss_lies_on_the_assistants_tokens_and_nowhere_else(tiny, tmp_path):
    """As the template's own {% generation %} marks say, or without them as its turns say."""
    messages = [{"role": "system", "content": "w1 w2"}, *turns("what is w3?", "A w4", "B?", "C w5")]
    path = write(tmp_path / "a.jsonl", messages, messages[2:])  # which the assistant begins
    (row, begun), tokenizer = read(tiny, path)
    assert learnt(begun, tokenizer).replace("\n", "") == "|assistant|>A w4</s>C w5</s>"
    # The newline after an intermediate turn is the template's, written after the assistant's text.
    assert learnt(row, tokenizer).replace("\n", "") == "A w4</s>C w5</s>"
    text = tokenizer.decode(row["input_ids"])
    assert text.startswith("<|system|>\nw1 w2\n<|user|>\nwhat is w3?")
    assert row["length"] == len(row["input_ids"]) == len(row["labels"])
    assert row["targets"] == sum(label != IGNORE for label in row["labels"])
    says = "{{- message['content'] + eos_token }}"
    marked = f"{{% generation %}}{says}{{% endgeneration %}}"
    tokenizer.chat_template = tokenizer.chat_template.replace(says, marked)
    assert "{% generation %}" in tokenizer.chat_template
    found, _ = tokenised(keys_of(tiny, train_file=str(path)), tokenizer).to_list()
    assert found["input_ids"] == row["input_ids"]
    assert learnt(found, tokenizer) == "A w4</s>C w5</s>"


def test_alpacas_rows_read_as_its_own_prompt(tiny, tmp_path):
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Say A.", "input": "", "output": "A"},
    ]
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps(rows))
    found, tokenizer = read(tiny, path, chat_template_name="alpaca")
    assert [tokenizer.decode(row["input_ids"]) for row in found] == [
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:3</s>",
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nSay A.\n\n### Response:A</s>",
    ]
    assert [learnt(row, tokenizer) for row in found] == ["3</s>", "A</s>"]


def test_what_cannot_be_read_is_named(tiny, tmp_path):
    """Bad rows; what a template refuses, as Gemma's and Mistral's do a system message, it says."""
    usr = json.dumps({"messages": [*turns("B", "A"), {"role": "usr", "content": "B"}]})
    for row in ("{", "[]", '{"messages": []}', '{"messages": [{"role": "user"}]}', usr):
        path = write(tmp_path / "a.jsonl", turns("B", "A"))
        path.write_text(path.read_text() + row + "\n")
        with pytest.raises(InputError, match=r"a\.jsonl, line 2: "):
            read(tiny, path)
    nice = {"role": "system", "content": "be nice"}
    path = write(tmp_path / "chats.jsonl", [nice, *turns("B", "A")])
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(TemplateError, match="System role not supported"):
        tokenised(keys_of(tiny, train_file=str(path)), tokenizer)
    tokenizer.chat_template = "{{ messages | length }}{{ messages[-1]['content'] }}"
    write(path, turns("a", "b", "c", "d"))
    with pytest.raises(InputError, match="rewrites earlier messages"):
        tokenised(keys_of(tiny, train_file=str(path)), tokenizer)


def test_cut_conversations_without_a_target_are_dropped(tiny, tmp_path):
    path = write(tmp_path / "a.jsonl", turns("w1 " * 50, "A"), turns("B", "A"))
    keys = keys_of(tiny, train_file=str(path), max_seq_length=64)
    rows = tokenised(keys, tokenizer := data_module.make_tokenizer(keys))
    assert max(rows["length"]) == 64
    updates = Updates(keys, rows, ranks=1, rank=0, pad=0)
    assert updates.summary.startswith("data: 1 conversations, ") and ", 1 drop" in updates.summary
    assert updates.rows(0).tolist() == [1]
    keys = keys_of(tiny, train_file=str(path), max_seq_length=3)
    with pytest.raises(InputError, match="max_seq_length=3"):
        Updates(keys, tokenised(keys, tokenizer), ranks=1, rank=0, pad=0)


def test_tokens_are_of_one_file_template_length_and_number(tiny, tmp_path, monkeypatch):
    """And made once, with as many processes as there are cores or with one."""
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    path = tmp_path / "chat.jsonl"
    path.write_bytes((tiny / "chat.jsonl").read_bytes())
    asked = [{}, {"max_seq_length": 48}, {"max_train_samples": 9}, {"chat_template_name": "alpaca"}]
    seen = [read(tiny, path, **more)[0] for more in asked]
    assert len(seen[2]) == 9 and max(row["length"] for row in seen[1]) == 48
    assert seen[3] != seen[0]
    with monkeypatch.context() as patch:  # what is there is not made again
        patch.setattr(data_module, "encode", None)
        assert [read(tiny, path, **more)[0] for more in asked] == seen
    other = tmp_path / "other"  # with nothing in it
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(other))
    monkeypatch.setattr(data_module, "SHARE", 10)
    assert read(tiny, path)[0] == seen[0]
    # Where tokenizers look, who would leave the prompts of scoring to one core.
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    assert getenv(b"TOKENIZERS_PARALLELISM") == b"true"
    path.write_text(path.read_text().replace("moon ", "sun "))
    assert read(tiny, path)[0] != seen[0]


def test_a_killed_run_leaves_nobody_tokenising(tiny, tmp_path):
    """Neither its workers nor the process that datasets has beside them."""
    begun = tmp_path / "begun"
    begun.mkdir()
    code = f"""if True:
        import os, pathlib, time
        from sweeps.training import data, options
        def encode(*_):
            pathlib.Path({str(begun)!r}, str(os.getpid())).touch()
            time.sleep(600)
        data.SHARE, data.encode = 1, encode
        asked = options.Train(**{keys_of(tiny).model_dump(exclude_unset=True)})
        data.tokenised(asked, data.make_tokenizer(asked))
    """
    cache = {"HF_DATASETS_CACHE": str(tmp_path)}
    run = subprocess.Popen([sys.executable, "-c", code], env=os.environ | cache)
    wait_for(lambda: len([*begun.iterdir()]) == len(os.sched_getaffinity(0)))
    left = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    run.wait()
    assert not any(map(is_locked, tmp_path.glob("*.lock")))
    wait_for(lambda: not any(psutil.pid_exists(child.pid) for child in left), 20)


def test_add_bos_begins_conversations_once(tiny, tmp_path):
    plain, tokenizer = read(tiny, tiny / "chat.jsonl")
    more = {"tokenizer_name": str(tmp_path), "chat_template_name": "tulu", "add_bos": True}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(tmp_path)
    begun, tokenizer = read(tiny, tiny / "chat.jsonl", **more)
    assert all(row["input_ids"][0] == tokenizer.bos_token_id for row in begun)
    assert [row["length"] - 1 for row in begun] == [row["length"] for row in plain]
    assert [row["targets"] for row in begun] == [row["targets"] for row in plain]
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="already adds"):
        read(tiny, tiny / "chat.jsonl", tokenizer_name=str(tmp_path), add_bos=True)
    tokenizer.bos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has no such token"):
        read(tiny, tiny / "chat.jsonl", **more)


def updates_of(lengths: list[int], ranks: int = 1, rank: int = 0, **keys: object) -> Updates:
    """Of made-up conversations of these lengths; token 0 pads."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for length in lengths:
        ids = torch.randint(1, 60, (length,), generator=draw)
        keep = torch.rand(length, generator=draw) < 0.6
        keep[:1], keep[1:2] = False, True
        labels = torch.where(keep, ids, IGNORE).tolist()
        counts = {"length": length, "targets": int(keep.sum())}
        rows.append({"input_ids": ids.tolist(), "labels": labels, **counts})
    given = {"model_name_or_path": "m", "train_file": "f", "num_train_epochs": 1} | keys
    made = datasets.Dataset.from_list(rows)
    return Updates(Train.model_validate(given), made, ranks=ranks, rank=rank, pad=0)


@given(
    lengths=st.lists(st.integers(2, 50), min_size=1, max_size=40),
    size=st.integers(1, 4),
    ranks=st.integers(1, 3),
    steps=st.integers(1, 3),
    reduce=st.sampled_from(["mean", "sum", "token_mean"]),
    packed=st.booleans(),
    room=st.integers(1, 80),
)
def test_an_epoch_visits_every_conversation_once(lengths, size, ranks, steps, reduce, packed, room):
    """Each update's are those of one rank without accumulation, and its loss is what it should."""
    keys = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
    updates = updates_of(lengths, ranks, reduce_loss=reduce, max_tokens=room, **keys)
    whole = updates_of(lengths, per_device_train_batch_size=size * ranks * steps)
    updates.packed, seen = packed, []
    assert len(updates) == len(whole)
    for step in range(len(updates)):
        shares = updates.micros(step)
        assert len(shares) == ranks and len({len(share) for share in shares}) == 1
        rows = [row for share in shares for bin, _ in share for row in bin]
        assert sorted(rows) == sorted(whole.rows(step))
        seen += rows
        bins = [bin for share in shares for bin, _ in share]
        fits = [len(bin) < 2 or sum(lengths[row] for row in bin) <= room for bin in bins]
        assert all(fits) or not packed
        targets = updates.targets
        weight = {row: divisor for share in shares for bin, divisor in share for row in bin}
        if reduce == "mean":  # by the targets of the micro-batch that a row belongs to
            order = updates.rows(step)
            blocks = [order[i : i + size] for i in range(0, len(order), size)]
            expected = {r: steps * targets[block].sum() for block in blocks for r in block}
        else:
            mean = targets[rows].sum() / ranks
            expected = dict.fromkeys(rows, steps if reduce == "sum" else mean)
        assert weight == pytest.approx(expected)
    assert sorted(seen) == list(range(len(lengths)))


def gemma() -> Gemma3ForCausalLM:
    """Two layers that see 5 tokens, one that sees all; queries scaled by other than 1/√d."""
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(**sizes, sliding_window=5, query_pre_attn_scalar=3, bos_token_id=2)
    return Gemma3ForCausalLM(config)


def gradients(model, batches) -> tuple[float, dict]:
    model.zero_grad()
    losses = [model(**batch, use_cache=False).loss for batch in batches]
    sum(losses).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    return sum(loss.item() for loss in losses), found


def test_packed_loss_and_gradients_are_those_of_each_conversation_alone():
    """With windows, and rows filled up as on a GPU; below the trainer packs without either."""
    torch.manual_seed(0)
    model = patch_model(gemma(), label_smoothing=0.1, reduction="sum").train()
    updates = updates_of([7, 3, 12, 2, 9, 2])
    loss, expected = gradients(model, [updates.batch([row]) for row in range(6)])
    assert attention.use(model, gpu=False, half=False) is None
    updates.packed, updates.tile = True, 64
    packed = [updates.batch(rows) for rows in ([4, 0, 3], [2, 5, 1], [])]
    assert all(batch["input_ids"].shape[1] % 64 == 0 for batch in packed[:2])
    found, gradient = gradients(model, packed)
    assert found == pytest.approx(loss, rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(gradient[name], value, rtol=1e-4, atol=2e-5, msg=name)


def finished(path: Path, *overrides: str) -> Run:
    run = prepare(path, *overrides)
    hf_trainer.fit(run)
    return run


def rows_of(run: Run, key: str = "loss") -> list[float]:
    return [row[key] for row in read_rows(run.metrics) if key in row]


@pytest.mark.parametrize(
    ("reduction", "target"), [("mean", None), ("sum", "u.npy"), ("token_mean", "unigram")]
)
def test_training_is_torchs_own_packed_or_not(sweep_file, tiny, tmp_path, reduction, target):
    """Against a loop with torch's cross-entropy, AdamW and nothing of ours but the order."""
    settings = {"label_smoothing": 0.1, "learning_rate": 1e-3, "weight_decay": 0.1, "held_out": 5}
    settings |= {"reduce_loss": reduction, "gradient_accumulation_steps": 3, "max_tokens": 80}
    settings |= {"logging_steps": 1, "clip_grad_norm": 3.0, "warmup_ratio": 0.2}
    model = LlamaForCausalLM.from_pretrained(tiny / "model").train()
    u = np.random.default_rng(0).dirichlet(np.ones(model.config.vocab_size))
    np.save(tmp_path / "u.npy", u)
    settings["smoothing_target"] = f"{tmp_path}/x/../u.npy" if target == "u.npy" else target
    path = sweep_file(grid={}, train=settings)
    runs = [finished(path, f"train.packing={on}") for on in ("false", "true")]
    keys = runs[0].config().train_options
    tokenizer = data_module.make_tokenizer(keys)
    updates = Updates(keys, tokenised(keys, tokenizer), ranks=1, rank=0, pad=0)
    flat = [p for n, p in model.named_parameters() if "norm" in n]
    rest = [p for n, p in model.named_parameters() if "norm" not in n]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    schedule = get_scheduler("linear", optimizer, int(len(updates) * 0.2), len(updates))
    learnt = updates.batch(updates.kept)["labels"]
    often = torch.bincount(learnt[learnt != IGNORE], minlength=model.config.vocab_size)
    often = often / often.sum() if target else torch.ones(len(often)) / len(often)
    often = torch.tensor(u, dtype=torch.float32) if target == "u.npy" else often
    losses, norms = [], []
    for step in range(len(updates)):
        rows = updates.rows(step)
        summed, count = 0.0, 0
        for block in (rows[i : i + 4] for i in range(0, len(rows), 4)):
            batch = updates.batch(block)
            logits, labels = model(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
            n = (said := labels != IGNORE).sum()
            nll = F.cross_entropy(logits[said], labels[said], reduction="sum")
            loss = 0.9 * nll - 0.1 * (logits[said].log_softmax(-1) @ often).sum()
            total = int(updates.targets[rows].sum())
            (loss / {"mean": 3 * n, "sum": 3, "token_mean": total}[reduction]).backward()
            summed, count = summed + loss.item(), count + int(n)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0).item())
        optimizer.step(), schedule.step(), optimizer.zero_grad()
        losses.append(summed / count)
    for run in runs:
        assert rows_of(run) == pytest.approx(losses, rel=1e-6)
        assert rows_of(run, "grad_norm") == pytest.approx(norms, rel=1e-5)
        trained = load_file(run.model / "model.safetensors")
        for name, value in model.named_parameters():
            torch.testing.assert_close(trained[name], value.detach(), rtol=1e-4, atol=1e-6)
        rate = [1e-3 * min(step / 2, (10 - step) / 8) for step in range(10)]
        assert rows_of(run, "learning_rate") == pytest.approx(rate)
        saved = LlamaForCausalLM.from_pretrained(run.model).eval()
        batch = Updates.batch(updates, updates.held)
        with torch.no_grad():
            held_out = saved(batch["input_ids"], labels=batch["labels"]).loss.item()
        assert len(rows_of(run, "held_out_loss")) == 2
        assert rows_of(run, "held_out_loss")[-1] == pytest.approx(held_out, rel=1e-5)
        assert len(updates.held) == 5 and not set(updates.held) & set(updates.kept)


INTERRUPTED = """
import signal, sys
from sweeps.training import hf_trainer
from sweeps.cli import main

def on_step_end(self, args, state, control, before=hf_trainer.Course.on_step_end, **more):
    if state.global_step == int(sys.argv[1]):
        signal.raise_signal(int(sys.argv[2]))
    before(self, args, state, control, **more)

hf_trainer.Course.on_step_end = on_step_end
sys.exit(main(["train", sys.argv[3]]))
"""


def interrupt(run: Run, number: signal.Signals, at: int) -> int:
    """The exit code of the run's trainer, which sends itself this signal at the end of a step."""
    words = [sys.executable, "-c", INTERRUPTED, str(at), str(int(number)), str(run.path)]
    with open(run.path / "train.log", "ab") as log:
        return subprocess.run(words, stdout=log, stderr=log, check=False).returncode


@pytest.mark.timeout(1800)
def test_a_run_that_is_interrupted_ends_bit_for_bit(sweep_file, tmp_path, monkeypatch):
    """Asked to leave, killed, asked at an epoch's end and in a save, one after the other."""
    train = {"num_train_epochs": 10, "gradient_accumulation_steps": 2, "checkpointing_steps": 5}
    train |= {"packing": True, "attention_dropout": 0.1, "held_out": 5, "logging_steps": 1}
    path = sweep_file(grid={}, train=train | {"learning_rate": 1e-3})
    calm = prepare(path)
    run = prepare(path, f"output_root={tmp_path}/disturbed")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes
    hf_trainer.fit(calm)
    assert interrupt(run, signal.SIGTERM, 7) == 75, logs(run.path)
    assert run.step() == 7 and not run.model.exists()
    assert interrupt(run, signal.SIGKILL, 15) == -9, logs(run.path)
    assert run.step() == 10
    end = 16  # of an epoch
    asked = iter([False] * (end - run.step() - 1) + [True])
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as left:
        patch.setattr(hf_trainer.Stop, "everywhere", lambda self: next(asked))
        hf_trainer.fit(run)
    assert left.value.code == 75 and run.step() == end

    def torn(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hf_trainer, "keep", torn)
        hf_trainer.fit(run)
    assert run.step() == end  # nothing is lost, and nothing half
    hf_trainer.fit(run)
    torch.set_num_threads(threads)
    assert equal(run, calm)
    for key in ("step", "loss", "held_out_loss"):
        assert rows_of(run, key) == rows_of(calm, key)
    assert not list(run.checkpoints.glob(".part*"))
    assert len(list(run.checkpoints.glob("step-*"))) == 3


def test_a_damaged_checkpoint_is_set_aside_and_other_data_refused(
    sweep_file, tiny, tmp_path, capsys
):
    shutil.copy(tiny / "chat.jsonl", file := tmp_path / "chat.jsonl")
    train = {"train_file": str(file), "max_train_steps": 6, "checkpointing_steps": 2}
    uniform = np.full(rows := len(AutoTokenizer.from_pretrained(tiny / "model")), 1 / rows)
    np.save(target := tmp_path / "u.npy", uniform)
    run = finished(sweep_file(grid={}, train=train | {"smoothing_target": str(target)}))
    shutil.rmtree(run.model)
    np.save(target, np.eye(rows)[0])
    with pytest.raises(InputError, match="step-4: written with other data or smoothing_target"):
        hf_trainer.fit(run)
    np.save(target, uniform)
    file.write_text(file.read_text().replace("moon ", "sun "))
    with pytest.raises(InputError, match=r"step-4: written with other .*, \w+, now \w+; restore"):
        hf_trainer.fit(run)
    newest, older = run.checkpoints / "step-4", run.checkpoints / "step-2"
    with open(newest / "optimizer.pt", "r+b") as weights:
        weights.seek(100)
        weights.write(b"x")
    data = json.loads((older / checkpoint.STATE).read_text())["data"]
    assert checkpoint.latest(run.checkpoints, data) == older
    assert "step-4: damaged; set aside as damaged-step-4" in capsys.readouterr().out
    (older / checkpoint.STATE).write_text("{")
    assert checkpoint.latest(run.checkpoints, data) is None


def test_a_diverging_loss_and_missing_processes_are_said(sweep_file):
    path = sweep_file(grid={}, train={"max_train_steps": 4})
    with pytest.raises(InputError, match=r"the loss is (nan|inf) at step \d+; lower the learning"):
        finished(path, "train.learning_rate=1e30", "train.max_train_steps=9")
    with pytest.raises(InputError, match="world asks for 2 processes"):
        finished(path, "world.processes_per_node=2")


def test_adapters_are_saved_merged_or_alone_and_resume(sweep_file, tiny, tmp_path):
    lora = {"r": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}
    train = {"lora": lora, "learning_rate": 1e-2, "attention_dropout": 0.1, "logging_steps": 1}
    path = sweep_file(grid={}, train=train)
    merged, alone = (finished(path, f"train.lora.save={how}") for how in ("merged", "adapter"))
    with pytest.raises(InputError, match="adapters alone are not scored"):
        plan_sweep(path, ["train.lora.save=adapter", "score={tasks: [{task: mmlu, data: x}]}"])
    base = LlamaForCausalLM.from_pretrained(tiny / "model").eval()
    ordinary = LlamaForCausalLM.from_pretrained(merged.model).eval()
    adapted = AutoModelForCausalLM.from_pretrained(alone.model).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = adapted(ids).logits
        torch.testing.assert_close(ordinary(ids).logits, expected, rtol=1e-4, atol=1e-5)
        assert (base(ids).logits - expected).abs().max() > 0.01
    changed = {n for n, p in base.named_parameters() if not p.equal(ordinary.get_parameter(n))}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "down_proj"}
    run = prepare(path, f"output_root={tmp_path}/stopped")
    run.stop.touch()
    with pytest.raises(SystemExit):
        hf_trainer.fit(run)
    assert run.step() == 1
    run.stop.unlink()
    hf_trainer.fit(run)
    assert equal(run, merged) and rows_of(run) == rows_of(merged)


def test_a_model_is_saved_as_its_base_was(sweep_file, tiny, tmp_path):
    """Its precision, its tied classifier and its configuration."""
    half = tmp_path / "half"
    model = LlamaForCausalLM.from_pretrained(tiny / "model").to(torch.bfloat16)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(half)
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(half)
    train = {"model_name_or_path": str(half), "max_train_steps": 1}
    run = finished(sweep_file(grid={}, train=train))
    names = load_file(run.model / "model.safetensors")
    assert names.keys() == load_file(half / "model.safetensors").keys()
    assert {value.dtype for value in names.values()} == {torch.bfloat16}
    before, after = (json.loads((f / "config.json").read_text()) for f in (half, run.model))
    assert {k: v for k, v in after.items() if before.get(k) != v} == {}
    assert AutoTokenizer.from_pretrained(run.model).chat_template


def test_models_and_tokenizers_that_do_not_fit_are_said(sweep_file, tiny, tmp_path, capsys):
    shutil.copytree(tiny / "model", folder := tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(folder)
    train = {"model_name_or_path": str(folder), "max_train_steps": 1}
    path = sweep_file(grid={}, train=train)
    run = finished(path, "train.filter_eps=null")
    said, rows = capsys.readouterr().out, len(tokenizer) - 1
    assert f"the tokenizer's {rows + 1} entries outgrow the model's {rows}" in said
    assert "batches: padded" in said
    saved = AutoModelForCausalLM.from_pretrained(run.model)
    assert saved.get_input_embeddings().weight.shape[0] > rows
    with open(folder / "model.safetensors", "r+b") as weights:
        weights.truncate(1000)
    with pytest.raises(InputError, match=f"{folder}: cannot be loaded as a causal"):
        finished(path, "train.seed=2")


def test_shares_of_other_tokens_are_refused(sweep_file, tiny, tmp_path):
    """And a file that is not there, before anything is queued."""
    path, file = sweep_file(grid={}, train={"max_train_steps": 1}), tmp_path / "u.npy"
    rows = len(AutoTokenizer.from_pretrained(tiny / "model"))
    target = f"train.smoothing_target={file}"
    said = f"train.smoothing_target: {file}: no such file"
    assert said in preflight.problems(plan_sweep(path, [target]), "local")
    for wrong in (np.full(3, 1 / 3), np.ones(rows), np.full(rows, np.nan), np.full(rows, "a")):
        np.save(file, wrong)
        assert not preflight.problems(plan_sweep(path, [target]), "local")
        with pytest.raises(InputError, match=rf"u\.npy: .*; expected .* of {rows} shares"):
            finished(path, target)
    with pytest.raises(InputError, match=r"train\.smoothing_target: found 'unigrams'"):
        plan_sweep(path, ["train.smoothing_target=unigrams"])


def test_flash_attn_is_taken_where_it_is_installed(monkeypatch):
    """And what neither it nor torch's own can do is padded."""
    model, chosen = gemma(), []
    assert "16 bits" in attention.use(model, gpu=True, half=False)
    model.config.attn_logit_softcapping = 50.0
    assert "caps its scores" in attention.use(model, gpu=True, half=True)
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(model, "set_attn_implementation", chosen.append)
    assert attention.use(model, gpu=True, half=True) is None and chosen == ["flash_attention_2"]
    updates = updates_of([7, 3, 12])
    updates.packed = True
    assert FlashAttentionKwargs.__annotations__.keys() <= updates.batch([1, 0]).keys()
