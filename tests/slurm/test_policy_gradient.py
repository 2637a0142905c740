"""The policy-gradient trainer: its gradient against closed forms, its runs from launch to table."""

import signal
from itertools import chain

import pytest
import torch
import yaml
from real import prepare

from calibeval import passk
from countdown import __main__ as world
from smoothce import linear_cross_entropy, token_statistics
from sweeps import children
from sweeps.backends.policy_gradient import Method
from sweeps.cli import main
from sweeps.files import read_rows
from sweeps.plan import plan
from sweeps.rundir import RunDir
from sweeps.supervise import Outcome, train
from sweeps.trainer.countdown import Problem, expressions, read, value
from sweeps.trainer.policy_gradient import advantages, answer_losses

WEIGHTS = "model.safetensors"
PLAIN = Method(name="grpo")
COUNTS = torch.tensor([1, 6, 2, 4, 3])  # of five answers, as often as they are likely
RIGHT = torch.tensor([True, True, True, False, False])


def losses(theta, answers, method, log_old, anchor):
    """Of answers of one token to one problem, by the trainer's own functions on the fused loss."""
    given = torch.ones(len(answers), 1, 1, dtype=theta.dtype), theta[:, None], answers[:, None]
    nll, entropy = linear_cross_entropy(*given, reduction="none"), token_statistics(*given).entropy
    found = advantages(RIGHT[answers][None], log_old[answers][None], anchor[answers][None], method)
    return answer_losses(nll, entropy, found[0], method)


def expected(theta, *arguments):
    """The gradient over answers drawn from the policy itself, exactly."""
    each = losses(theta, torch.arange(len(theta)), *arguments)
    return torch.autograd.grad((theta.softmax(0).detach() * each).sum(), theta)[0]


def ascend(method, log_start, b, old=None):
    """Log-probabilities where the gradient is 0; π_old is `old`, or the policy itself."""
    theta = log_start.clone().requires_grad_()
    for _ in range(200):
        log_pi = theta.detach().log_softmax(0)
        anchor = b * (log_pi - log_start)
        gradient = expected(theta, method, log_pi if old is None else old, anchor)
        with torch.no_grad():
            theta -= gradient / log_pi.exp()  # as Fisher's information scales it
    assert gradient.abs().max() < 1e-9
    return theta.detach().log_softmax(0)


def test_plain_policy_gradient_sharpens_as_its_flow_says():
    """d log(π_i/π_j)/dt = (π_i − π_j)(1 − J) of right answers i, j, over GRPO's deviation."""
    pi = COUNTS / COUNTS.sum()
    theta = pi.double().log().requires_grad_()
    drawn = torch.arange(5).repeat_interleave(COUNTS)  # a group that is the distribution itself
    losses(theta, drawn, PLAIN, theta.detach().log_softmax(0), torch.zeros(5)).mean().backward()
    flow, r = -theta.grad, RIGHT[drawn].double()
    for i, j in ((0, 1), (1, 2), (0, 2)):
        exact = (pi[i] - pi[j]) * (1 - r.mean()) / (r.std() + 1e-4)
        assert (flow[i] - flow[j]).item() == pytest.approx(exact.item(), abs=1e-6)


@pytest.mark.parametrize("gamma_p, gamma_n", [(0.2, 0.3), (0.5, 0.5), (0.5, 0.0)])
def test_optimum_under_an_anchor(gamma_p, gamma_n):
    """π ∝ π_b^(1 − γ_p/b) on right answers, π_b^(1 + γ_n/b) on wrong ones, with γ of log π_b."""
    b, log_b = 0.5, (COUNTS / COUNTS.sum()).double().log()
    method = Method(name="differential", gamma_p=gamma_p, gamma_n=gamma_n)
    found = ascend(method, log_b, b, log_b)
    for which, power in ((RIGHT, 1 - gamma_p / b), (~RIGHT, 1 + gamma_n / b)):
        exact = (power * log_b[which]).log_softmax(0)
        assert torch.allclose(found[which].log_softmax(0), exact, atol=1e-6, rtol=0)


