"""The examples run, and say what they should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import check_smoothing
import pytest
import torch
import torch.nn.functional as F

safetensors_torch = pytest.importorskip("safetensors.torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "kernel" / "examples"


def dense(hidden, weight, labels, beta, tokens):
    summed = F.cross_entropy(hidden @ weight.T, labels, label_smoothing=beta, reduction="sum")
    return summed / tokens


def without_smoothing(hidden, weight, labels, beta, tokens):
    return dense(hidden, weight, labels, 0.0, tokens)


def by_its_own_tokens(hidden, weight, labels, beta, tokens):
    return dense(hidden, weight, labels, beta, (labels >= 0).sum())


def without_a_gradient_of_hidden(hidden, weight, labels, beta, tokens):
    return dense(hidden.detach(), weight, labels, beta, tokens)


@pytest.mark.parametrize(
    ("loss", "holds"),
    [
        (check_smoothing.loss, [True, True, True]),
        (without_smoothing, [False, False, True]),
        (by_its_own_tokens, [True, True, False]),
        (without_a_gradient_of_hidden, [True, False, True]),
    ],
)
def test_the_check_tells_right_losses_from_wrong_ones(loss, holds):
    assert list(check_smoothing.check(loss).values()) == holds


def run(script, *arguments):
    command = [sys.executable, EXAMPLES / script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def world(tmp_path):
    """A folder with a tiny model, and rows of text."""
    pytest.importorskip("transformers")
    tiny_world = pytest.importorskip("tiny_world")
    tiny_world.main(tmp_path)
    rows = [{"text": tiny_world.words(3, 9)} for _ in range(9)]
    tiny_world.write_rows(tmp_path / "data.jsonl", rows)
    return tmp_path


@pytest.mark.slow
def test_trl(world):
    pytest.importorskip("trl")
    own = ["--model", world / "model", "--data", world / "data.jsonl", "--label_smoothing", 0.2]
    trls = ["--output_dir", world / "out", "--max_steps=2", "--logging_steps=1"]
    said = run("trl_sft.py", *own, *trls, "--report_to=none", "--use_cpu=true")
    assert "'loss'" in said and (world / "out" / "model.safetensors").is_file()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_trl_sharded_by_fsdp2_trains_as_one_process(world):
    """By the configuration file beside the script; two updates of the same four rows each."""
    pytest.importorskip("trl")
    launch = ["-m", "accelerate.commands.launch", "--config_file", EXAMPLES / "fsdp2.yaml"]
    # In fp32: the rounding of bf16, which the file asks for, would hide a difference.
    launch += ["--mixed_precision", "no"]
    one = trl_updates(world, [], rows=4, CUDA_VISIBLE_DEVICES="0")
    two = trl_updates(world, launch, rows=2)
    assert len(one) == 4
    assert two == pytest.approx(one, rel=1e-3)
    saved = safetensors_torch.load_file(world / "out" / "model.safetensors")
    assert "model.embed_tokens.weight" in saved


def trl_updates(world, launcher, rows, **environment):
    """Losses and gradient norms that the script prints of two updates."""
    command = [sys.executable, *launcher, EXAMPLES / "trl_sft.py"]
    command += ["--model", world / "model", "--data", world / "data.jsonl"]
    command += ["--label_smoothing", 0.2, "--output_dir", world / "out", "--max_steps", 2]
    command += ["--logging_steps", 1, "--report_to", "none", "--learning_rate", 1e-3]
    command += ["--bf16", "false", "--per_device_train_batch_size", rows]
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    numbers = re.findall(r"'(?:loss|grad_norm)': '?([\d.]+)", done.stdout)
    return [float(number) for number in numbers]


@pytest.mark.slow
def test_the_readmes_trl_script_trains_with_smoothing(world, monkeypatch):
    """As it is printed, but for the model and the data, which are on the hub, and its length."""
    pytest.importorskip("trl")
    page = (EXAMPLES.parents[1] / "README.md").read_text(encoding="utf-8")
    script = page.split("```python\n")[1].split("```")[0]
    changes = {
        '"chats.jsonl"': f'"{world / "data.jsonl"}"',
        '"Qwen/Qwen2.5-0.5B-Instruct"': f'"{world / "model"}"',
        # The tiny model's template has no marks of what the assistant says.
        'output_dir="out", assistant_only_loss=True': f'"{world / "out"}", max_steps=2, '
        'use_cpu=True, logging_steps=1, report_to="none"',
    }
    for printed, local in changes.items():
        assert printed in script
        script = script.replace(printed, local)
    names = {}
    exec(compile(script, "README.md", "exec"), names)
    trainer = names["trainer"]
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 2

    patched = trainer.model
    patched.train()
    ids = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(0))
    smoothed = patched(input_ids=ids, labels=ids).loss
    patched.eval()
    with torch.no_grad():
        logits = patched(input_ids=ids).logits[:, :-1].flatten(0, 1).float()
    dense = F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    assert smoothed.item() == pytest.approx(dense.item(), rel=1e-3)


@pytest.fixture
def own_script(world):
    """A factory of a patched SFTTrainer of three updates, and the page's snippet with a word."""
    trl = pytest.importorskip("trl", minversion="1.16")  # the page is of it
    import datasets
    import transformers

    from smoothce import patch_trainer

    page = (EXAMPLES.parents[1] / "docs" / "own-script.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)

    def snippet(word):
        (found,) = [block for block in blocks if word in block]
        return found

    rows = [{"prompt": "which stone", "completion": " the moon sees it"} for _ in range(12)]

    def make(*callbacks):
        trainer = trl.SFTTrainer(
            transformers.AutoModelForCausalLM.from_pretrained(world / "model"),
            trl.SFTConfig(
                str(world / "out"), max_steps=3, use_cpu=True, logging_steps=1, report_to="none"
            ),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=transformers.AutoTokenizer.from_pretrained(world / "model"),
            callbacks=list(callbacks),
        )
        return patch_trainer(trainer, label_smoothing=0.1)

    return make, snippet


@pytest.mark.slow
def test_the_page_on_own_scripts_shows_a_batch_and_that_it_is_smoothed(own_script, capsys):
    make, snippet = own_script
    trainer = make()
    capsys.readouterr()
    exec(snippet("get_train_dataloader"), {"trainer": trainer})
    padding, learned, text = capsys.readouterr().out.splitlines()
    assert padding == "padding: 0% of the tokens"  # the rows are alike
    assert 0 < int(re.search(r"learned: (\d+)%", learned).group(1)) < 100
    assert text.strip() == "the moon sees it</s>"

    ids = torch.arange(3, 12)[None]
    exec(snippet("plain = "), {"torch": torch, "model": trainer.model, "ids": ids})
    smoothed, plain = map(float, capsys.readouterr().out.split())
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=ids).logits[:, :-1].flatten(0, 1).float()
    for printed, beta in ((smoothed, 0.1), (plain, 0.0)):
        dense = F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=beta)
        assert printed == pytest.approx(dense.item(), rel=1e-4)


