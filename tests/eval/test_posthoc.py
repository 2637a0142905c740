"""Post-hoc calibrators: what they fit, what they leave alone, what they refuse."""

import json
import math

import numpy as np
import pytest
import torch

from calibeval.__main__ import main
from calibeval.posthoc import HEADS, Calibrator, fit
from calibeval.posthoc.calibrator import CONFIG, WEIGHTS, Settings
from calibeval.posthoc.fit import Answers, objective, pad_left, selective_smoothing, temperatures


def drawn(n: int, sharpness: torch.Tensor, seed: int = 0) -> Answers:
    """N answers of four choices: right with the probabilities p, claimed as p^sharpness."""
    rng = torch.Generator().manual_seed(seed)
    honest = 1.5 * torch.randn(n, 4, generator=rng)
    labels = torch.multinomial(honest.softmax(-1), 1, generator=rng).squeeze(1)
    hidden = torch.stack([sharpness, torch.randn(n, generator=rng), honest[:, 0]], 1)
    return Answers(list(hidden[:, None]), honest * sharpness[:, None], labels)


def ece(answers: Answers, calibrator: Calibrator | None = None) -> float:
    """ECE among the choices."""
    logits = answers.logits
    if calibrator is not None:
        with torch.no_grad():
            logits = logits / temperatures(calibrator, answers)[:, None]
    confidence, choice = logits.softmax(-1).max(-1)
    order = np.argsort(confidence.numpy(), kind="stable")
    right = (choice == answers.labels).numpy().astype(float)
    return float(expected(confidence.double().numpy()[order], right[order]))


def expected(confidence: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    """ECE by its definition."""
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    inside = [place == b for b in range(bins)]
    return sum(abs((right - confidence)[i].sum()) for i in inside) / len(right)


def test_temperature_scaling_finds_the_temperature():
    answers = drawn(20_000, torch.full((20_000,), 3.0))
    calibrator, report = fit(answers, "constant")
    assert report["temperature"] == pytest.approx(3, rel=0.05)
    assert torch.allclose(temperatures(calibrator, answers), torch.tensor(report["temperature"]))
    grid = [
        torch.nn.functional.cross_entropy(answers.logits / t, answers.labels).item()
        for t in np.linspace(1, 6, 101)
    ]
    before, after = report["nll"]
    assert after <= min(grid) + 1e-6 < before
    assert ece(answers, calibrator) < 0.02 < 0.1 < ece(answers)


def test_selective_smoothing_is_its_formula():
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.0, 0.0]])
    labels = torch.tensor([0, 0])  # the first is right, the second wrong
    total = math.exp(2) + 1 + math.exp(-1)
    sure = math.log(total) - 2
    other = math.exp(0.5) + math.e + 1
    unsure = math.log(other) - (0.5 + 1.0 + 0.0) / 3
    for alpha in (0.0, 0.3, 1.0):
        found = selective_smoothing(logits, labels, alpha).item()
        assert found == pytest.approx(((1 - alpha) * sure + alpha * unsure) / 2, rel=1e-6)


@pytest.mark.parametrize("head", ["linear", "mlp", "transformer"])
def test_a_head_finds_where_the_model_overclaims(head):
    torch.manual_seed(0)
    sharpness = torch.where(torch.rand(4000) < 0.5, 1.0, 5.0)
    answers, fresh = drawn(4000, sharpness), drawn(4000, sharpness, seed=1)
    wide = torch.randn(3, 16)
    answers, fresh = (
        Answers([h @ wide for h in a.hidden], a.logits, a.labels) for a in (answers, fresh)
    )
    adaptive, report = fit(answers, head)
    assert report["held_out_loss"][1] < report["held_out_loss"][0]
    tau = temperatures(adaptive, fresh).detach()
    assert tau[sharpness == 5].median() > 2 * tau[sharpness == 1].median()
    constant, _ = fit(answers, "constant")
    assert objective(adaptive, fresh, 0.5) < objective(constant, fresh, 0.5)
    assert ece(fresh, adaptive) < 0.7 * ece(fresh)


def test_the_layer_is_attention_with_one_query():
    """Against torch's layer with the same weights, whose keys' bias changes nothing."""
    from calibeval.posthoc.calibrator import LastOfLayer

    torch.manual_seed(0)
    layer = LastOfLayer(64)
    peer = torch.nn.MultiheadAttention(64, layer.heads, batch_first=True)
    with torch.no_grad():
        peer.in_proj_weight.copy_(
            torch.cat([layer.query.weight, layer.key.weight, layer.value.weight])
        )
        peer.in_proj_bias.copy_(torch.cat([layer.query.bias, torch.randn(64), layer.value.bias]))
        peer.out_proj.load_state_dict(layer.mix.state_dict())
    hidden, lengths = torch.randn(3, 9, 64), torch.tensor([9, 4, 1])
    padding = torch.arange(9) < 9 - lengths[:, None]
    seen, _ = peer(hidden[:, -1:], hidden, hidden, key_padding_mask=padding)
    found = hidden[:, -1] + seen[:, 0]
    expected = found + layer.mlp(found)
    assert layer.heads == 4 and torch.allclose(layer(hidden, lengths), expected, atol=1e-5)