def test_optimum_under_an_anchor_on_policy():
    """With γ of the policy's own log π, as it trains, the powers are b/(b + γ_p), b/(b − γ_n)."""
    b, log_b = 0.5, (COUNTS / COUNTS.sum()).double().log()
    found = ascend(Method(name="differential", gamma_p=0.2, gamma_n=0.1), log_b, b)
    for which, power in ((RIGHT, b / (b + 0.2)), (~RIGHT, b / (b - 0.1))):
        exact = (power * log_b[which]).log_softmax(0)
        assert torch.allclose(found[which].log_softmax(0), exact, atol=1e-6, rtol=0)


def test_entropy_bonus_is_the_entropys_gradient():
    theta = (COUNTS / COUNTS.sum()).double().log().requires_grad_()
    log_pi = theta.detach().log_softmax(0)
    bonus = Method(name="entropy", bonus=0.3)
    found = expected(theta, bonus, log_pi, 0 * log_pi) - expected(theta, PLAIN, log_pi, 0 * log_pi)
    entropy = torch.special.entr(theta.softmax(0)).sum()
    (exact,) = torch.autograd.grad(-0.3 * entropy, theta)
    assert torch.allclose(found, exact, atol=1e-12)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """`python -m countdown` in small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("countdown"))
        patch.setattr(world, "LARGEST", 6)
        patch.setattr(world, "STEPS", 150)
        patch.setattr(world, "SIZES", {"train": 64, "validation": 8, "test": 8})
        patch.setattr(world, "SAMPLES", 4)
        world.main()
        yield world.ROOT.absolute()


@pytest.fixture
def sweep(small, tmp_path):
    """sweep(grid, **keys of train) → the file of a sweep."""

    def make(grid=None, **train):
        keys = {f"{name}_file": str(small / f"{name}.jsonl") for name in ("train", "test")}
        keys |= {"model_name_or_path": str(small / "start"), "learning_rate": 1e-3, "samples": 4}
        keys |= {"max_train_steps": 4, "problems_per_step": 4, "answers_per_problem": 4}
        keys |= {"k": [1, 4], "logging_steps": 1, "method": {"name": "grpo"}} | train
        keys = {key: of for key, of in keys.items() if key not in (grid or {})}
        raw = {"name": "small", "output_root": str(tmp_path / "out"), "workers": 2}
        raw |= {"backend": "policy-gradient", "grid": grid or {"seed": [0]}, "train": keys}
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump(raw))
        return path

    return make


def test_the_world(small):
    solved = world.problems()
    assert all(p.solved_by(answer) for p in solved for answer in solved[p])
    sets = [read(small / f"{name}.jsonl") for name in world.SIZES]
    assert [*map(len, sets)] == [64, 8, 8] == [64, 8, len({*chain(*sets)}) - 72]
    assert {*chain(*sets)} <= {*solved}


@pytest.mark.parametrize(
    "answer, right",
    [
        ("3 7 * 12 +", True),
        ("12 3 7 * +", True),
        ("3 7 + 12 +", False),  # 22
        ("33", False),
        ("3 7 *", False),
        ("3 7 * 12", False),  # two values are left
        ("3 7 * 12 + +", False),
        ("3 3 7 * 12 + + 3 -", False),  # a number twice
        ("03 7 * 12 +", False),
        ("", False),
        ("= 3 7", False),
    ],
)
def test_checker(answer, right):
    assert Problem((3, 7, 12), 33).solved_by(answer) is right


def test_checker_is_exact():
    assert value(["1", "49", "/", "49", "*"]) == 1  # in floats 0.9999999999999999
    assert value(["1", "0", "/"]) is None
    assert len([*expressions((1, 2, 3))]) == len({*expressions((1, 2, 3))}) == 192


def test_from_launch_to_table(sweep, small):
    method = {"name": "differential", "gamma_p": 0.1, "gamma_n": 0.1}
    grid = {"method": [{"name": "entropy", "bonus": 0.1}, method], "seed": [0, 1]}
    path = sweep(grid, kl_weight=0.1)
    assert main(["launch", str(path), "--executor", "local"]) == 0
    runs = [RunDir(cell.folder) for cell in plan(path, []).cells]
    assert all(run.done for run in runs)
    rows = [row for row in read_rows(runs[0].metrics) if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["entropy"] > 0 > rows[0]["log_probability"] and rows[0]["grad_norm"] > 0
    records = [small / "start" / "passk.jsonl", *(run.scores / "passk.jsonl" for run in runs)]
    text = passk.collect(records, [1, 4])
    for name in ("start", "entropy, bonus 0.1", "differential, gamma_p 0.1, gamma_n 0.1"):
        assert f"| {name} " in text
    assert "8 problems" in text


def test_rewards_rise(sweep, small, tmp_path):
    """Trained for real: what is rewarded is drawn more often."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join((small / "train.jsonl").read_text().splitlines(keepends=True)[:8]))
    keys = {"max_train_steps": 40, "problems_per_step": 16, "answers_per_problem": 8}
    run = prepare(sweep(train_file=str(few), learning_rate=6e-4, **keys))
    assert train(run) is Outcome.DONE
    rewards = [row["reward"] for row in read_rows(run.metrics) if "reward" in row]
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 1


