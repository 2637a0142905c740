"""LLaMA-Factory's own entry point with the callback.

It takes no transformers that the other programs take, so it needs an environment of its own:

    python -m venv VENV
    VENV/bin/pip install llamafactory==0.9.5 pytest -e ./kernel
    VENV/bin/python -m pytest tests/kernel/integrations/test_llamafactory.py
"""

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

tuner = pytest.importorskip("llamafactory.train.tuner")
import tokenizers  # noqa: E402
import transformers  # noqa: E402
from tiny_models import VOCABULARY, tiny  # noqa: E402

from smoothce import SmoothingCallback  # noqa: E402

BETA = 0.2


@pytest.fixture
def files(tmp_path) -> Path:
    """A folder with a tiny model, its tokenizer and sixteen conversations."""
    vocabulary = {f"t{number:02}": number for number in range(VOCABULARY)}
    words = tokenizers.models.WordLevel(vocabulary, unk_token="t03")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "t00", "eos_token": "t02", "unk_token": "t03"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
        tmp_path / "model"
    )
    tiny().save_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(16):
        numbers = torch.randint(4, VOCABULARY, (11,), generator=generator).tolist()
        said = [f"t{number:02}" for number in numbers]
        question, answer = " ".join(said[:5]), " ".join(said[5:])
        rows.append({"instruction": question, "input": "", "output": answer})
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    return tmp_path


def run(files, monkeypatch, name, callbacks=(), **settings):
    """One update by a YAML file, as on the command line: the loss, and the weights saved."""
    out = files / name
    train = {
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "model_name_or_path": str(files / "model"),
        "dataset": "rows",
        "dataset_dir": str(files),
        "template": "alpaca",
        "cutoff_len": 64,
        "output_dir": str(out),
        "max_steps": 1,
        "learning_rate": 0.1,
        "optim": "sgd",
        "max_grad_norm": 1e9,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        **settings,
    }
    file = files / f"{name}.yaml"
    file.write_text(yaml.safe_dump(train))
    monkeypatch.setattr(sys, "argv", ["train_smoothed.py", str(file)])
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    tuner.run_exp(callbacks=[*callbacks])
    logged = [json.loads(line) for line in (out / "trainer_log.jsonl").open()]
    saved = "adapter_model" if train["finetuning_type"] == "lora" else "model"
    return logged[0]["loss"], load_file(out / f"{saved}.safetensors")


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_an_update_is_that_of_dense_logits_however_it_is_split(kind, files, monkeypatch):
    """Of LLaMA-Factory's own `label_smoothing_factor`, which is right in one micro-batch."""
    settings = {"finetuning_type": kind}
    if kind == "lora":
        settings |= {"lora_rank": 2, "lora_target": "q_proj,v_proj"}
    whole = {"per_device_train_batch_size": 16, **settings}
    want, weights = run(files, monkeypatch, "dense", label_smoothing_factor=BETA, **whole)
    plain, _ = run(files, monkeypatch, "plain", **whole)
    assert abs(plain - want) > 1e-3
    for steps in (1, 2, 4):
        split = {
            "per_device_train_batch_size": 16 // steps,
            "gradient_accumulation_steps": steps,
            **settings,
        }
        callbacks = [SmoothingCallback(label_smoothing=BETA)]
        loss, found = run(files, monkeypatch, f"smoothed-{steps}", callbacks, **split)
        assert loss == pytest.approx(want, rel=1e-5)
        assert found.keys() == weights.keys()
        for key in weights:
            torch.testing.assert_close(found[key], weights[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 would smooth dense logits"),
        ({"use_dft_loss": True}, "did not ask the model for its loss"),
    ],
)
def test_other_losses_are_refused(settings, said, files, monkeypatch):
    callbacks = [SmoothingCallback(label_smoothing=BETA)]
    with pytest.raises(ValueError, match=said):
        run(files, monkeypatch, "refused", callbacks, **settings)
