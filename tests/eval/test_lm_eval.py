"""Other programs' output becomes records, to the last metric.

lm_eval_samples/ is what lm-eval 0.4.13 wrote for the real model of stories260k.py on questions of
MMLU and HellaSwag (both MIT): `lm_eval --model hf --tasks mmlu_abstract_algebra,hellaswag
--num_fewshot 0 --samples … --log_samples`, with its mmlu template and its acc_bytes and
acc_mutual_info beside HellaSwag's acc and acc_norm, on local files. Inspect's logs are made here.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
from made_records import read_lines, write_lines

from calibeval import records
from calibeval.ask import tasks
from calibeval.ask.request import Task
from calibeval.imports.lm_eval import lm_eval_row
from calibeval.io import sha256

# Which choice each of lm-eval's metrics takes: the greatest by this normalization.
NORMALIZATION_OF_METRIC = {"acc": "sum", "acc_norm": "characters", "acc_bytes": "bytes"}
SAMPLES = Path(__file__).parent / "lm_eval_samples"
(MMLU,) = SAMPLES.glob("samples_mmlu_abstract_algebra_*")
(HELLASWAG,) = SAMPLES.glob("samples_hellaswag_*")


@pytest.fixture
def imported(tmp_path, run):
    """imported(log, *options) → the records of a log."""

    def read(log: Path, *options: object) -> records.Records:
        run("import", log, "--out", tmp_path / "r.jsonl", *options)
        return records.read(tmp_path / "r.jsonl")

    return read


@pytest.fixture
def mmlu_records(imported):
    """The records of MMLU's samples."""
    return imported(MMLU)


def test_letters_have_the_samples_scores(mmlu_records):
    samples = read_lines(MMLU)
    scores = [[float(score) for score, _ in sample["filtered_resps"]] for sample in samples]
    assert mmlu_records.scoring == "letters"
    assert mmlu_records.logprobs.tolist() == scores
    masses = [sum(math.exp(score) for score in scores_of_one) for scores_of_one in scores]
    assert mmlu_records.letter_mass == pytest.approx(masses)


def test_records_know_question_prompt_and_versions(mmlu_records, run):
    samples = read_lines(MMLU)
    assert mmlu_records.model == "model"
    assert mmlu_records.ids == [f"abstract_algebra/{sample['doc_id']}" for sample in samples]
    first = read_lines(mmlu_records.path)[0]
    assert first["shots"] == 0
    assert first["prompt_sha256"] == samples[0]["prompt_hash"]
    assert first["versions"] == {"lm_eval": "0.4.13", "transformers": "5.19.0"}
    run("metrics", mmlu_records.path)


@pytest.mark.parametrize("metric", NORMALIZATION_OF_METRIC)
def test_texts_are_as_right_as_each_metric_says(imported, metric):
    samples = sorted(read_lines(HELLASWAG), key=lambda sample: sample["doc_id"])
    found = records.read(imported(HELLASWAG).path, NORMALIZATION_OF_METRIC[metric])
    right = found.logprobs.argmax(1) == found.labels
    assert right.tolist() == [sample[metric] == 1 for sample in samples]


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (["acc"], "sum"),
        (["acc", "acc_bytes"], "bytes"),
        (["acc_bytes"], "bytes"),
        (["acc", "acc_norm", "acc_bytes"], "characters"),
    ],
)
def test_the_logged_metrics_choose_the_normalization(tmp_path, imported, metrics, expected):
    samples = read_lines(HELLASWAG)
    for sample in samples:
        for metric in {*NORMALIZATION_OF_METRIC} - {*metrics}:
            del sample[metric]
    found = imported(write_lines(tmp_path / HELLASWAG.name, samples))
    assert found.normalise == expected


@pytest.fixture
def several_files(tmp_path):
    """A run's folder: two subjects of MMLU, their lines in reverse and each with another filter's
    line behind it, and HellaSwag."""
    folder = tmp_path / "org__model"
    folder.mkdir()
    lines = []
    for sample in reversed(read_lines(MMLU)):
        lines += [sample, {**sample, "filter": "other"}]
    for task in ("mmlu_anatomy", "mmlu_abstract_algebra"):
        write_lines(folder / f"samples_{task}_2025-01-01T00-00-00.0.jsonl", lines)
    shutil.copy(HELLASWAG, folder / "samples_hellaswag.jsonl")
    return list(folder.iterdir())


