"""From Python: what the commands do, of a folder and of a model in memory."""

import copy
import json

import numpy as np
import pytest
import torch
from made_records import read_lines, write_lines, write_records
from transformers import AutoModelForCausalLM, AutoTokenizer

import calibeval
from calibeval import __main__, records
from calibeval.ask import engines, scoring
from calibeval.ask.request import Request, Task
from calibeval.io import InputError


@pytest.fixture
def two_tasks(mmlu):
    """Letters and texts of the same questions, under names of their own."""
    letters = {"task": "mmlu", "data": str(mmlu), "limit": 7}
    texts = Task(task="mmlu", data=str(mmlu), name="texts", scoring="continuation", limit=7)
    return [letters, texts]


@pytest.fixture
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model)


@pytest.fixture
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def test_records_of_a_model_in_memory_are_the_saved_ones_but_for_its_name(
    two_tasks, model, tokenizer, tiny_model, mmlu, tmp_path, run
):
    calibeval.score(model, tokenizer, two_tasks, out=tmp_path / "api")
    command = ["score", "--model", tiny_model, "--task", "mmlu", "--data", mmlu, "--limit", "7"]
    run(*command, "--out", tmp_path / "mmlu.jsonl")
    run(*command, "--scoring", "continuation", "--out", tmp_path / "texts.jsonl")
    for file in ("mmlu.jsonl", "texts.jsonl"):
        in_memory = (tmp_path / "api" / file).read_text()
        renamed = in_memory.replace('"a LlamaForCausalLM"', json.dumps(str(tiny_model)))
        assert renamed == (tmp_path / file).read_text()


def test_a_model_in_memory_stays_as_it_was(two_tasks, model, tokenizer):
    model.train()
    model.lm_head.eval()
    before = [module.training for module in model.modules()]
    calibeval.score(model, tokenizer, two_tasks)
    assert [module.training for module in model.modules()] == before


