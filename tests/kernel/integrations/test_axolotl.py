"""Axolotl's own plugin manager, config and trainer."""

import sys

import pytest
import torch

axolotl = pytest.importorskip("axolotl.integrations.base")
trainers = pytest.importorskip("axolotl.core.trainers.base")
import datasets  # noqa: E402
import transformers  # noqa: E402
from axolotl.core.training_args import AxolotlTrainingArguments  # noqa: E402
from axolotl.integrations.config import merge_input_args  # noqa: E402
from axolotl.utils.dict import DictDefault  # noqa: E402
from tiny_models import expected, gradients, sequences, tiny  # noqa: E402

PLUGIN = "smoothce.integrations.axolotl.SmoothCEPlugin"
BETA = 0.2


@pytest.fixture
def plugins(monkeypatch):
    """The manager, with the plugin as its YAML key registers it."""
    monkeypatch.setattr(axolotl.PluginManager, "_instance", None)
    manager = axolotl.PluginManager.get_instance()
    monkeypatch.setattr(manager, "plugins", type(manager.plugins)())
    manager.register(PLUGIN)
    assert PLUGIN in manager.plugins, sys.modules.get("smoothce.integrations.axolotl")
    return manager


def rows():
    return [
        {"input_ids": ids, "labels": ids.where(torch.arange(9) > i, -100)}
        for i, ids in enumerate(sequences())
    ]


def trainer(folder, model, rows_of_a_batch=8):
    arguments = AxolotlTrainingArguments(
        str(folder),
        per_device_train_batch_size=rows_of_a_batch,
        gradient_accumulation_steps=8 // rows_of_a_batch,
        max_steps=1,
        learning_rate=0.0,
        max_grad_norm=1e9,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    return trainers.AxolotlTrainer(
        model,
        arguments,
        train_dataset=datasets.Dataset.from_list(rows()).with_format("torch"),
        data_collator=transformers.default_data_collator,
    )


def test_the_keys_are_part_of_axolotls_config(plugins):
    with_capabilities, plain = merge_input_args()
    for config in (with_capabilities, plain):
        assert "smoothce_label_smoothing" in config.model_fields
        assert config.model_fields["smoothce_label_smoothing"].is_required()


def trained(made):
    made.train()
    (logged,) = (entry for entry in made.state.log_history if "grad_norm" in entry)
    return logged


def keys(beta):
    return DictDefault(smoothce_label_smoothing=beta, smoothce_z_loss=0.0, smoothce_filter_eps=None)


@pytest.mark.parametrize("rows_of_a_batch", [8, 2])
def test_without_smoothing_it_is_axolotls_own_loss(rows_of_a_batch, plugins, tmp_path):
    theirs = trained(trainer(tmp_path, tiny(), rows_of_a_batch))
    made = trainer(tmp_path, tiny(), rows_of_a_batch)
    plugins.post_trainer_create(keys(0.0), made)
    ours = trained(made)
    for name in ("loss", "grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4)


def test_the_gradient_is_dense_smoothings(plugins, tmp_path):
    made = trainer(tmp_path, tiny())
    plugins.post_trainer_create(keys(BETA), made)
    logged = trained(made)

    model = tiny()
    data = {}
    for key in ("input_ids", "labels"):
        data[key] = torch.stack([row[key] for row in rows()])
    dense = expected(model, data, BETA)
    norms = [gradient.norm() for gradient in gradients(model, dense).values()]
    assert logged["loss"] == pytest.approx(dense.item(), rel=1e-4)
    assert logged["grad_norm"] == pytest.approx(torch.stack(norms).norm().item(), rel=1e-4)


def test_a_loss_of_axolotls_own_is_refused(plugins, tmp_path):
    made = trainer(tmp_path, tiny())
    made.args.orpo_alpha = 0.1
    with pytest.raises(ValueError, match="orpo_alpha"):
        plugins.post_trainer_create(keys(BETA), made)