def test_a_run_becomes_a_file_a_data_set(several_files, tmp_path, run, refused):
    command = ["import", *several_files, "--out", tmp_path / "out"]
    run(*command)
    assert "exists; give another --out" in refused(*command)
    mmlu = records.read(tmp_path / "out" / "mmlu.jsonl")
    assert len(mmlu) == 12
    assert mmlu.model == "org__model"
    subjects = {row["subject"] for row in read_lines(mmlu.path)}
    assert subjects == {"anatomy", "abstract_algebra"}
    anatomy = [question for question in mmlu.ids if question.startswith("anatomy/")]
    assert anatomy == [f"anatomy/{number}" for number in (0, 8, 12, 17, 21, 31)]
    assert len(records.read(tmp_path / "out" / "hellaswag.jsonl")) == 8


# As in Winograd schemas, where the choices are in the context.
OTHER_CONTEXTS = {f"gen_args_{i}": {"arg_0": f"context {i}", "arg_1": " x"} for i in range(4)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"acc": 1.0}, "acc is 1.0, but 0.0 by log-probabilities"),
        ({"target": "4"}, "label is 4, expected 0 to 3"),
        ({"filtered_resps": ["some text"]}, "expected a multiple-choice sample"),
        ({"doc_id": None}, "doc_id is None, expected a whole number"),
        ({"arguments": OTHER_CONTEXTS}, "its choices do not continue one prompt"),
        ({"acc": 1.0, "filtered_resps": [["nan", ""]] * 4}, "expected a finite number"),
    ],
)
def test_bad_samples_are_named_by_line(tmp_path, refused, changes, expected):
    samples = read_lines(MMLU)
    samples[2].update(changes)
    path = write_lines(tmp_path / MMLU.name, samples)
    message = refused("import", path, "--out", tmp_path / "out")
    assert f"error: {path}, line 3: " in message
    assert expected in message
    assert not (tmp_path / "out").exists()


def test_older_logs(tmp_path, run, mmlu_records):
    """Of lm-eval before 0.4.3, which listed the arguments and wrote one JSON array."""
    samples = read_lines(MMLU)
    for sample in samples:
        sample["arguments"] = [[*request.values()] for request in sample["arguments"].values()]
        del sample["filter"], sample["prompt_hash"], sample["doc_hash"], sample["target_hash"]
        sample["filtered_resps"] = [[float(score), False] for score, _ in sample["filtered_resps"]]
    path = tmp_path / "samples_mmlu_abstract_algebra.jsonl"
    path.write_text(json.dumps(samples, indent=2))
    run("import", path, "--out", tmp_path / "old.jsonl")
    older = records.read(tmp_path / "old.jsonl")
    assert older.ids == mmlu_records.ids
    assert (older.logprobs == mmlu_records.logprobs).all()


def test_bad_files(tmp_path, refused):
    command = ["import", "--out", tmp_path / "all.jsonl"]
    other_name = tmp_path / "r.jsonl"
    other_name.touch()
    assert "expected a name like samples_<task>_<time>.jsonl" in refused(*command, other_name)
    empty = tmp_path / "samples_x.jsonl"
    empty.touch()
    assert "samples_x.jsonl: no samples" in refused(*command, empty)
    (tmp_path / "results.json").write_text("[]")
    assert "results.json: not lm-eval's results" in refused(*command, empty)
    message = refused(*command, MMLU, HELLASWAG)
    assert f"{HELLASWAG}, line 1: scoring 'continuation' after 'letters'" in message
    assert not (tmp_path / "all.jsonl").exists()


# --- Whether samples are whole, and of one data set ---


def with_results(folder: Path, samples: list[dict], **results) -> Path:
    """A file of samples with lm-eval's results beside it, of which some keys are others."""
    time = MMLU.stem.removeprefix("samples_mmlu_abstract_algebra")
    whole = json.loads((SAMPLES / f"results{time}.json").read_text())
    (folder / f"results{time}.json").write_text(json.dumps({**whole, **results}))
    return write_lines(folder / MMLU.name, samples)


def test_samples_that_were_cut_short(tmp_path, refused):
    samples = with_results(tmp_path, read_lines(MMLU)[:4])
    message = refused("import", samples, "--out", tmp_path / "out")
    assert f"{samples}: 4 samples, but results" in message
    assert "says 6; it was cut short" in message