@pytest.mark.slow
def test_the_page_on_own_scripts_says_what_a_nan_looks_like_and_stops_there(own_script):
    from transformers import TrainerCallback

    make, snippet = own_script

    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                model.get_input_embeddings().weight.fill_(float("nan"))

    trainer = make(Break())
    trainer.train()
    first, second = trainer.state.log_history[:2]
    assert first["loss"] > 0
    assert second["loss"] == 0 and second["grad_norm"] != second["grad_norm"]

    trainer = make(Break())
    exec(snippet("class StopAtNaN"), {"trainer": trainer})
    with pytest.raises(ValueError, match="step 2: the gradient's norm is nan"):
        trainer.train()


def updates(processes, rows):
    """What the loop prints of each update."""
    pytest.importorskip("transformers")
    command = [sys.executable, EXAMPLES / "plain_loop.py"]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command[1:1] = launcher
    environment = {**os.environ, "ROWS_OF_A_MICRO_BATCH": str(rows), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    numbers = re.findall(r"loss ([\d.]+), gradient ([\d.]+)", done.stdout)
    return [float(number) for update in numbers for number in update]


@pytest.mark.slow
def test_the_plain_loops_updates_are_dense_smoothings_however_they_are_split():
    import plain_loop

    whole = updates(1, 8)
    assert len(whole) == 6
    ids, labels = plain_loop.rows_of_an_update(0)
    logits = plain_loop.model_of_your_own()(ids).logits[:, :-1].flatten(0, 1)
    dense_loss = F.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.1)
    assert whole[0] == pytest.approx(dense_loss.item(), rel=1e-4)
    for processes, rows in ((1, 2), (2, 2)):
        assert updates(processes, rows) == pytest.approx(whole, rel=1e-4), (processes, rows)


@pytest.mark.slow
def test_lightning(world):
    lightning = pytest.importorskip("lightning")
    import lightning_sft
    from transformers import AutoModelForCausalLM

    ids = torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    module = lightning_sft.SmoothedLanguageModel(
        str(world / "model"), label_smoothing=0.2, learning_rate=0.0
    )
    trainer = lightning.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    trainer.fit(module, loader, loader)

    model = AutoModelForCausalLM.from_pretrained(world / "model")
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    for name, beta in (("loss", 0.2), ("validation_loss", 0.0)):
        want = F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=beta)
        torch.testing.assert_close(trainer.callback_metrics[name], want, rtol=1e-4, atol=1e-5)
    assert module.model.lm_head.settings.label_smoothing == 0.2
    assert "loss" in run("lightning_sft.py", world / "model")
