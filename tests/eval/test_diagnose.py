"""The entropy bound holds, is attained, and needs its √D."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibeval import diagnose
from calibeval.__main__ import main


def entropy(z: np.ndarray) -> float:
    p = np.exp(z - z.max())
    p /= p.sum()
    return float(-(p * np.log(np.maximum(p, 1e-300))).sum())


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 60),
    st.integers(1, 40),
    st.floats(0.01, 8),
    st.integers(0, 10**6),
    st.sampled_from([None, 0.5, 5.0]),
)
def test_no_logits_are_below_the_bound(vocabulary, hidden, scale, seed, softcap):
    rng = np.random.default_rng(seed)
    c = rng.normal(0, scale, (vocabulary, hidden))
    h = rng.normal(0, 1, hidden)
    if seed % 2:  # the worst direction
        h = np.linalg.svd(c)[2][0] * np.linalg.norm(h)
    z = c @ h
    z = softcap * np.tanh(z / softcap) if softcap else z
    sigma_c, sigma_h = np.linalg.norm(c, 2), np.sqrt((h**2).mean())
    bound = diagnose.entropy_bound(sigma_c, sigma_h, hidden, vocabulary)
    assert entropy(z) >= bound - 1e-9


@pytest.mark.parametrize("vocabulary", [3, 10, 1000])
def test_one_logit_above_the_rest_is_the_least_entropy_of_a_norm(vocabulary):
    """Against every two-level pattern of the same norm."""
    high = np.arange(1, vocabulary)
    for radius in np.geomspace(1e-2, 1e2, 30):
        gaps = radius * np.sqrt(vocabulary / (high * (vocabulary - high)))
        rest = (vocabulary - high) * np.exp(-gaps)
        every = np.log(high + rest) + gaps * rest / (high + rest)
        assert diagnose.entropy_bound(radius, 1.0, 1, vocabulary) == pytest.approx(every[0])
        assert every[0] <= every.min() + 1e-12


def test_without_the_root_of_d_it_is_no_bound():
    """The form without √D, σ_h the root mean square of the entries, exceeds a real entropy."""
    vocabulary, hidden = 50, 64
    h = np.ones(hidden)  # σ_h = 1, ‖h‖ = 8
    u = np.full(vocabulary, -1 / np.sqrt(vocabulary * (vocabulary - 1)))
    u[0] = np.sqrt((vocabulary - 1) / vocabulary)
    c = np.outer(u, h / np.linalg.norm(h))  # σ_C = 1
    assert np.linalg.norm(c, 2) == pytest.approx(1)
    observed = entropy(c @ h)
    assert observed == pytest.approx(diagnose.entropy_bound(1.0, 1.0, hidden, vocabulary))
    without = diagnose.entropy_bound(1.0, 1.0 / np.sqrt(hidden), hidden, vocabulary)
    assert observed < 0.5 * without


def test_smoothed_entropy():
    q = np.full(7, 0.2 / 7)
    q[3] += 0.8
    assert diagnose.smoothed_entropy(0.2, 7) == pytest.approx(-(q * np.log(q)).sum())
    assert diagnose.smoothed_entropy(0, 7) == 0
    assert diagnose.smoothed_entropy(1, 7) == pytest.approx(np.log(7))


def run(tiny_model, mmlu, *options) -> list[str]:
    command = ["diagnose", "--model", tiny_model, "--task", "mmlu", "--data", mmlu, *options]
    return [str(c) for c in command]


def test_command(tiny_model, mmlu, capsys):
    assert main(run(tiny_model, mmlu)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["questions"] == 60 and found["hidden"] == 64
    assert found["bound"] <= found["entropy"]["min"] <= found["entropy"]["mean"]
    assert found["sigma_h"] == pytest.approx(1, abs=0.05)  # the last norm's doing
    import torch
    from transformers import AutoModelForCausalLM

    weight = AutoModelForCausalLM.from_pretrained(tiny_model).get_output_embeddings().weight
    norm = torch.linalg.matrix_norm(weight.float(), 2).item()
    assert found["sigma_c"] == pytest.approx(norm, rel=1e-4)
    assert "Smoothing" in found["sentence"]
    log_v = np.log(found["vocabulary"])
    assert found["gap"] == pytest.approx((found["entropy"]["median"] - found["bound"]) / log_v)
    assert found["target_gap"] == pytest.approx((found["target_entropy"] - found["bound"]) / log_v)


def test_hidden_states_are_those_that_answer(tiny_model, mmlu, tmp_path, capsys):
    """σ_h is of the last position's states; unequal gains tell them from another position's."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from calibeval import prompts, tasks

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.model.norm.weight.data = torch.linspace(0, 4, 64)
    model.save_pretrained(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.save_pretrained(tmp_path / "m")
    assert main(run(tmp_path / "m", mmlu, "--limit", "3")) == 0
    found = json.loads(capsys.readouterr().out)
    expected = []
    for subject in tasks.load("mmlu", tasks.Source(str(mmlu), 5)):
        for question in subject.questions[:3]:
            ids = tokenizer(prompts.build(subject, question, 5).text, return_tensors="pt").input_ids
            with torch.no_grad():
                states = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
            expected.append(states[0, -1].square().mean().sqrt().item())
    assert found["sigma_h"] == pytest.approx(np.mean(expected), rel=1e-4)
    assert found["sigma_h_largest"] == pytest.approx(max(expected), rel=1e-4)


@pytest.mark.parametrize(
    ("sigma_c", "median", "words"),
    [
        (1e-3, 5.0, "cannot be expected to help"),
        (100.0, 0.1, "has something to restrain"),
        (100.0, 4.0, "little to restrain"),
    ],
)
def test_sentences(sigma_c, median, words):
    answers = [(1.0, median)] * 10
    found = diagnose.summary(answers, vocabulary=1000, hidden=64, sigma_c=sigma_c)
    sentence = found["sentence"]
    assert words in sentence
    assert ("the bound is vacuous here" in sentence) == (sigma_c == 100)
