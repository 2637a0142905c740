"""k-best labelings against enumeration, and their sets against what a hidden Markov model knows."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_labelings import LABELS, draw, made, rows
from made_records import write_records

from calibeval import conformal, records, sequences
from calibeval.__main__ import main

SETS = ("lac", "cumulative", "rank")


def enumerated(emissions, transitions):
    """Every possible labeling and its log-probability, best first."""
    length, labels = emissions.shape
    paths = np.array(list(itertools.product(range(labels), repeat=length)))
    scores = emissions[np.arange(length), paths].sum(1)
    scores = scores + transitions[paths[:, :-1], paths[:, 1:]].sum(1)
    kept = np.flatnonzero(np.isfinite(scores))
    kept = kept[np.argsort(-scores[kept], kind="stable")]
    return paths[kept], scores[kept] - np.logaddexp.reduce(scores[kept])


finite = st.floats(-5, 5, allow_nan=False, width=32)


@st.composite
def chains(draw):
    length, labels = draw(st.integers(1, 6)), draw(st.integers(2, 4))
    entry = st.one_of(finite, st.just(-np.inf))
    emissions = [[draw(finite) for _ in range(labels)] for _ in range(length)]
    transitions = [[draw(entry) for _ in range(labels)] for _ in range(labels)]
    return np.array(emissions), np.array(transitions)


@settings(max_examples=150, deadline=None)
@given(chains(), st.integers(1, 60))
def test_k_best_is_the_head_of_all_labelings(chain, k):
    paths, exact = enumerated(*chain)
    if not len(paths):
        return
    found, logprobs = sequences.k_best(*chain, k)
    assert len(found) == len(logprobs) == min(k, len(paths))
    np.testing.assert_allclose(logprobs, exact[:k], atol=1e-9)
    known = dict(zip(map(tuple, paths), exact, strict=True))
    assert len({*map(tuple, found)}) == len(found)
    for path, logprob in zip(found, logprobs, strict=True):  # of equal ones any may come first
        assert logprob == pytest.approx(known[tuple(path)], abs=1e-9)


@pytest.mark.parametrize("length", [1, 4, 6])
def test_k_best_of_the_hmm(length):
    _, emissions, transitions = draw(np.random.default_rng(length), length)
    paths, exact = enumerated(emissions, transitions)
    found, logprobs = sequences.k_best(emissions, transitions, 5**length)
    assert (found == paths).all()
    np.testing.assert_allclose(logprobs, exact, atol=1e-12)
    assert np.exp(logprobs).sum() == pytest.approx(1)
    single = sequences.k_best(emissions.astype("f"), transitions.astype("f"), 3)
    np.testing.assert_allclose(single[1], exact[:3], atol=1e-5)
    assert single[1].dtype == float and single[1].max() < 1e-12  # as records ask


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ("O B-A I-A O B-B", {(1, 3, "A"), (4, 5, "B")}),
        ("I-A I-A B-A I-B", {(0, 2, "A"), (2, 3, "A"), (3, 4, "B")}),  # IOB1
        ("S-A B-A I-A E-A S-A", {(0, 1, "A"), (1, 4, "A"), (4, 5, "A")}),  # BIOES
        ("NN VBZ PRP-X O", set()),
    ],
)
def test_entities(labels, found):
    assert sequences.entities(labels.split()) == found


@given(st.lists(st.sampled_from(LABELS), max_size=8))
def test_entities_do_not_overlap_and_hold_every_label(labels):
    inside = [i for start, end, _ in sequences.entities(labels) for i in range(start, end)]
    assert sorted(inside) == [i for i, label in enumerate(labels) if label != "O"]


def expected(n, alpha=0.1):
    """Mean coverage without ties: that of the ⌈(n + 1)(1 − α)⌉-th of n scores."""
    return int(np.ceil((n + 1) * (1 - alpha) - 1e-9)) / (n + 1)


@pytest.fixture(scope="module", params=[1.0, 2.0], ids=["calibrated", "sharpened"])
def draws(request, tmp_path_factory):
    """100 independent pairs of files: 99 sentences that calibrate, 100 that test."""
    of = made(tmp_path_factory.mktemp("draws") / "a.jsonl", 19_900, 1, sharpness=request.param)
    order = np.arange(len(of)).reshape(100, 199)
    return of, order[:, :99], order[:, 99:]


@pytest.mark.parametrize("score", SETS)
def test_sets_of_labelings_hold_their_level(draws, score):
    """Mean coverage over draws within 3 standard errors; of ranks, which tie, not below."""
    of, known, rest = draws
    scores, places, _ = conformal.prepare(of, score, None, 0, 0)
    right = scores[np.arange(len(of)), places]
    limit = np.array([conformal.threshold(right[at], 0.1) for at in known])
    covered = (right[rest] <= limit[:, None]).mean(1)
    error = covered.std(ddof=1) / 10
    assert covered.mean() > expected(99) - 3 * error
    if score != "rank":
        assert covered.mean() < expected(99) + 3 * error


def test_a_right_labeling_that_is_not_listed_is_in_no_bounded_set(tmp_path):
    of = made(tmp_path / "a.jsonl", 50, k=3)
    lines = [json.loads(line) for line in of.path.read_text().splitlines()]
    absent = [i for i, row in enumerate(lines) if row["gold"] not in row["labelings"]]
    assert 0 < len(absent) < 50 and (of.labels[absent] == 3).all()
    for score in SETS:
        found, places, _ = conformal.prepare(of, score, None, 0, 0)
        assert np.flatnonzero(np.isinf(found[np.arange(50), places])).tolist() == absent


def test_a_threshold_beyond_the_list_is_every_labeling(tmp_path, capsys):
    """Too few labelings for 1 − α: coverage is kept by sets without a bound, and said so."""
    path = tmp_path / "a.jsonl"
    found = conformal.evaluate(made(path, 300, k=2), alpha=0.05)
    assert found.coverage == found.unbounded == 1 and found.size == np.inf
    assert main(["conformal", str(path), "--alpha", "0.05"]) == 0
    assert "mean size inf ± 0.000, 100.00% hold all" in capsys.readouterr().out
    some = conformal.evaluate(records.read(path), alpha=0.08)  # in some of the splits
    assert 0 < some.unbounded < 1 and 1 < some.size < 2 and some.coverage > 0.92


@pytest.mark.parametrize("by", ["length", "entities"])
def test_strata_have_thresholds_of_their_own(tmp_path, by):
    of = made(tmp_path / "a.jsonl", 4000, lengths=(2, 9), k=100)
    strata = sequences.stratify(of, by)
    names = set(strata.subjects)
    lengths = {" 1 to 7 words", " 8 to 15 words"}
    assert names == (lengths if by == "length" else {f"entities: {i}" for i in [*range(5), "5+"]})
    own = conformal.evaluate(strata, by="subject", score="cumulative")
    pooled = conformal.evaluate(of, score="cumulative")
    assert pooled.coverage == pytest.approx(0.9, abs=0.01)
    for name, group in own.by.items():
        n = (strata.subjects == name).sum() / 2
        assert group.coverage == pytest.approx(0.9, abs=3 * np.sqrt(0.09 / n) + 2 / n)


def test_every_call_gives_the_same_whatever_the_order(tmp_path):
    lines = list(rows(200, 0))
    for name, of in (("a", lines), ("b", lines[::-1])):
        records.write(tmp_path / f"{name}.jsonl", of, {})
    a, b = (
        sequences.entity_sets(records.read(tmp_path / f"{x}.jsonl"), alpha=0.2, splits=5)
        for x in "ab"
    )
    assert a == b


def test_probability_of_entities_is_the_sum_over_labelings(tmp_path):
    """With every labeling, the exact marginal of the posterior."""
    of = made(tmp_path / "a.jsonl", 20, k=10_000, lengths=(4, 5))
    rng = np.random.default_rng(0)
    found = sequences.spans(of)
    for i in range(20):
        _, emissions, transitions = draw(rng, int(rng.integers(4, 5)))
        paths, logprobs = enumerated(emissions, transitions)
        mass = {}
        for path, logprob in zip(paths, logprobs, strict=True):
            for entity in sequences.entities([LABELS[j] for j in path]):
                mass[entity] = mass.get(entity, 0) + np.exp(logprob)
        mine = found[found.sentence == i]
        ordered = [mass[entity] for entity in sorted(mass)]
        np.testing.assert_allclose(1 - mine.score, ordered, atol=1e-9)
        assert mine.name.tolist() == [name for *_, name in sorted(mass)]


def test_entities_are_held_by_class_and_together_with_sidak(tmp_path):
    """Each class at its level; several together fall below it, and Šidák takes them back.

    Where the number of entities is nearly known, as Šidák's ŝ has to be.
    """
    a, b = (made(tmp_path / f"{i}.jsonl", 6000, i, lengths=(4, 9), noise=0.35) for i in range(2))
    found = sequences.entity_sets(b, alpha=0.1, calibrate=a)
    each, together, corrected = (found[k] for k in (sequences.EACH, sequences.ALL, sequences.SIDAK))
    for name in "AB":
        error = np.sqrt(2 * 0.09 / each.by[name].questions)  # in both files
        assert each.by[name].coverage == pytest.approx(0.9, abs=3 * error)
    assert together.by["1"].coverage > 0.9
    assert together.by["3"].coverage < 0.82 and together.by["5+"].coverage < 0.7
    error = np.sqrt(2 * 0.09 / corrected.questions)
    assert corrected.coverage > 0.9 - 3 * error > together.coverage
    assert corrected.by["3"].coverage > together.by["3"].coverage + 0.1
    assert corrected.size > together.size


def test_a_class_that_too_few_calibrate_is_held_whole(tmp_path):
    rows_ = list(rows(100, 0))
    rows_[0]["gold"] = rows_[0]["gold"].replace("O", "B-C", 1)
    rows_[0]["label"] = [*rows_[0]["labelings"], rows_[0]["gold"]].index(rows_[0]["gold"])
    records.write(tmp_path / "a.jsonl", rows_, {})
    of = records.read(tmp_path / "a.jsonl")
    found = sequences.entity_sets(of, alpha=0.1, splits=20)[sequences.EACH].by
    assert found["C"].coverage == found["C"].unbounded == 1 > found["A"].unbounded == 0


def write(path, change):
    """Four records of which `change` has altered the third."""
    lines = list(rows(4, 0, k=3))
    change(lines[2])
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return str(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("gold"), "expected 'gold', 'labelings' and no 'normalise'"),
        (lambda r: r.pop("label"), "no 'label'; found id, subject"),
        (lambda r: r.update(label=3 - r["label"]), "label is "),
        (lambda r: r["labelings"].pop(), "expected 3 different labelings, one a log-probability"),
        (lambda r: r["labelings"].__setitem__(0, r["labelings"][1]), "expected 3 different label"),
        (lambda r: r["labelings"].__setitem__(1, "O"), "labeling 'O' is not as long as gold '"),
        (lambda r: r.update(logprobs=[0.0, -0.1, -3]), "probabilities of logprobs sum to 1.95"),
        (lambda r: r.update(logprobs=[-1, -2, 0.5]), "logprobs is [-1, -2, 0.5]: expected less"),
    ],
)
def test_damaged_records_are_named(tmp_path, capsys, change, message):
    path = write(tmp_path / "a.jsonl", change)
    assert main(["conformal", path, "--entities"]) == 2
    captured = capsys.readouterr()
    assert f"error: {path}, line 3: " in captured.err and message in captured.err
    assert not captured.out and "`score`" not in captured.err


def test_what_is_not_for_labelings_is_refused(tmp_path, capsys):
    labelings, questions = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    made(labelings, 10)
    write_records(questions, 10, 1.0, 0)

    def refused(*arguments):
        assert main([*map(str, arguments)]) == 2
        captured = capsys.readouterr()
        assert not captured.out
        return captured.err

    for command in ("metrics", "compare"):
        message = refused(command, labelings, *[labelings] * (command == "compare"))
        assert f"{labelings}: records of labelings, which `calibeval conformal` is for" in message
    for option in (["--entities"], ["--by", "length"]):
        message = refused("conformal", questions, *option)
        assert f"{questions}: records of letters, expected labelings of sentences" in message
    message = refused("conformal", labelings, "--calibrate", questions)
    assert f"{questions}: records of letters, but of labelings in {labelings}" in message
    assert "--entities: " in refused("conformal", labelings, "--entities", "--by", "length")
    pair = [sequences.record(x, "s", [x], [["O"], ["B-A"]], [-0.1, -3]) for x in ("O", "B-A")]
    records.write(labelings, pair, {})
    of = records.read(labelings)
    found = sequences.entity_sets(of, alpha=0.1, splits=9)  # some halves have no entity
    assert found[sequences.EACH].coverage == 1
    rows_ = [sequences.record(str(i), "s", ["O"], [["O"]], [-0.1]) for i in range(9)]
    records.write(labelings, rows_, {})
    assert f"{labelings}: no gold labeling has an entity" in refused(
        "conformal", labelings, "--entities"
    )


def test_the_readme_s_token_classifier(tmp_path, tiny_model, monkeypatch, capsys):
    """The documentation's code as it stands, on a small random model."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForTokenClassification

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "id2label": dict(enumerate(LABELS))}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads)
    LlamaForTokenClassification(config).save_pretrained(tmp_path / "model")
    readme = Path(__file__).parents[2] / "eval" / "README.md"
    code = readme.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    sentences = [(["Old", "kings", "sleep"], ["B-A", "I-A", "O"]), (["light"], ["O"])]
    monkeypatch.chdir(tmp_path)
    exec(code, {"MODEL": str(tmp_path / "model"), "sentences": sentences})
    of = records.read(Path("RECORDS.jsonl"))
    assert np.isfinite(of.logprobs).sum(1).tolist() == [41, 3]  # of 125 and 5 labelings
    np.testing.assert_allclose(np.exp(of.logprobs).sum(1), 1)
    assert main(["conformal", "RECORDS.jsonl", "--score", "rank"]) == 0
    assert "RECORDS.jsonl: 2 sentences, rank sets at 1 − α = 0.9" in capsys.readouterr().out
