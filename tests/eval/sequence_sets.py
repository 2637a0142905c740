"""How sets of labelings and entities do: on a hidden Markov model, and a CRF's on CoNLL-2003.

    python tests/eval/sequence_sets.py --out DIR [--conll FOLDER]    # train.txt, test.txt

DIR gets the records. The CRF is CRFsuite's (`pip install python-crfsuite==0.9.12`).
"""

import argparse
from pathlib import Path

import numpy as np
from made_labelings import made
from tabulate import tabulate

from calibeval import conformal, records, sequences

SCORES = ("lac", "cumulative", "rank")


def sentences(path: Path) -> list[tuple[list[str], list[str], list[str]]]:
    """Words, parts of speech and labels of each sentence of a CoNLL-2003 file."""
    found, rows = [], []
    for line in [*path.read_text(encoding="utf-8").splitlines(), ""]:
        columns = line.split()
        if columns and columns[0] != "-DOCSTART-":
            rows.append((columns[0], columns[1], columns[-1]))
        elif rows:
            found.append(tuple(map(list, zip(*rows, strict=True))))
            rows = []
    return found


def attributes(words: list[str], tags: list[str]) -> list[list[str]]:
    """What the CRF sees of each word: itself, its ends and shape, its neighbours."""
    found = []
    for i, word in enumerate(words):
        shape = "".join(
            "X" if c.isupper() else "x" if c.islower() else "d" * c.isdigit() or c for c in word
        )
        seen = ["bias", f"w={word.lower()}", f"shape={shape[:8]}", f"pos={tags[i]}"]
        seen += [f"end={word[-3:]}", f"begin={word[:3]}", f"edge={i == 0}{i == len(words) - 1}"]
        for step in (-2, -1, 1, 2):
            if 0 <= i + step < len(words):
                near = words[i + step]
                seen += [f"{step}w={near.lower()}", f"{step}pos={tags[i + step]}"]
                seen += [f"{step}title={near[:1].isupper()}"]
        found.append(seen)
    return found


def train(folder: Path, model: Path) -> None:
    """Fit the CRF on train.txt."""
    import pycrfsuite

    trainer = pycrfsuite.Trainer(verbose=False)
    trainer.set_params({"c1": 0.1, "c2": 0.01, "max_iterations": 100})
    for words, tags, labels in sentences(folder / "train.txt"):
        trainer.append(attributes(words, tags), labels)
    trainer.train(str(model))


def crf_rows(path: Path, model: Path, k: int):
    """The K best labelings of each sentence, whose log-probabilities agree with CRFsuite's own."""
    import pycrfsuite

    tagger = pycrfsuite.Tagger()
    tagger.open(str(model))
    names, info, weights = tagger.labels(), tagger.info(), {}
    for (attribute, label), weight in info.state_features.items():
        weights.setdefault(attribute, np.zeros(len(names)))[names.index(label)] += weight
    transitions = np.array([[info.transitions.get((a, b), 0.0) for b in names] for a in names])
    nothing, apart = np.zeros(len(names)), 0.0
    for i, (words, tags, labels) in enumerate(sentences(path)):
        seen = attributes(words, tags)
        emissions = np.array([sum((weights.get(a, nothing) for a in of), nothing) for of in seen])
        paths, logprobs = sequences.k_best(emissions, transitions, k)
        found = [[names[j] for j in path] for path in paths]
        if i % 20 == 0:
            tagger.set(seen)
            assert found[0] == tagger.tag()
            apart = max(apart, abs(np.exp(logprobs[0]) - tagger.probability(found[0])))
        yield sequences.record(f"{path.stem}/{i:05}", path.stem, labels, found, logprobs)
    print(f"{path}: the likeliest labeling's probability is CRFsuite's within {apart:.1e}")


def figure(found: list[conformal.Sets]) -> list[str]:
    """Coverage and size of several files, mean ± standard deviation; of one, over its splits."""
    values = np.array([(of.coverage, of.size, of.unbounded) for of in found])
    coverage, size, unbounded = values.mean(0)
    a, b = found[0].coverage_sd, found[0].size_sd
    if len(found) > 1:
        a, b, _ = values.std(0, ddof=1)
    return [f"{coverage:.3f} ± {a:.3f}", f"{size:.2f} ± {b:.2f}", f"{unbounded:.2%}"]


def table(files: list[records.Records], alpha: float) -> str:
    """Every kind of set, one row each."""
    found = [sequences.entity_sets(of, alpha=alpha) for of in files]
    for sets, of in zip(found, files, strict=True):
        sets |= {score: conformal.evaluate(of, alpha=alpha, score=score) for score in SCORES}
    rows = []
    for kind in (*SCORES, sequences.EACH, sequences.ALL, sequences.SIDAK):
        rows.append([kind, *figure([sets[kind] for sets in found])])
        for name in found[0][kind].by:
            rows.append([f"{kind}: {name}", *figure([sets[kind].by[name] for sets in found])])
    missing = np.mean([(of.labels == np.isfinite(of.logprobs).sum(1)).mean() for of in files])
    right = np.mean([(of.logprobs.argmax(1) == of.labels).mean() for of in files])
    head = f"α = {alpha}, likeliest labeling right {right:.3f}, right one missing {missing:.4f}\n"
    columns = ["sets", "coverage", "size", "hold all"]
    return head + tabulate(rows, columns, "github", disable_numparse=True)


def main() -> None:
    """Make the records and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--conll", type=Path)
    parser.add_argument("--k", type=int, default=100)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    for noise in (0.35, 0.5):
        options = {"k": a.k, "lengths": (4, 9), "noise": noise}
        files = [made(a.out / f"hmm-{noise}-{s}.jsonl", 4000, s, **options) for s in range(5)]
        for alpha in (0.1, 0.05):
            print(f"hidden Markov model, noise {noise}, seeds 0 to 4, {table(files, alpha)}\n")
    if a.conll:
        model, out = a.out / "crf", a.out / "conll2003-test.jsonl"
        if not model.exists():
            train(a.conll, model)
        records.write(out, crf_rows(a.conll / "test.txt", model, a.k), {"k": a.k})
        for alpha in (0.1, 0.05):
            print(f"CoNLL-2003 test, {table([records.read(out)], alpha)}\n")


if __name__ == "__main__":
    main()