@pytest.fixture
def process_group(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'process_group'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_a_model_of_several_processes_is_the_one_it_wraps(
    two_tasks, model, tokenizer, tmp_path, process_group
):
    """DistributedDataParallel has neither a name nor a configuration of its own."""
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for name, given in (("plain", model), ("wrapped", wrapped)):
        calibeval.score(given, tokenizer, two_tasks[:1], out=tmp_path / name)
    for file in ("mmlu.jsonl", "mmlu.jsonl.meta.json"):
        plain = (tmp_path / "plain" / file).read_text()
        assert (tmp_path / "wrapped" / file).read_text() == plain


def test_a_folder_is_loaded_once_and_only_for_what_is_missing(
    two_tasks, tiny_model, tmp_path, monkeypatch
):
    loads = []
    create_engine = engines.create_engine

    def counting(*arguments):
        loads.append(arguments)
        return create_engine(*arguments)

    monkeypatch.setattr(engines, "create_engine", counting)
    first = calibeval.score(tiny_model, tasks=two_tasks[:1], out=tmp_path)
    both = calibeval.score(tiny_model, tasks=two_tasks, out=tmp_path)
    again = calibeval.score(str(tiny_model), tasks=two_tasks, out=tmp_path)
    assert len(loads) == 2
    assert first["mmlu"].ids == both["mmlu"].ids == again["mmlu"].ids
    assert len(again["texts"]) == 14


def test_other_weights_in_memory_are_scored_anew(two_tasks, model, tokenizer, tmp_path):
    """Nobody knows of which weights the records of a model without a folder are."""
    before = calibeval.score(model, tokenizer, two_tasks[:1], out=tmp_path)["mmlu"]
    with torch.no_grad():
        model.lm_head.weight += 0.1 * torch.rand_like(model.lm_head.weight)
    after = calibeval.score(model, tokenizer, two_tasks[:1], out=tmp_path)["mmlu"]
    assert not np.array_equal(before.logprobs, after.logprobs)


def test_older_records_stay_until_the_new_ones_are_whole(
    two_tasks, model, tokenizer, tmp_path, monkeypatch
):
    before = calibeval.score(model, tokenizer, two_tasks[:1], out=tmp_path)["mmlu"]
    monkeypatch.setattr(scoring, "make_record", None)
    with pytest.raises(TypeError):
        calibeval.score(model, tokenizer, two_tasks[:1], out=tmp_path)
    assert np.array_equal(records.read(before.path).logprobs, before.logprobs)


def test_older_records_are_not_read_beside_a_newer_sidecar(two_tasks, model, tokenizer, tmp_path):
    """A kill between the two renames leaves them so: the same questions, of other weights."""
    path = calibeval.score(model, tokenizer, two_tasks[:1], out=tmp_path)["mmlu"].path
    older_records = path.read_bytes()
    with torch.no_grad():
        model.lm_head.weight.zero_()  # equal log-probabilities, so that the file has another size
    calibeval.score(model, tokenizer, two_tasks[:1], out=tmp_path)
    assert path.stat().st_size != len(older_records)
    path.write_bytes(older_records)
    with pytest.raises(InputError, match=r"mmlu.jsonl: \d.* bytes, but mmlu.jsonl.meta.json says"):
        records.read(path)


def test_a_temperature_is_of_one_checkpoint_in_memory(two_tasks, model, tokenizer, tmp_path):
    """Models in memory have no folder, and all Llamas have one name."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight += 0.1
    validation = {**two_tasks[0], "limit": 30, "name": "val"}
    fitted_on = calibeval.score(model, tokenizer, [validation], out=tmp_path)["val"].path
    test = {**two_tasks[0], "shots": 1, "name": "test"}
    of_other = calibeval.score(other, tokenizer, [test], out=tmp_path)["test"].path
    with pytest.raises(InputError, match="is of another model than"):
        calibeval.temperature(fitted_on, of_other, tmp_path / "scaled.jsonl")
    of_same = calibeval.score(model, tokenizer, [test], out=tmp_path)["test"].path
    calibeval.temperature(fitted_on, of_same, tmp_path / "scaled.jsonl")


TASK = {"task": "mmlu", "data": "d"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"tasks": [{"task": "mmlu"}]}, "no 'tasks.0.data'; found task"),
        ({"tasks": [TASK], "engin": "vllm"}, "engin: no such key; known: tasks, engine"),
        (
            {"tasks": [TASK], "gpu_memory_utilization": 0.5},
            "gpu_memory_utilization: is for engine vllm",
        ),
        ({"tasks": [{**TASK, "name": ".."}]}, r"tasks.0.name is '..': expected a file's name"),
        ({"tasks": [TASK, TASK]}, "'mmlu' twice; give one of them"),
    ],
)
def test_a_request_that_cannot_be(given, expected):
    with pytest.raises(InputError, match=expected):
        calibeval.score("m", **given)


def test_the_command_line_has_every_option_of_a_request():
    words = ["score", "--task", "mmlu", "--data", "d", "--model", "m", "--out", "r.jsonl"]
    options = vars(__main__.parser().parse_args(words))
    assert set(Request.model_fields) - {"tasks"} <= options.keys()
    assert set(Task.model_fields) - {"name"} <= options.keys()


def test_figures_by_subject(tmp_path):
    """A subject of few questions counts as much as one of many in the mean over subjects."""
    rows = read_lines(write_records(tmp_path / "all.jsonl", n=60))
    for number, row in enumerate(rows):
        row["subject"] = "few" if number < 10 else "many"
    file = write_lines(tmp_path / "r.jsonl", rows)
    found = calibeval.summarize_subjects(file)
    expected = {
        "few": calibeval.summarize(write_lines(tmp_path / "few.jsonl", rows[:10])),
        "many": calibeval.summarize(write_lines(tmp_path / "many.jsonl", rows[10:])),
    }
    for subject, number in (("few", 10), ("many", 50)):
        values = found["subjects"][subject]
        assert values["questions"] == number
        assert list(values) == ["questions", "accuracy", "nll", "brier", "ece_signed"]
        for metric in list(values)[1:]:
            assert values[metric] == pytest.approx(expected[subject]["choices"][metric].value)
    few, many = (found["subjects"][subject]["accuracy"] for subject in ("few", "many"))
    assert found["macro"]["accuracy"] == pytest.approx((few + many) / 2)
    assert few != many