def test_a_first_filter_with_fewer_questions(tmp_path, refused):
    samples = read_lines(MMLU)
    lines = [samples[0], *({**sample, "filter": "second"} for sample in samples)]
    path = write_lines(tmp_path / "samples_mmlu_anatomy.jsonl", lines)
    message = refused("import", path, "--out", tmp_path / "out")
    assert "filter 'none' has 1 sample and 'second' 6, of other questions" in message


def test_other_sets_of_mmlus_subjects_are_sets_of_their_own(tmp_path, run):
    files = [
        write_lines(tmp_path / f"samples_{task}.jsonl", read_lines(MMLU))
        for task in ("mmlu_anatomy", "mmlu_redux_anatomy", "global_mmlu_full_de_anatomy")
    ]
    run("import", *files, "--out", tmp_path / "out")
    written = {file.name for file in (tmp_path / "out").glob("*.jsonl")}
    assert written == {"mmlu.jsonl", "mmlu_redux.jsonl", "global_mmlu_full_de.jsonl"}


def test_a_task_that_names_no_file(tmp_path, refused, write_log, run):
    for task in ("..", ""):
        log = write_log([inspect_sample(1, "A", "A")])
        about = json.loads(log.read_text())
        about["eval"]["task"] = task
        log.write_text(json.dumps(about))
        message = refused("import", log, "--out", tmp_path / "out")
        assert "does not make a file's name; give --out FILE.jsonl" in message
    assert not (tmp_path / "out").exists()
    run("import", log, "--out", tmp_path / "named.jsonl")


def digits_as_choices(target: str, scores: list[float], right: int) -> dict:
    """A sample whose choices are digits, with `right` as the place of the right one."""
    sample = read_lines(HELLASWAG)[0]
    for request, text in zip(sample["arguments"].values(), ("2", "0", "1"), strict=False):
        request["arg_1"] = f" {text}"
    sample["arguments"] = dict(list(sample["arguments"].items())[:3])
    sample["filtered_resps"] = [[str(score), "False"] for score in scores]
    sample["target"] = target
    sample["acc"] = float(scores.index(max(scores)) == right)
    return sample


@pytest.mark.parametrize("target_is", ["index", "text"])
def test_a_target_of_digits_is_what_the_accuracies_say(tmp_path, imported, target_is):
    """lm-eval writes "1" for the choice in place 1, and a task's own function for the text 1."""
    right_of = {"index": {"1": 1, "2": 2}, "text": {"1": 2, "2": 0}}[target_is]
    samples = [
        # The first is wrong by either meaning, so the second tells which it is.
        digits_as_choices("1", [0.0, -1.0, -2.0], right_of["1"]),
        digits_as_choices("2", [-1.0, -3.0, -2.0], right_of["2"]),
    ]
    for number, sample in enumerate(samples):
        sample["doc_id"] = number
    found = imported(write_lines(tmp_path / "samples_digits.jsonl", samples))
    assert found.labels.tolist() == list(right_of.values())


def test_digits_as_texts_are_known_beside_their_scores_without_a_prompt(tmp_path, imported):
    """The greatest score was looked for among those without a prompt too (acc_mutual_info)."""
    sample = digits_as_choices("1", [-5.0, -4.0, -3.0], right=2)
    without_prompt = [{**request, "arg_0": ""} for request in sample["arguments"].values()]
    requests = [*sample["arguments"].values(), *without_prompt]
    sample["arguments"] = {f"gen_args_{place}": request for place, request in enumerate(requests)}
    sample["filtered_resps"] += [["-1.0", "False"], ["-2.0", "False"], ["-2.0", "False"]]
    found = imported(write_lines(tmp_path / "samples_digits.jsonl", [sample]))
    assert found.labels.tolist() == [2]


def test_logs_with_other_examples_do_not_go_into_one_file(tmp_path, run, refused):
    """The file was written, and every command refused to read it."""
    time = MMLU.stem.removeprefix("samples_mmlu_abstract_algebra")
    no_examples = shutil.copy(MMLU, tmp_path / f"samples_mmlu_anatomy{time}.jsonl")
    five_examples = shutil.copy(MMLU, tmp_path)
    results = {"n-shot": {"mmlu_abstract_algebra": 5, "mmlu_anatomy": 0}}
    (tmp_path / f"results{time}.json").write_text(json.dumps(results))
    out = tmp_path / "out"
    message = refused("import", five_examples, no_examples, "--out", out)
    assert f"{no_examples}, line 1: shots 0 after 5; expected the same" in message
    assert "give logs of others another --out" in message
    assert not out.exists()
    run("import", five_examples, "--out", out)
    assert records.read(out / "mmlu.jsonl").shots == 5


