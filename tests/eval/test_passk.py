"""The estimate of pass@k, and tables over problems and seeds."""

import json
from itertools import combinations

import numpy as np
import pytest

from calibeval import passk, records
from calibeval.__main__ import main
from calibeval.io import InputError


@pytest.mark.parametrize("n, c", [(5, 0), (5, 2), (5, 5), (7, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, c):
    for k in range(1, n + 1):
        subsets = [*combinations(range(n), k)]
        share = np.mean([any(i < c for i in subset) for subset in subsets])
        assert passk.pass_at_k(n, c, k) == pytest.approx(share)


def write(path, correct, train=None, samples=8):
    rows = [{"id": f"{i}", "samples": samples, "correct": int(c)} for i, c in enumerate(correct)]
    records.write(path, rows, {"train": train or {}})
    return path


def test_tables(tmp_path, capsys):
    rng = np.random.default_rng(0)
    skill = rng.random(60)
    paths = [write(tmp_path / "start", rng.binomial(8, skill))]
    for seed in range(3):
        for name, better in (("a", 0), ("b", 0.2)):
            drawn = rng.binomial(8, np.minimum(skill + better, 1))
            about = {"method": {"name": name, "gamma": 0.0}, "seed": seed, "learning_rate": 0.1}
            paths.append(write(tmp_path / f"{name}{seed}", drawn, about))
    arguments = ["passk", *map(str, paths), "--k", "8", "1", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert (tmp_path / "out" / "passk.md").read_text() == text
    assert (tmp_path / "out" / "passk.svg").stat().st_size
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert [line[2:] for line in lines if line[1:2] == ["seeds"]] == [["pass@1", "pass@8"]]
    rows = {tuple(line[:2]): line[2:] for line in lines if len(line) == 4}
    written = map(json.loads, (tmp_path / "start").read_text().splitlines())
    mean = np.mean([row["correct"] / 8 for row in written])
    assert rows["start", "1"][0].startswith(f"{mean:.3f} [")
    value, low, high = (float(x.strip("[],")) for x in rows["b", "a"][0].split())
    assert 0.05 < low < value < high  # 0.2, less what the ceiling takes
    _, worst, best = (float(x.strip("[],")) for x in rows["a", "3"][0].split())
    assert high - low < best - worst  # problems cancel in the difference


def test_a_difference_is_paired_by_seed(tmp_path):
    rng, paths = np.random.default_rng(1), []
    for seed in range(4):
        skill = np.clip(rng.random(60) + 0.2 * seed - 0.3, 0, 1)
        for name in "ab":
            correct = rng.binomial(64, skill)
            about = {"method": name, "seed": seed}
            paths.append(write(tmp_path / f"{name}{seed}", correct, about, samples=64))
    text = passk.collect(paths, [1])
    (line,) = [line for line in text.splitlines() if line.startswith("| b") and "| a " in line]
    low, high = (float(x.strip("[],|")) for x in line.split()[-3:-1])
    assert low <= 0 <= high and high - low < 0.06  # seeds differ by 0.2 each, their pairs by none


def test_a_certain_figure_has_no_interval_and_others_end_at_1(tmp_path):
    text = passk.collect([write(tmp_path / "a", [8] * 9)], [1])
    assert "| start | 1       | 1.000    |" in text
    paths = [write(tmp_path / f"b{s}", [7] * 8 + [s], {"seed": s}) for s in (0, 7)]
    (line,) = [line for line in passk.collect(paths, [1]).splitlines() if " 2 " in line]
    assert line.split()[-2] == "1.000]"


def test_k_is_what_the_runs_asked_for(tmp_path):
    paths = [write(tmp_path / "start", [1, 2]), write(tmp_path / "a", [1, 2], {"k": [2, 8]})]
    assert "| pass@2 | pass@8 |" in " ".join(passk.collect(paths, None).split())
    assert "pass@1 |" in passk.collect(paths[:1], None).replace("  ", "")


def test_what_cannot_be_compared_is_named(tmp_path):
    a, b = write(tmp_path / "a", [1, 2]), write(tmp_path / "b", [1, 2, 3])
    with pytest.raises(InputError, match="b: other problems than in"):
        passk.collect([a, b], [1])
    with pytest.raises(InputError, match="a, line 1: k = 9, expected 1 to 8"):
        passk.collect([a], [1, 9])
    with pytest.raises(InputError, match="c, line 1: expected id, samples and correct"):
        passk.collect([write(tmp_path / "c", [9])], [1])
    a.write_text(a.read_text().splitlines()[0] + "\n")
    with pytest.raises(InputError, match="1 problem, not what was written"):
        passk.collect([a], [1])