def test_fitting_is_a_function_of_its_input():
    answers = drawn(300, torch.full((300,), 2.0))
    one, two = (fit(answers, "mlp")[0].state_dict() for _ in range(2))
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("head", HEADS)
def test_padding_changes_no_temperature(head):
    torch.manual_seed(0)
    calibrator = Calibrator(Settings(head, 32)).eval()
    torch.nn.init.normal_(calibrator.out.weight)
    sequences = [torch.randn(length, 32) for length in (5, 1, 9)]
    together = calibrator(*pad_left(sequences))
    alone = torch.cat([calibrator(sequence[None]) for sequence in sequences])
    assert torch.allclose(together, alone, atol=1e-5)
    if head == "transformer":
        changed = sequences[2].clone()
        changed[0] = -changed[0]
        assert not torch.allclose(calibrator(changed[None]), alone[2:], atol=1e-4)


@pytest.mark.parametrize("head", HEADS)
def test_saved_and_loaded(head, tmp_path):
    torch.manual_seed(0)
    calibrator = Calibrator(Settings(head, 16, "vocabulary")).eval()
    torch.nn.init.normal_(calibrator.out.weight)
    calibrator.save_pretrained(tmp_path, {"answers": 40})
    loaded = Calibrator.from_pretrained(tmp_path)
    hidden = torch.randn(3, 4, 16)
    assert (
        torch.equal(loaded(hidden), calibrator(hidden)) and loaded.settings == calibrator.settings
    )
    assert json.loads((tmp_path / CONFIG).read_text())["fitted"] == {"answers": 40}


@pytest.fixture
def val(mmlu, table, write_rows):
    """The two subjects with questions to fit on."""
    for subject in ("old_kings", "light"):
        write_rows(mmlu / "val" / f"{subject}_val.csv", table(25))
    return mmlu


def run(*command) -> int:
    return main([str(part) for part in command])


def scored(model, data, out, *options) -> list[dict]:
    command = ["score", "--model", model, "--task", "mmlu", "--data", data, "--out", out]
    assert run(*command, *options) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("over", ["choices", "vocabulary"])
@pytest.mark.parametrize("head", HEADS)
def test_accuracy_is_the_same_to_the_last_question(val, tiny_model, tmp_path, head, over):
    kind = ["fit-temperature"] if head == "constant" else ["fit-ats", "--head", head]
    common = ["--model", tiny_model, "--task", "mmlu", "--data", val, "--over", over]
    weights = (tiny_model / "model.safetensors").read_bytes()
    assert run(*kind, *common, "--out", tmp_path / "c") == 0
    assert (tiny_model / "model.safetensors").read_bytes() == weights
    plain = scored(tiny_model, val, tmp_path / "plain.jsonl")
    with_it = scored(tiny_model, val, tmp_path / "with.jsonl", "--calibrator", tmp_path / "c")
    for before, after in zip(plain, with_it, strict=True):
        assert np.argsort(before["logprobs"]).tolist() == np.argsort(after["logprobs"]).tolist()
        # Dividing all logits by τ divides every difference between two of them by τ.
        ratios = np.diff(before["logprobs"]) / np.diff(after["logprobs"])
        assert ratios == pytest.approx(np.full(3, ratios[0]), rel=1e-6) and ratios[0] > 0
        assert sum(map(math.exp, after["logprobs"])) == pytest.approx(after["letter_mass"])
        if head == "constant":
            fitted = json.loads((tmp_path / "c" / CONFIG).read_text())["fitted"]
            assert ratios[0] == pytest.approx(fitted["temperature"], rel=1e-5)
    assert any(b["logprobs"] != a["logprobs"] for b, a in zip(plain, with_it, strict=True))


def test_records_of_another_calibrator_are_not_reused(val, tiny_model, tmp_path, capsys):
    common = ["--model", tiny_model, "--task", "mmlu", "--data", val]
    assert run("fit-temperature", *common, "--out", tmp_path / "c") == 0
    out = tmp_path / "r.jsonl"
    scored(tiny_model, val, out)
    assert run("score", *common, "--out", out, "--calibrator", tmp_path / "c") == 2
    assert "calibrator_sha256" in capsys.readouterr().err


def test_bad_input_is_one_message(val, tiny_model, tmp_path, capsys):
    common = ["--model", tiny_model, "--task", "mmlu", "--data", val]

    def refused(*command) -> str:
        assert run(*command) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert lines[-1].startswith("error: ")
        return lines[-1]

    fit_it = ["fit-temperature", *common, "--out", tmp_path / "c"]
    assert "do not test it" in refused(*fit_it, "--split", "test")
    assert "expected 20 or more" in refused(*fit_it, "--limit", "5")
    ats = ["fit-ats", *common, "--out", tmp_path / "c", "--alpha", "2"]
    assert "alpha is 2.0, expected 0 to 1" in refused(*ats)
    score = ["score", *common, "--out", tmp_path / "r.jsonl", "--calibrator"]
    assert f"no {CONFIG}" in refused(*score, tmp_path / "nothing")
    assert "needs --engine transformers" in refused(*score, tmp_path / "c", "--engine", "vllm")
    Calibrator(Settings("linear", 8)).save_pretrained(tmp_path / "other", {})
    assert "have 64 features, the calibrator was fitted on 8" in refused(*score, tmp_path / "other")
    whole = (tmp_path / "other" / WEIGHTS).read_bytes()
    (tmp_path / "other" / WEIGHTS).write_bytes(whole[:-5])
    assert "not a whole calibrator" in refused(*score, tmp_path / "other")
    (tmp_path / "other" / CONFIG).write_text(
        '{"head": "cubic", "hidden_size": 8, "over": "choices"}'
    )
    assert "head is 'cubic'" in refused(*score, tmp_path / "other")