def test_logs_of_two_programs_do_not_go_into_one_file(tmp_path, refused, write_log):
    """The sidecar names one engine; models of one name are told by nothing else."""
    about = {"task": "mmlu", "model": "model"}
    log = write_log([inspect_sample(1, "B", "B")], eval=about)
    out = tmp_path / "r.jsonl"
    message = refused("import", MMLU, log, "--out", out)
    assert "inspect" in message
    assert "lm-evaluation-harness" in message
    assert not out.exists()


def test_letters_after_another_delimiter(tmp_path, imported):
    """Without results nobody says what it is."""
    samples = read_lines(MMLU)
    for sample in samples:
        for request in sample["arguments"].values():
            request["arg_1"] = request["arg_1"].replace(" ", "\n")
    found = imported(write_lines(tmp_path / "samples_mmlu_anatomy.jsonl", samples))
    assert found.scoring == "letters"


def test_questions_of_which_nothing_is_known_are_left_out(tmp_path, imported, refused):
    """All choices had −104 then, and their lengths decided: a confidence of 0.9996."""
    samples = read_lines(MMLU)
    impossible = {**samples[0], "filtered_resps": [["-inf", "False"]] * 4}
    path = write_lines(tmp_path / MMLU.name, [impossible, *samples[1:]])
    found = imported(path)
    assert records.meta(found.path)["settings"]["impossible"] == 1
    assert len(found) == 5
    write_lines(path, [impossible])
    message = refused("import", path, "--out", tmp_path / "none")
    assert "none of 1 sample can be used: 1 sample whose choices all" in message


def test_a_choice_of_probability_0(tmp_path, imported):
    samples = read_lines(MMLU)
    wrong = next(place for place in range(4) if place != int(samples[0]["target"]))
    samples[0]["filtered_resps"][wrong] = ["-inf", "False"]
    del samples[0]["acc"]
    found = imported(write_lines(tmp_path / MMLU.name, samples))
    logprobs = found.logprobs[0].tolist()
    others = [logprob for place, logprob in enumerate(logprobs) if place != wrong]
    assert logprobs[wrong] == min(others) - 104


def test_winogrande(tmp_path, imported):
    """Its choices stand in the contexts; one text goes on after both."""
    sample = {
        "doc_id": 0,
        "doc": {"sentence": "A _ is big.", "option1": "ant", "option2": "elk", "answer": "2"},
        "target": "is big.",
        "arguments": {
            "gen_args_0": {"arg_0": "A ant", "arg_1": " is big."},
            "gen_args_1": {"arg_0": "A elk", "arg_1": " is big."},
        },
        "filtered_resps": [["-5.0", "False"], ["-4.0", "False"]],
        "acc": 1.0,
    }
    found = imported(write_lines(tmp_path / "samples_winogrande.jsonl", [sample]))
    (row,) = read_lines(found.path)
    assert (row["label"], row["logprobs"], row["scoring"]) == (1, [-5.0, -4.0], "continuation")
    assert row["characters"] == [7, 7]


def test_samples_of_a_chat(tmp_path, imported):
    samples = read_lines(MMLU)
    for sample in samples:
        for request in sample["arguments"].values():
            request["arg_1"] = request["arg_1"].strip()
    path = with_results(tmp_path, samples, chat_template="{{ x }}", chat_template_sha="ab12")
    rows = read_lines(imported(path).path)
    assert {row["chat_template"] for row in rows} == {"ab12"}
    assert "letter_mass" in rows[0]


@pytest.mark.parametrize("is_known", [False, True])
def test_whether_a_chat_was_asked_is_known_where_the_results_say(tmp_path, imported, is_known):
    samples = read_lines(MMLU)
    log = write_lines(tmp_path / MMLU.name, samples)
    if is_known:
        with_results(tmp_path, samples, chat_template_sha=None)
    found = imported(log)
    assert found.chat_template is None
    assert found.chat_template_is_known == is_known


# --- Ids of the built-in tasks ---


LETTERED = {"text": ["x", "y"], "label": ["A", "B"]}
TEN_AT_MOST = {"question": "q", "options": ["x", "y"], "answer_index": 1}
TRANSLATED = {"question": "q", "answer": "B"} | {f"option_{letter}": letter for letter in "abcd"}

