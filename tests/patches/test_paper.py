"""The paper's runs: configs/paper, what they fetch, ask and cost, and the chain to Table 1."""

from pathlib import Path

from sweeps.launch import assets, preflight
from sweeps.runs.grid import plan_sweep
from sweeps.training import open_instruct_backend

PROJECT = Path(__file__).parents[2]
TABLE1 = PROJECT / "configs" / "paper" / "table1.yaml"


def test_table1_is_the_papers_runs():
    planned = plan_sweep(TABLE1, [])
    grid, cells = planned.sweep.grid, planned.runs
    assert len(cells) == 72 and planned.sweep.backend == "open-instruct"
    assert grid["learning_rate"] == (5e-6, 2e-5, 5e-5, 2e-4)
    assert grid["label_smoothing"] == (0, 0.1)
    assert [Path(file).stem for file in grid["train_file"]] == ["alpaca", "tulu3", "openhermes"]
    assert len(grid["model_name_or_path"]) == 3
    keys, world = cells[0].config().train_options, planned.sweep.world
    batch = keys.per_device_train_batch_size * keys.gradient_accumulation_steps
    batch *= world.processes_per_node
    assert (batch, keys.max_seq_length, keys.num_train_epochs) == (128, 4096, 2)
    assert (keys.reduce_loss, keys.attention_dropout, keys.loss_impl) == ("sum", 0.1, "fused")
    assert (keys.lr_scheduler_type, keys.warmup_ratio, keys.weight_decay) == ("linear", 0.03, 0)
    assert open_instruct_backend.clipping_problems(keys, world) == []
    # Tulu 3 is 93 minutes of tokenising in one process, and other ranks wait for it.
    assert keys.preprocessing_num_workers * keys.timeout > 93 * 60 * 2


def test_all_that_table1_reads_is_fetched():
    planned = plan_sweep(TABLE1, [])
    places = {asset.name.split()[-1] for asset in assets.assets(planned)}
    read = {cell.config().train["train_file"] for cell in planned.runs}
    read |= {cell.config().train["model_name_or_path"] for cell in planned.runs}
    assert read <= places
    for task in planned.sweep.score.tasks:
        assert any(Path(task.data).is_relative_to(place) for place in places) or any(
            Path(place).is_relative_to(task.data) for place in places
        )
    assert "data/hellaswag/hellaswag_train.jsonl" in places  # for the examples
    said = "\n".join(preflight.problems(planned, "local"))
    assert "no such file" not in said and said.count("hellaswag_val.jsonl →") == 1
