"""Written answers, smoothed or at a temperature: `python -m studies.written [train MODEL]`.

Without words the tables of README.md are made from the published records, without a GPU.
"""

import argparse
import sys

from calibeval.io import CONTINUES, finish
from studies.written import tables, training


def main() -> int:
    """Do what the command line says; returns the exit code."""
    parser = argparse.ArgumentParser("python -m studies.written", description=__doc__)
    steps = parser.add_subparsers(dest="step", metavar="STEP")
    train = steps.add_parser("train", help="train and score a model's runs and heads, on a GPU")
    train.add_argument("model", choices=tuple(training.LEARNING_RATES))
    words = parser.parse_args()
    if words.step == "train":
        return finish(lambda: training.train(words.model), CONTINUES)
    return finish(tables.write_tables)


if __name__ == "__main__":
    sys.exit(main())