# Of built-in tasks, one for each way of making ids: what lm-evaluation-harness calls it, and rows
# as the hub has them, two where ids are numbers of rows.
HUB_ROWS = {
    "arc_challenge": (
        "arc_challenge",
        [
            {"id": "Mercury_7", "question": "q", "choices": LETTERED, "answerKey": "B"},
        ],
    ),
    "boolq": (
        "boolq",
        [
            {"question": "q", "passage": "p", "idx": 0, "label": 1},
            {"question": "r", "passage": "p", "idx": 1, "label": 1},
        ],
    ),
    "global_mmlu": (
        "global_mmlu_full_de_anatomy",
        [
            {"sample_id": "anatomy/test/0", "subject": "anatomy", **TRANSLATED},
        ],
    ),
    "hellaswag": (
        "hellaswag",
        [
            {"ind": 24, "activity_label": "a", "ctx": "b", "endings": ["x", "y"], "label": "1"},
            {"ind": 92, "activity_label": "a", "ctx": "c", "endings": ["x", "y"], "label": "1"},
        ],
    ),
    "mmlu": (
        "mmlu_anatomy",
        [
            {"question": "q", "subject": "anatomy", "choices": ["x", "y"], "answer": 1},
            {"question": "r", "subject": "anatomy", "choices": ["x", "y"], "answer": 1},
        ],
    ),
    "mmlu_pro": (
        "leaderboard_mmlu_pro",
        [
            {"question_id": 70, "category": "business", **TEN_AT_MOST},
        ],
    ),
    "piqa": (
        "piqa",
        [
            {"goal": "g", "sol1": "x", "sol2": "y", "label": 1},
            {"goal": "h", "sol1": "x", "sol2": "y", "label": 1},
        ],
    ),
    "truthfulqa_mc1": (
        "truthfulqa_mc1",
        [
            {"question": "q", "mc1_targets": {"choices": ["x", "y"], "labels": [0, 1]}},
            {"question": "r", "mc1_targets": {"choices": ["x", "y"], "labels": [0, 1]}},
        ],
    ),
}


def sample_of(row: dict, number: int) -> dict:
    """What lm-evaluation-harness logs of a row whose second choice is right."""
    return {
        "doc_id": number,
        "doc": row,
        "target": "1",
        "arguments": {
            "gen_args_0": {"arg_0": "q", "arg_1": " x"},
            "gen_args_1": {"arg_0": "q", "arg_1": " y"},
        },
        "filtered_resps": [["-2.0", "False"], ["-1.0", "False"]],
        "acc": 1.0,
    }


@pytest.mark.parametrize("task", HUB_ROWS)
def test_ids_and_subjects_are_those_that_the_built_in_task_gives(task, monkeypatch):
    """Else `compare` refuses imported records beside those of `score`, as of other questions."""
    datasets = pytest.importorskip("datasets")
    lm_eval_task, rows = HUB_ROWS[task]
    hub_rows = datasets.Dataset.from_list(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: hub_rows)
    language = "de" if task == "global_mmlu" else None
    subjects = tasks.load(Task(task=task, data="hub:any/name", shots=0, language=language))
    own = []
    for subject in subjects:
        own += [(question.id, question.subject, question.label) for question in subject.questions]
    imported_rows = [
        lm_eval_row(sample_of(row, number), lm_eval_task, " ") for number, row in enumerate(rows)
    ]
    assert [(row["id"], row["subject"], row["label"]) for row in imported_rows] == own


@pytest.mark.parametrize(
    ("task", "row", "expected"),
    [
        ("sciq", {"id": "7"}, "sciq/4"),
        ("mmlu_redux_anatomy", {"subject": "anatomy"}, "anatomy/4"),
        ("arc_de", {"id": "ARC/7"}, "ARC/7"),
        # Of a built-in task, on data that lack the ids.
        ("openbookqa", {}, "openbookqa/4"),
    ],
)
def test_ids_of_what_no_built_in_task_knows(task, row, expected):
    assert lm_eval_row(sample_of(row, 4), task, " ")["id"] == expected


# --- Inspect ---

# Log-probabilities of the top tokens at one place of Inspect's log.
TOP = [("B", -0.5), (" B", -3.0), ("A", -1.5), ("ANSWER", -4.0), ("the", -6.0)]


