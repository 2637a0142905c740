"""CountDown: gradients against closed forms, the checker, pass@k, and the study in small."""

import json
from itertools import chain

import pytest
import torch
from studies.countdown import __main__ as study
from studies.countdown import problems
from studies.countdown.policy import Method, advantages, answer_losses
from studies.countdown.problems import Problem, expressions, value

from smoothce import linear_cross_entropy, token_statistics

COUNTS = torch.tensor([1, 6, 2, 4, 3])  # of five answers, as often as they are likely
RIGHT = torch.tensor([True, True, True, False, False])


def losses(theta, answers, method):
    """Of answers of one token to one problem, by the study's own functions on the fused loss."""
    given = torch.ones(len(answers), 1, 1, dtype=theta.dtype), theta[:, None], answers[:, None]
    nll, entropy = linear_cross_entropy(*given, reduction="none"), token_statistics(*given).entropy
    log_pi = theta.detach().log_softmax(0)[answers]
    found = advantages(RIGHT[answers][None], log_pi[None], method)
    return answer_losses(nll, entropy, found[0], method)


def test_plain_policy_gradient_sharpens_as_its_flow_says():
    """d log(π_i/π_j)/dt = (π_i − π_j)(1 − J) of right answers i, j, over GRPO's deviation."""
    pi = COUNTS / COUNTS.sum()
    theta = pi.double().log().requires_grad_()
    drawn = torch.arange(5).repeat_interleave(COUNTS)  # a group that is the distribution itself
    losses(theta, drawn, Method()).mean().backward()
    flow, r = -theta.grad, RIGHT[drawn].double()
    for i, j in ((0, 1), (1, 2), (0, 2)):
        exact = (pi[i] - pi[j]) * (1 - r.mean()) / (r.std() + 1e-4)
        assert (flow[i] - flow[j]).item() == pytest.approx(exact.item(), abs=1e-6)


@pytest.mark.parametrize("gamma_p, gamma_n, bonus", [(0.2, 0.3, 0), (0.0, 1.0, 0), (0, 0, 0.3)])
def test_what_is_added_to_grpo_is_an_entropys_gradient(gamma_p, gamma_n, bonus):
    """Of γ_p Σ π log π − π over right answers, less γ_n times that over wrong ones, less the
    entropy bonus: exactly, over answers drawn from the policy itself."""
    theta = (COUNTS / COUNTS.sum()).double().log().requires_grad_()
    method = Method(gamma_p=gamma_p, gamma_n=gamma_n, bonus=bonus)
    each = [losses(theta, torch.arange(5), one) for one in (method, Method())]
    mean = (theta.softmax(0).detach() * (each[0] - each[1])).sum()
    (found,) = torch.autograd.grad(mean, theta)
    pi = theta.softmax(0)
    added = torch.where(RIGHT, gamma_p, -gamma_n) * (pi * pi.log() - pi)
    (exact,) = torch.autograd.grad((added - bonus * torch.special.entr(pi)).sum(), theta)
    assert torch.allclose(found, exact, atol=1e-12)


def test_checker():
    wrong = ("3 7 + 12 +", "33", "3 7 * 12", "3 3 7 * 12 + + 3 -", "03 7 * 12 +", "")
    assert Problem((3, 7, 12), 33).solved_by("3 7 * 12 +")
    assert not any(Problem((3, 7, 12), 33).solved_by(answer) for answer in wrong)
    assert value(["1", "49", "/", "49", "*"]) == 1  # in floats 0.9999999999999999
    assert value(["1", "0", "/"]) is None
    assert len([*expressions((1, 2, 3))]) == len({*expressions((1, 2, 3))}) == 192


@pytest.fixture
def run(small, monkeypatch):
    """The study of a small world."""
    monkeypatch.setattr(problems, "LARGEST", 6)
    monkeypatch.setattr(problems, "SIZES", {"train": 8, "validation": 8, "test": 8})
    monkeypatch.setattr(study, "STEPS", 150)
    keys = {"samples": 4, "seeds": [0], "learning_rate": 6e-4, "steps": 40}
    keys["answers_per_problem"] = 8
    keys["settings"] = {"GRPO": {}, "α": {"bonus": 0.1, "gamma_p": 0.1}}
    threads = torch.get_num_threads()
    yield lambda **more: small(study, **keys | more)
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_from_nothing_to_the_tables(run, tmp_path, capsys):
    """Rewards rise, and what is finished is kept; what is not comes again to the same answers."""
    assert run() == 0
    said = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in said.splitlines()]
    assert all(row in rows for row in (["start", "1"], ["GRPO", "1"], ["α", "1"]))
    runs = {path: json.loads(path.read_text()) for path in (tmp_path / "out" / "runs").iterdir()}
    assert len(runs) == 3
    again = next(path for path, of in runs.items() if of["method"] == Method().model_dump())
    rewards = runs[again]["rewards"]
    assert sum(rewards[-10:]) > 2 * sum(rewards[:10])
    again.unlink()
    stamps = {path: path.stat().st_mtime_ns for path in runs if path != again}
    assert run() == 0
    assert capsys.readouterr().out == said and json.loads(again.read_text()) == runs[again]
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}
    solved = problems.problems()
    assert all(problem.solved_by(answer) for problem in solved for answer in solved[problem])
    pools = problems.split(solved)
    assert len({*chain(*pools.values())}) == sum(map(len, pools.values())) == len(solved)
