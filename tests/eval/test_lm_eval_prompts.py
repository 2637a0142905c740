"""Prompts against lm-evaluation-harness's own templates and cleaning, rendered from its files.

Runs where lm_eval's files are (tests/eval/peers_env.sh); it is not imported, and needs no hub.
"""

import importlib.util
import runpy
from pathlib import Path

import pytest
import yaml
from jinja2 import Environment, StrictUndefined
from made_records import read_lines, write_lines

from calibeval import prompts, tasks
from calibeval.request import Task

pytestmark = pytest.mark.slow
found = importlib.util.find_spec("lm_eval")
if found is None:
    pytest.skip("lm_eval is not installed", allow_module_level=True)
FOLDER = Path(found.submodule_search_locations[0]) / "tasks"


class Loader(yaml.SafeLoader):
    """YAML in which `!function` is a text."""


Loader.add_constructor("!function", lambda loader, node: node.value)


def rendered(name: str, docs: list[dict]) -> list[tuple[str, list[str]]]:
    """(context, choices) of documents by a task's templates."""
    config = yaml.load((FOLDER / name).read_text(), Loader)
    jinja = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    text, choice = config["doc_to_text"], config["doc_to_choice"]

    def choices(doc: dict) -> list[str]:
        if choice in doc:
            return doc[choice]
        return jinja.compile_expression(choice.strip("{} "))(**doc)

    return [(jinja.from_string(text).render(**doc), choices(doc)) for doc in docs]


def ours(task: Task) -> list[tuple[str, list[str]]]:
    """The same of our prompts."""
    (subject,) = tasks.load(task)
    built = [prompts.build(subject, q, 0, scoring="continuation") for q in subject.questions]
    return [(prompt.text, list(prompt.endings)) for prompt in built]


def test_arc_easy(shared_data):
    data = shared_data("arc_easy.tar.xz")
    docs = []
    for row in read_lines(data / "ARC-Easy-Test.jsonl"):
        choices = row["question"]["choices"]
        both = {key: [choice[key] for choice in choices] for key in ("text", "label")}
        docs.append(row | {"question": row["question"]["stem"], "choices": both})
    expected = rendered("arc/arc_easy.yaml", docs)
    assert ours(Task(task="arc_easy", data=str(data))) == expected and len(expected) == 2376


def test_hellaswag(shared_data, tmp_path):
    rows = read_lines(shared_data("hellaswag_val.jsonl.xz"))
    for i, row in enumerate(rows):
        first, _, last = row["ctx"].rpartition(". ")
        # Markers as the original file has them.
        row |= {
            "ind": i,
            "ctx_a": f"{first}.  [title] x",
            "ctx_b": last,
            "label": str(row["label"]),
        }
        row["endings"] = [f"[step] {ending}" for ending in row["endings"]]
    write_lines(tmp_path / "hellaswag_val.jsonl", rows)

    class Mapped(list):
        def map(self, function):
            return [row | function(row) for row in self]

    utils = runpy.run_path(str(FOLDER / "hellaswag" / "utils.py"))
    expected = rendered("hellaswag/hellaswag.yaml", utils["process_docs"](Mapped(rows)))
    assert ours(Task(task="hellaswag", data=str(tmp_path))) == expected and len(expected) == 10042