def inspect_sample(
    number: int, target: str, *tokens: str, top: dict[str, list] | None = None
) -> dict:
    """A sample of Inspect's log in which the model has said these tokens.

    `top` has the likeliest tokens where a token stands, if they are not `TOP`.
    """
    content = []
    for token in tokens:
        likeliest = (top or {}).get(token, TOP)
        alternatives = [{"token": text, "logprob": logprob} for text, logprob in likeliest]
        content.append({"token": token, "logprob": -0.5, "top_logprobs": alternatives})
    return {
        "id": number,
        "epoch": 1,
        "input": f"Which {number}?",
        "choices": ["x", "y", "z"],
        "target": target,
        "output": {"choices": [{"logprobs": {"content": content}}]},
        "metadata": {"subject": "light"},
    }


@pytest.fixture
def write_log(tmp_path):
    """write_log(samples, **header) → a log of Inspect's."""

    def write(samples: list[dict] | None, **header) -> Path:
        about = {
            "task": "inspect_evals/arc",
            "model": "openai/m",
            "packages": {"inspect_ai": "0.3.285"},
        }
        log = {"status": "success", "eval": about, "samples": samples, **header}
        path = tmp_path / "log.json"
        path.write_text(json.dumps(log))
        return path

    return write


def test_inspects_logs(tmp_path, run, write_log):
    first = inspect_sample(1, "B", "ANSWER", ":", " B", ".")
    first["scores"] = {"choice": {"answer": "B"}, "other": {"answer": "I say B"}, "third": {}}
    log = write_log([first, inspect_sample(2, "A", "A")])
    out = tmp_path / "out" / "arc.jsonl"
    printed = run("import", log, "--out", out.parent, "--json").out
    assert json.loads(printed) == {str(out): 2}
    found = records.read(out)
    assert found.ids == ["1", "2"]
    assert found.labels.tolist() == [1, 0]
    assert found.model == "openai/m"
    assert read_lines(out)[0]["subject"] == "light"
    both_spellings_of_b = math.log(math.exp(-0.5) + math.exp(-3.0))
    least = -6.0  # C is not among the top tokens
    assert found.logprobs.tolist() == [pytest.approx([-1.5, both_spellings_of_b, least])] * 2


def test_a_letter_of_no_probability_is_the_least_likely(imported, write_log):
    """vLLM writes −9999 for what is masked, whose probability is 0 in 64 bits."""
    top = {"B": [("B", -0.1), ("A", -9999.0), ("the", -2.5)]}
    found = imported(write_log([inspect_sample(1, "B", "B", top=top)]))
    assert found.logprobs.tolist() == [[-9999.0, -0.1, -9999.0]]


def test_answers_that_inspect_did_not_find(tmp_path, imported, refused, write_log):
    """ "I cannot Answer" holds " A", but answers nothing."""
    refusal = inspect_sample(2, "C", "I", " cannot", " A", "nswer")
    refusal["scores"] = {"choice": {"value": "I", "answer": ""}}
    unparsed = inspect_sample(3, "C", "I", " say", " A")
    unparsed["scores"] = {"choice": {"value": "C", "answer": ""}}
    answered = inspect_sample(1, "B", " B")
    answered["scores"] = {"choice": {"value": "C", "answer": "B"}}
    found = imported(write_log([answered, refusal, unparsed]))
    assert found.ids == ["1"]
    assert records.meta(found.path)["settings"]["unanswered"] == 2
    none = write_log([refusal, unparsed])
    message = refused("import", none, "--out", tmp_path / "none.jsonl")
    assert "none of 2 samples can be used: 2 samples without an answer" in message


BEFORE = [("B", math.log(0.7)), ("A", math.log(0.1)), ("C", math.log(0.1)), ("the", -9.0)]


