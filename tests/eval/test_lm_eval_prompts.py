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
package = importlib.util.find_spec("lm_eval")
if package is None:
    pytest.skip("lm_eval is not installed", allow_module_level=True)
TASKS = Path(package.submodule_search_locations[0]) / "tasks"


class Loader(yaml.SafeLoader):
    """YAML in which `!function` is a text."""


Loader.add_constructor("!function", lambda loader, node: node.value)


def rendered(template: str, documents: list[dict]) -> list[tuple[str, list[str]]]:
    """(context, choices) of documents by a task's template file."""
    config = yaml.load((TASKS / template).read_text(), Loader)
    jinja = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    text = jinja.from_string(config["doc_to_text"])
    choice = config["doc_to_choice"]  # a key of documents, or an expression in braces

    def choices(document: dict) -> list[str]:
        if choice in document:
            return document[choice]
        return jinja.compile_expression(choice.strip("{} "))(**document)

    return [(text.render(**document), choices(document)) for document in documents]


def ours(task: Task) -> list[tuple[str, list[str]]]:
    """The same of our prompts."""
    (subject,) = tasks.load(task)
    found = []
    for question in subject.questions:
        prompt = prompts.build(subject, question, 0, scoring="continuation")
        found.append((prompt.text, list(prompt.endings)))
    return found


def test_arc_easy(shared_data):
    data = shared_data("arc_easy.tar.xz")
    documents = []
    for row in read_lines(data / "ARC-Easy-Test.jsonl"):
        choices = row["question"]["choices"]
        columns = {key: [choice[key] for choice in choices] for key in ("text", "label")}
        documents.append({**row, "question": row["question"]["stem"], "choices": columns})
    expected = rendered("arc/arc_easy.yaml", documents)
    assert len(expected) == 2376
    assert ours(Task(task="arc_easy", data=str(data))) == expected


class Documents(list):
    """As much of a `datasets.Dataset` as lm-eval's function needs."""

    def map(self, function):
        return [{**row, **function(row)} for row in self]


def test_hellaswag(shared_data, tmp_path):
    rows = read_lines(shared_data("hellaswag_val.jsonl.xz"))
    for number, row in enumerate(rows):
        # Markers as the original file has them.
        first, _, last = row["ctx"].rpartition(". ")
        row["ind"] = number
        row["ctx_a"] = f"{first}.  [title] x"
        row["ctx_b"] = last
        row["label"] = str(row["label"])
        row["endings"] = [f"[step] {ending}" for ending in row["endings"]]
    write_lines(tmp_path / "hellaswag_val.jsonl", rows)
    lm_eval = runpy.run_path(str(TASKS / "hellaswag" / "utils.py"))
    documents = lm_eval["process_docs"](Documents(rows))
    expected = rendered("hellaswag/hellaswag.yaml", documents)
    assert len(expected) == 10042
    assert ours(Task(task="hellaswag", data=str(tmp_path))) == expected
