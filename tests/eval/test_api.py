"""From Python: what the commands do, of a folder and of a model in memory."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import calibeval
from calibeval import records, scoring
from calibeval.io import InputError
from calibeval.request import Task


@pytest.fixture
def tasks(mmlu):
    """Letters and texts of the same questions, under names of their own."""
    letters = {"task": "mmlu", "data": str(mmlu), "limit": 7}
    texts = Task(task="mmlu", data=str(mmlu), name="texts", scoring="continuation", limit=7)
    return [letters, texts]


@pytest.fixture
def loaded(tiny_model):
    return [auto.from_pretrained(tiny_model) for auto in (AutoModelForCausalLM, AutoTokenizer)]


def test_a_model_in_memory_is_scored_as_the_saved_one(
    tasks, loaded, tiny_model, mmlu, tmp_path, run
):
    """Byte for byte but for the model's name."""
    with pytest.raises(InputError, match="engine vllm: loads a folder"):
        calibeval.score(*loaded, tasks, engine="vllm")
    loaded[0].train().lm_head.eval()
    modes = [module.training for module in loaded[0].modules()]
    made = calibeval.score(*loaded, tasks, out=tmp_path / "api")
    assert modes == [m.training for m in loaded[0].modules()] and list(made) == ["mmlu", "texts"]
    common = ["score", "--model", tiny_model, "--task", "mmlu", "--data", mmlu, "--limit", "7"]
    for key, more in (("mmlu", []), ("texts", ["--scoring", "continuation"])):
        api, out = tmp_path / "api" / f"{key}.jsonl", tmp_path / f"{key}.jsonl"
        run(*common, *more, "--out", out)
        name = json.dumps(str(tiny_model))
        assert api.read_text().replace('"a LlamaForCausalLM"', name) == out.read_text()
        found = calibeval.score(loaded[0], tasks=tasks)[key]  # to no file, with its own tokenizer
        assert np.array_equal(found.logprobs, made[key].logprobs) and found.ids == made[key].ids


def test_a_folder_is_loaded_once_and_only_for_what_is_missing(
    tasks, tiny_model, tmp_path, monkeypatch
):
    loads, plain = [], scoring._engine
    monkeypatch.setattr(scoring, "_engine", lambda *given: loads.append(given) or plain(*given))
    first = calibeval.score(tiny_model, tasks=tasks[:1], out=tmp_path)
    both = calibeval.score(tiny_model, tasks=tasks, out=tmp_path)
    again = calibeval.score(str(tiny_model), tasks=tasks, out=tmp_path)
    assert len(loads) == 2 and first["mmlu"].ids == both["mmlu"].ids == again["mmlu"].ids
    assert len(again["texts"]) == 14


def test_other_weights_in_memory_are_scored_anew(tasks, loaded, tmp_path, monkeypatch):
    """Nobody knows what the records of a model without a folder are of; they stay until then."""
    before = calibeval.score(*loaded, tasks[:1], out=tmp_path)["mmlu"]
    with torch.no_grad():
        loaded[0].lm_head.weight += 0.1 * torch.rand_like(loaded[0].lm_head.weight)
    with monkeypatch.context() as patched, pytest.raises(TypeError):
        patched.setattr(scoring, "record", None)
        calibeval.score(*loaded, tasks[:1], out=tmp_path)
    assert np.array_equal(records.read(before.path).logprobs, before.logprobs)
    after = calibeval.score(*loaded, tasks[:1], out=tmp_path)["mmlu"]
    assert not np.array_equal(before.logprobs, after.logprobs)
    monkeypatch.setattr(scoring, "_engine", None)  # said before any task is asked
    (tmp_path / "texts.jsonl").write_text("the user's")
    with pytest.raises(InputError, match="no sidecar says how it was made"):
        calibeval.score(*loaded, tasks, out=tmp_path)


def test_figures_are_the_commands(tasks, tiny_model, tmp_path, run):
    a = calibeval.score(tiny_model, tasks=tasks[:1], out=tmp_path / "a")["mmlu"]
    b = calibeval.score(tiny_model, tasks=[tasks[0] | {"shots": 2}], out=tmp_path / "b")["mmlu"]
    paths = [str(tmp_path / name / "mmlu.jsonl") for name in "ab"]
    said = json.loads(run("metrics", "--json", paths[0]).out)["metrics"]
    for source in (a, paths[0]):
        for confidence, of in calibeval.metrics(source).items():
            assert {m: e.as_dict() for m, e in of.items()} == said[confidence]
    said = json.loads(run("compare", "--json", "--different-prompts", *paths).out)["comparison"]
    assert calibeval.compare(a, b, different_prompts=True) == said
    drawn = calibeval.reliability(a)
    assert sum(drawn["count"]) == len(a)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tasks": [{"task": "mmlu"}]}, "no 'tasks.0.data'; found task"),
        ({"engin": "vllm"}, "engin: no such key; known: tasks, engine"),
        ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization: is for engine vllm"),
        ({"tasks": [{"task": "mmlu", "data": "d"}] * 2}, "'mmlu' twice; give one of them"),
    ],
)
def test_a_request_that_cannot_be(options, expected):
    with pytest.raises(InputError, match=expected):
        calibeval.score("m", **({"tasks": [{"task": "mmlu", "data": "d"}]} | options))