@pytest.mark.parametrize(
    "reply",
    [
        # The last line that is nothing but an answer, and not a later sentence.
        ("ANSWER", ":", " A", "\n", "ANSWER", ":", "[B]", "\n", "Not", " ANSWER", ":", " C", " or"),
        ("ANSWER", "[:B]", "."),
        ("ANSWER", ":", "[ (B)]"),
        ("answer", ":", "[ b]"),
        ("▁ANSWER", ":", "[▁B]", "<0x0A>", "because", "▁of", "▁A"),
        ("[B]", ".", " Because", " A", " is", " not", "."),  # of the scorer `pattern`
    ],
    ids="".join,
)
def test_the_letter_that_inspects_scorer_takes(imported, write_log, reply):
    """The last letter anywhere was taken. The answer's token stands in brackets here."""
    marked = next(token for token in reply if token.startswith("["))
    answer = marked.strip("[]")
    letter = "b" if answer == " b" else "B"
    top = {answer: [(answer.replace(letter, text), logprob) for text, logprob in BEFORE]}
    if letter == "b":
        top[answer] = [(f" {text.lower()}", logprob) for text, logprob in BEFORE]
    tokens = [token.strip("[]") if token == marked else token for token in reply]
    sample = inspect_sample(1, "B", *tokens, top=top)
    sample["scores"] = {"choice": {"value": "C", "answer": "B", "explanation": ""}}
    (logprobs,) = imported(write_log([sample])).logprobs
    assert logprobs == pytest.approx([math.log(p) for p in (0.1, 0.7, 0.1)])


def test_an_answer_that_may_be_at_two_places_is_left_out(imported, write_log):
    sample = inspect_sample(1, "B", "B", " is", " true", ",", " so", " B")
    found = imported(write_log([sample, inspect_sample(2, "B", "B")]))
    assert found.ids == ["2"]
    assert records.meta(found.path)["settings"]["ambiguous"] == 1


def test_samples_that_ended_in_an_error_are_left_out(imported, write_log):
    """As `--no-fail-on-error` leaves them, in a log that is a success."""
    errored = inspect_sample(1, "B")
    errored.update(error={"message": "RuntimeError('x')"}, scores={}, output={"choices": []})
    found = imported(write_log([errored, inspect_sample(3, "B", "B")]))
    assert found.ids == ["3"]
    assert records.meta(found.path)["settings"]["errored"] == 1


def test_one_of_several_epochs_is_asked_for(tmp_path, imported, refused, write_log):
    """All but the first were dropped without a word."""
    epochs = [{**inspect_sample(1, "B", "B"), "epoch": 1}]
    epochs.append({**inspect_sample(1, "A", "B"), "epoch": 2})
    log = write_log(epochs)
    command = ["import", log, "--out", tmp_path / "r.jsonl"]
    assert "give --epoch 1, or another up to 2" in refused(*command)
    assert "no epoch 3" in refused(*command, "--epoch", "3")
    assert imported(log, "--epoch", "2").labels.tolist() == [0]


SHUFFLED = {**inspect_sample(1, "A", " B"), "scores": {"choice": {"answer": "C"}}}
# The letter's probability is known, and it is that of another choice than the target's.
SAID_TO_BE_SHUFFLED = {
    **inspect_sample(1, "A", " B"),
    "scores": {
        "choice": {
            "answer": "B",
            "explanation": "Choices were shuffled before generating a response, …",
        }
    },
}


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (inspect_sample(1, "BC", "A"), "target is 'BC', expected one of A, B, C"),
        (inspect_sample(1, "A", "yes"), "none of its tokens is a choice's letter"),
        (inspect_sample(1, "A"), "no top log-probabilities"),
        ({**inspect_sample(1, "A"), "choices": None}, "its scores are none"),
        (SHUFFLED, "answers B, C by its score"),
        (SAID_TO_BE_SHUFFLED, "shuffle them by the data set's `shuffle_choices`"),
        (
            inspect_sample(1, "A", "A", top={"A": [("A", -0.5), ("B", -1.0)]}),
            "letters sum to 1.34, since those beyond the top 2 tokens",
        ),
        (inspect_sample(1, "A", "ANSWER: A"), "'A' is part of the token 'ANSWER: A'"),
    ],
)
def test_inspects_samples_that_are_no_multiple_choice(
    tmp_path, refused, write_log, sample, expected
):
    message = refused("import", write_log([sample]), "--out", tmp_path / "r.jsonl")
    assert expected in message
    assert "top log-probabilities where it answers" in message


def test_logs_of_inspect_that_cannot_be_used(tmp_path, refused, write_log):
    command = ["import", tmp_path / "log.json", "--out", tmp_path / "r.jsonl"]
    write_log([], status="cancelled")
    assert "status is 'cancelled'" in refused(*command)
    write_log(None)
    assert "inspect log convert" in refused(*command)