def test_killed_and_resumed_ends_with_the_same_weights(sweep, tmp_path):
    method = {"name": "entropy", "bonus": 0.1}
    path = sweep(max_train_steps=40, checkpointing_steps=3, method=method, kl_weight=0.1)
    victims, ends = [], []

    def begin(program, log):
        child = children.start_cold(program, log)
        while len(ends) == 1 and not victims and child.wait(0.01) is None:
            if run.step() >= 3:
                victims.append(child.pid)
                child.signal(signal.SIGKILL)
        return child

    for name in ("whole", "killed"):
        run = prepare(path, f"output_root={tmp_path / name}")
        assert train(run, start=begin) is Outcome.DONE
        steps = [row["step"] for row in read_rows(run.metrics) if "reward" in row]
        assert steps == [*range(1, 41)]
        ends.append([f.read_bytes() for f in (run.model / WEIGHTS, run.scores / "passk.jsonl")])
    assert victims and run.manifest()["restarts"] == 1
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "change, said",
    [
        ("train.method={name: differential, gamma_p: -0.1}", "gamma_p: found -0.1, expected"),
        ("train.method={name: ppo}", "'grpo', 'entropy' or 'differential'"),
        ("train.method={name: grpo, gamma_n: 0.1}", "nothing else with grpo"),
        ("train.method={name: entropy}", "only bonus above 0 with entropy"),
        ("train.label_smoothing=0.1", "train.label_smoothing: found 0.1"),
        (
            "train.k=[1, 5]",
            "train.k: found [1, 5], expected whole numbers from 1 to 4, the samples",
        ),
        ("train.train_file=absent.jsonl", "train.train_file: absent.jsonl: "),
        ("world.mixed_precision=bf16", "world: one process is expected, without mixed precision"),
    ],
)
def test_bad_input_is_named_before_anything_trains(sweep, tmp_path, capsys, change, said):
    assert main(["launch", str(sweep()), "--executor", "local", change]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_problems_are_checked(sweep, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    for wrong in ('{"numbers": [1, 2.5], "target": 6}', '{"numbers": [1, 2]}', '{"numbers": 6}'):
        bad.write_text('{"numbers": [1, 2, 3], "target": 6}\n' + wrong)
        assert main(["launch", str(sweep(test_file=str(bad))), "--executor", "local"]) == 2
        assert "train.test_file: " in (said := capsys.readouterr().err)
        assert "bad.jsonl, line 2: found" in said
    assert not (tmp_path / "out").exists()
