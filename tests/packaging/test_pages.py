"""Code on the pages does what they say, and the table of keys has all of them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table on a page whose first line begins so."""
    table = text[text.index(f"\n| {heading}") :].strip().split("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def python_block(name: str, marker: str) -> str:
    """The one block of Python on a page that has these characters."""
    blocks = re.findall(r"```python\n(.*?)```", page(name), flags=re.DOTALL)
    (block,) = (block for block in blocks if marker in block)
    return block


def test_the_page_of_sweeps_has_every_key_of_a_profile():
    from sweeps.runs.schema import Cluster

    cells = [cells[0] for cells in rows(page("slurm/README.md"), "key | default | what")]
    stated = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(stated) == sorted(Cluster.model_fields)


def test_the_estimate_of_table_1_is_what_its_script_prints():
    script = ROOT / "configs" / "paper" / "gpu_hours.py"
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert printed.stdout in page("docs/cost.md")


def test_the_loop_on_the_kernels_page_makes_dense_smoothings_gradient():
    """With padding and prompts, over micro-batches that hold unequal numbers of labels."""
    tiny_models = pytest.importorskip("tiny_models")
    loop = python_block("kernel/README.md", "decoder = model.model")
    model = tiny_models.tiny()
    micro_batches = [tiny_models.batch(), tiny_models.batch()]
    micro_batches[1]["labels"][:, :6] = -100
    losses = [tiny_models.expected(model, batch, 0.1, "sum") for batch in micro_batches]
    tokens = sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in micro_batches)
    dense = tiny_models.gradients(model, sum(losses) / tokens)
    model.zero_grad()
    made = {}

    class Optimizer:
        def step(self) -> None:
            made.update({name: p.grad.clone() for name, p in model.named_parameters()})

        def zero_grad(self) -> None:
            model.zero_grad()

    exec(loop, {"model": model, "micro_batches": micro_batches, "optimizer": Optimizer()})
    tiny_models.assert_same(made, dense)


@pytest.fixture
def chats(tmp_path):
    """A folder with a tiny model that has Qwen 2.5's chat template, and a file of chats."""
    trl = pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    import tiny_world

    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    if not template.is_file():
        pytest.skip("this TRL brings no chat template of Qwen 2.5")
    tiny_world.main(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = template.read_text()
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def local_script(folder: Path) -> str:
    """The first page's script on the folder's model and chats, for two updates on CPUs."""
    script = python_block("README.md", 'data_files="chats.jsonl"')
    output = f'output_dir="{folder / "out"}", max_steps=2, use_cpu=True, report_to="none"'
    changes = {
        '"chats.jsonl"': f'"{folder / "train.jsonl"}"',
        '"Qwen/Qwen2.5-0.5B-Instruct"': f'"{folder / "model"}"',
        'output_dir="out"': output,
    }
    for printed, local in changes.items():
        assert script.count(printed) == 1
        script = script.replace(printed, local)
    return script


@pytest.mark.slow
def test_a_csv_file_is_scored_as_the_page_says(tmp_path):
    pytest.importorskip("transformers")
    import tiny_world

    from calibeval.__main__ import main

    tiny_world.main(tmp_path)
    text = page("eval/README.md").split("### A CSV file")[1]
    lines = text.split("\n\n")[1].splitlines()
    (tmp_path / "questions.csv").write_text("\n".join(line.strip() for line in lines))
    task = re.search(r"```yaml\n(.*?)```", text, flags=re.DOTALL)[1]
    (tmp_path / "questions.yaml").write_text(task)
    out = tmp_path / "questions.jsonl"
    words = ["--task", tmp_path / "questions.yaml", "--model", tmp_path / "model", "--out", out]
    assert main(["score", *map(str, words)]) == 0
    labels = [json.loads(line)["label"] for line in out.read_text().splitlines()]
    assert labels == [2, 1]


@pytest.mark.slow
def test_the_script_for_chats_learns_the_answers_alone_and_smooths(chats):
    names: dict = {}
    exec(compile(local_script(chats), "README.md", "exec"), names)
    trainer = names["trainer"]
    batch = next(iter(trainer.get_train_dataloader()))
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        text = trainer.processing_class.decode(ids)
        learned = trainer.processing_class.decode(ids[labels != -100])
        assert learned.strip() == text.split("<|im_start|>assistant\n")[1].split("\n")[0]
        assert learned.strip().endswith("<|im_end|>")
    assert (chats / "out" / "model.safetensors").is_file()

    model = trainer.model.train()
    smoothed = model(**batch).loss
    model.eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits = model(**inputs).logits[:, :-1].flatten(0, 1).float()
    labels = batch["labels"][:, 1:].flatten()
    dense = F.cross_entropy(logits, labels, label_smoothing=0.1)
    assert smoothed.item() == pytest.approx(dense.item(), rel=1e-3)