def test_logs_of_one_name_are_both_in_the_sidecar(tmp_path, run):
    """Two runs of lm-eval in one folder each, into one file."""
    files = []
    for number, part in enumerate(("first", "second")):
        folder = tmp_path / part / "model"  # the folder's name is the model's
        folder.mkdir(parents=True)
        samples = read_lines(MMLU)
        for sample in samples:
            sample["doc_id"] += 1000 * number
        files.append(write_lines(folder / "samples_mmlu_abstract_algebra.jsonl", samples))
    out = tmp_path / "mmlu.jsonl"
    run("import", *files, "--out", out)
    digests = records.meta(out)["settings"]["samples"]
    assert sorted(digests.values()) == sorted(sha256(file) for file in files)


# --- Written answers ---


def written_sample(number: int, answer: str, value: object, *logprobs: float, epoch: int = 1):
    """A sample of Inspect's log whose answer the scorer `match` has read."""
    content = [{"token": "x", "logprob": logprob} for logprob in logprobs]
    return {
        "id": number,
        "epoch": epoch,
        "input": f"Which {number}?",
        "target": ["Paris", "City of Paris"],
        "output": {"choices": [{"logprobs": {"content": content}}], "completion": answer},
        "scores": {"match": {"value": value, "answer": answer}},
    }


def test_inspects_written_answers(tmp_path, run, write_log):
    samples = [
        written_sample(1, "Paris", "C", -0.1, -0.2),
        written_sample(2, "London", "I", -1.0),
        written_sample(1, "the paris.", "C", -0.3, epoch=2),
        written_sample(2, "Berlin", "C", -0.7, epoch=2),
    ]
    out = tmp_path / "r.jsonl"
    run("import", write_log(samples), "--out", out, "--epoch", "1")
    assert records.read(out, "sum").logprobs.tolist() == [[pytest.approx(-0.3)], [-1.0]]
    assert records.read(out).logprobs.tolist() == [[pytest.approx(-0.15)], [-1.0]]
    assert [row["agreement"] for row in read_lines(out)] == [1.0, 0.0]
    assert "2 questions, written answers" in run("metrics", out).out


def test_lm_evals_repeats_are_samples(tmp_path, imported, refused):
    """As lm-eval 0.4.13 logs `generate_until` with `repeats: 3`."""
    replies = [["Paris", "paris", "Rome"], ["Bonn", "Berlin", "Bonn"]]
    rows = []
    for number, texts in enumerate(replies):
        request = {"arg_0": "Q: …", "arg_1": {"until": ["\n"], "temperature": 1.0}}
        rows.append(
            {
                "doc_id": number,
                "doc": {},
                "target": "['Paris']",
                "arguments": {"gen_args_0": request},
                "resps": [texts],
                "filtered_resps": texts[:1],
                "filter": "plain",
                "exact_match": float(number == 0),
            }
        )
    found = imported(write_lines(tmp_path / "samples_capitals.jsonl", rows))
    out = found.path
    assert found.labels.tolist() == [0, 1]
    assert found.logprobs.tolist() == [[pytest.approx(math.log(0.5))]] * 2
    assert "no 'sum'" in refused("metrics", out, "--normalise", "sum")
    said = refused("temperature", out, out, "--out", tmp_path / "t.jsonl")
    assert "normalise 'agreement'" in said


ONE_REPLY = {
    "doc_id": 0,
    "doc": {},
    "arguments": {"gen_args_0": {"arg_0": "Q", "arg_1": {}}},
    "resps": [["Paris"]],
    "filtered_resps": ["Paris"],
    "exact_match": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "nothing tells how sure the model is of its answer"),
        ({"resps": [["I say Rome", "Paris"]], "filtered_resps": ["Rome"]}, "makes 'Rome' of its"),
        ({"resps": [["Paris", "Rome"]], "exact_match": 0.3}, "expected one of exact_match"),
    ],
)
def test_lm_evals_answers_of_which_nothing_is_known(tmp_path, refused, changes, expected):
    log = write_lines(tmp_path / "samples_capitals.jsonl", [{**ONE_REPLY, **changes}])
    assert expected in refused("import", log, "--out", tmp_path / "r.jsonl")


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (written_sample(1, "Paris", "C"), "nothing tells how sure the model is of its answer"),
        (written_sample(1, "Paris", 0.4, -0.1), "match scores 0.4, expected C or I"),
    ],
)
def test_inspects_answers_of_which_nothing_is_known(tmp_path, refused, write_log, sample, expected):
    assert expected in refused("import", write_log([sample]), "--out", tmp_path / "r.jsonl")
