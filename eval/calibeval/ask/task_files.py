"""Task files: where a task's questions are, how a row becomes one, and how it is asked.

A task is a YAML file, `TaskFile`. Those in the folder `builtin_tasks` are known by name; any other
is given by its path, and read by the same code.

Texts in it may hold Jinja. A text that is one `{{ expression }}` gives the expression's value: a
list, a number. Other texts give text: "Question: {{ goal }}\\nAnswer:". In `row` every column of a
row is a variable, and `row` is the row as a whole, for columns such as `row['Best Answer']`.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from pydantic import BeforeValidator, Field, model_validator

from calibeval import yaml_text
from calibeval.io import InputError, read_text
from calibeval.validation import Seq, Strict, checked

BUILTIN_FOLDER = Path(__file__).parent / "builtin_tasks"
BUILTIN_NAMES = tuple(sorted(path.stem for path in BUILTIN_FOLDER.glob("*.yaml")))
SUFFIXES = (".yaml", ".yml")
# One expression and nothing else, whose value is wanted and not its text.
EXPRESSION = re.compile(r"\s*\{\{(?P<expression>(?:(?!\}\}|\{\{).)*)\}\}\s*", re.DOTALL)

ScoringName = Literal["letters", "continuation", "generate"]
# By what the log-probability of a choice's text is divided; "sum" divides by nothing. An answer
# that the model writes is divided by its tokens or by nothing.
Normaliser = Literal["sum", "bytes", "characters", "tokens"]


def clean_markers(text: str) -> str:
    """Text without WikiHow's markers: a title ends a sentence, other brackets vanish."""
    text = text.replace(" [title]", ". ")
    return re.sub(r" {2,}", " ", _without_brackets(text)).strip()


def clean_markers_as_lm_eval(text: str) -> str:
    """The same as lm-evaluation-harness does it: of more than two spaces some stay."""
    text = text.strip().replace(" [title]", ". ")
    return _without_brackets(text).replace("  ", " ")


def _without_brackets(text: str) -> str:
    """The text without what stands in brackets within a line."""
    lines = []
    for line in text.split("\n"):
        # A bracket that is never closed would have the pattern read all that follows, and so on at
        # each next one: it stands in the last part.
        closed, bracket, rest = line.rpartition("]")
        lines.append(re.sub(r"\[.*?\]", "", closed + bracket) + rest)
    return "\n".join(lines)


# What a template may be made of. It has no loops, assignments, products or formats: each part then
# takes a time and a memory in proportion to what it is given, so a template is as bounded as the
# number of its parts and the characters that it names.
PARTS = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.CondExpr),
    *(nodes.Const, nodes.Name, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Call, nodes.Filter, nodes.Test),
    *(nodes.Keyword, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not),
    *(nodes.Concat, nodes.Add, nodes.Sub, nodes.Div, nodes.Neg),
)
MOST_PARTS = 64
LONGEST_TEMPLATE = 10_000  # characters, which Jinja takes a while to read
MOST_CHARACTERS = 1 << 20  # of the columns that a template names, and of what `replace` makes
METHODS = (
    *("capitalize", "count", "endswith", "find", "get", "index", "lower", "lstrip", "partition"),
    *("removeprefix", "removesuffix", "rstrip", "split", "splitlines", "startswith", "strip"),
    *("title", "upper"),
)
MOST_STRIPPED = 100  # characters that `strip` is told, each of which it may compare with each
JINJA_FILTERS = (
    *("capitalize", "d", "default", "first", "float", "last", "length", "list", "lower", "reject"),
    *("select", "string", "title", "upper"),
)
TESTS = (
    *("==", "boolean", "defined", "eq", "equalto", "false", "float", "integer", "mapping", "ne"),
    *("none", "number", "sequence", "string", "true", "undefined"),
)


def replace(text: Any, old: str, new: str) -> str:
    """Text with all of `old` replaced; ValueError where that makes more than it may."""
    text = str(text)
    _refuse_longer(len(text) + text.count(old) * len(new))
    return text.replace(old, new)


def join(values: Iterable[Any], separator: str = "") -> str:
    """The values' texts with a separator between them; ValueError as of `replace`."""
    texts = [str(value) for value in values]
    _refuse_longer(sum(map(len, texts)) + len(texts) * len(separator))
    return separator.join(texts)


def _refuse_longer(characters: int) -> None:
    if characters > MOST_CHARACTERS:
        raise ValueError(f"is of {characters:,} characters, and may be of {MOST_CHARACTERS:,}")


@jinja2.pass_environment
def map_items(
    environment: jinja2.Environment,
    values: Iterable[Any],
    filter_name: str | None = None,
    *,
    attribute: str | int | None = None,
) -> list[Any]:
    """What one filter makes of each value, or one attribute of each.

    Jinja's own `map` takes arguments for the filter, and so puts a long text in the place of each.
    """
    if filter_name is None:
        return [environment.getitem(value, attribute) for value in values]
    return [environment.call_filter(filter_name, value) for value in values]


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja of `PARTS`, `METHODS`, a few filters and tests, and no functions."""

    def __init__(self) -> None:
        super().__init__(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        self.globals.clear()
        self.tests = {name: self.tests[name] for name in TESTS}
        self.filters = {name: self.filters[name] for name in JINJA_FILTERS}
        self.filters["int"] = int  # Jinja's own makes 0 of what is no number
        self.filters["trim"] = lambda text: str(text).strip()
        self.filters["replace"] = replace
        self.filters["join"] = join
        self.filters["map"] = map_items
        self.filters["clean_markers"] = clean_markers
        self.filters["clean_markers_as_lm_eval"] = clean_markers_as_lm_eval

    def call(self, context: Any, method: Any, /, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of a text, list or mapping, as each `x.method(…)` of a template does."""
        if not isinstance(method, jinja2.Undefined):
            name = getattr(method, "__name__", "")
            owner = getattr(method, "__self__", None)
            if type(owner) not in (str, list, tuple, dict) or name not in METHODS:
                raise SecurityError(f"{name}() is not there; there are {', '.join(METHODS)}")
            if name.endswith("strip") and any(len(text) > MOST_STRIPPED for text in arguments):
                raise SecurityError(f"{name}() takes up to {MOST_STRIPPED} characters")
        return super().call(context, method, *arguments, **keywords)


ENVIRONMENT = _Environment()

# What filling a template raises: Jinja's own errors, and those of the expressions in it.
FILLING_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class UnknownColumn(ValueError):
    """A template asks for a column that a row does not have.

    Attributes:
        column: The column's name.
    """

    def __init__(self, column: str):
        super().__init__(f"no column {column!r}")
        self.column = column


class Template:
    """A text with Jinja, whose value depends on variables."""

    def __init__(self, text: str):
        if len(text) > LONGEST_TEMPLATE:
            raise ValueError(f"has {len(text):,} characters, and may have {LONGEST_TEMPLATE:,}")
        self.text = text
        self._evaluate: Callable[..., Any]
        expression = EXPRESSION.fullmatch(text)
        try:
            tree = ENVIRONMENT.parse(text)
            _refuse_parts(tree)
            if expression is not None:
                self._evaluate = ENVIRONMENT.compile_expression(
                    expression["expression"].strip(), undefined_to_none=False
                )
            else:
                self._evaluate = ENVIRONMENT.from_string(text).render
        except jinja2.TemplateAssertionError as error:
            names = ", ".join(sorted({*ENVIRONMENT.filters, *ENVIRONMENT.tests}))
            raise ValueError(f"{error} There are {names}") from error
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"not Jinja: {error}") from error
        except (RecursionError, MemoryError, SyntaxError) as error:  # of the Python made of it
            raise ValueError("not Jinja: nested too deep, or too long") from error
        self.variables = jinja2.meta.find_undeclared_variables(tree)
        """The names of the variables that the text asks for."""

    def __call__(self, variables: Mapping[str, Any]) -> Any:
        """The value; one of `FILLING_ERRORS` where it cannot be made.

        Of these, `UnknownColumn` is raised where a variable is not there, or where `row` does not
        have what is asked of it. What an expression itself raises, such as a `TypeError`, passes
        through.
        """
        named = [variables[name] for name in self.variables if name in variables]
        if len(str(named)) > MOST_CHARACTERS:
            raise ValueError(
                f"{self.text!r}: what it names has more than {MOST_CHARACTERS:,} characters"
            )
        try:
            value = self._evaluate(variables)
            if isinstance(value, jinja2.Undefined):
                str(value)  # raises, and names the variable
        except jinja2.UndefinedError as error:
            column = self._unknown_column(str(error))
            if column is not None:
                raise UnknownColumn(column) from error
            raise ValueError(f"{self.text!r}: {error}") from error
        except jinja2.TemplateError as error:
            raise ValueError(f"{self.text!r}: {error}") from error
        return value

    def _unknown_column(self, message: str) -> str | None:
        """The column that Jinja's message says is not there; None where it is about another value.

        Of `row.NAME` it says "'dict object' has no attribute 'NAME'", as of any other value.
        """
        variable = re.fullmatch(r"'(?P<name>.*)' is undefined", message)
        if variable is not None:
            return variable["name"]
        attribute = re.fullmatch(r"'dict object' has no attribute '(?P<name>.*)'", message)
        if attribute is None:
            return None
        name = attribute["name"]
        spellings = (f"row.{name}", f"row['{name}']", f'row["{name}"]')
        return name if any(spelling in self.text for spelling in spellings) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Template":
        return self  # it never changes, and pydantic copies the defaults of fields


def _refuse_parts(tree: nodes.Template) -> None:
    """Raise ValueError for a template that has parts beyond `PARTS`, or too many."""
    count = 0
    parts: list[nodes.Node] = [tree]
    while parts:
        part = parts.pop()
        count += 1
        if not isinstance(part, PARTS):
            raise ValueError(
                f"{type(part).__name__}: a task's template has no loops, no assignments, and of "
                "operators no *, %, // and **"
            )
        if count > MOST_PARTS:
            raise ValueError(f"has more than {MOST_PARTS} names, texts and operators")
        parts.extend(part.iter_child_nodes())


def _template(value: Any) -> Any:
    if isinstance(value, str):
        return Template(value)
    if value is None or isinstance(value, Template):
        return value
    raise ValueError('expected a text; YAML reads no, yes and 1 as something else, so write "no"')


def _template_or_list(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_template(part) for part in value)
    return _template(value)


Jinja = Annotated[Template, BeforeValidator(_template)]
JinjaOrList = Annotated[Template | tuple[Template, ...], BeforeValidator(_template_or_list)]


class _TemplatesInside(Strict, arbitrary_types_allowed=True):
    """A model of texts with Jinja."""


class DataSource(_TemplatesInside):
    """Where a task's rows are, unless `--data` says otherwise, and in what form."""

    hub: str | None = None
    """A data set of the hub, owner/name."""
    path: str | None = None
    """A file or folder, from the task file's own folder."""
    config: Jinja | None = None
    """The hub's configuration; `{{ language }}` is what `--language` gives."""
    files: Jinja = Template("{{ split }}.jsonl")
    """Of a folder: the name of a split's file (.jsonl or .csv), or with `{{ subject }}` of each
    subject's; `{{ language }}` is what `--language` gives."""
    columns: Seq[str] | None = None
    """Of CSV files that have no line of headings."""
    optional: Seq[str] = ()
    """Columns that a row may lack; they are null then."""
    hub_splits: dict[str, str] = Field(default_factory=dict)
    """The hub's names of splits that are called otherwise in the files."""

    def completed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with null in the columns that it may lack."""
        absent: dict[str, Any] = dict.fromkeys(self.optional)
        return {**absent, **row}

    @property
    def has_file_per_subject(self) -> bool:
        """Whether a split has one file for each subject, named by the subject."""
        return "subject" in self.files.variables

    @property
    def has_languages(self) -> bool:
        """Whether the data are chosen by a language."""
        templates = [self.files]
        if self.config is not None:
            templates.append(self.config)
        return any("language" in template.variables for template in templates)


class RowTemplates(_TemplatesInside):
    """How a row becomes a question; a key that is not given is the row's column of that name."""

    question: Jinja | None = None
    choices: JinjaOrList | None = None
    answer: Jinja | None = None
    """An index from 0, a letter, or a choice's text."""
    id: Jinja | None = None
    subject: Jinja | None = None
    context: Jinja | None = None
    """What texts continue, where it is not the question between `Question:` and `Answer:`."""
    endings: JinjaOrList | None = None
    """The texts, where they are not the choices."""
    aliases: JinjaOrList | None = None
    """Of answers that the model writes: all that are right; examples show the first."""

    def values(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of `questions.QuestionRow` that a row has, by template or as a column."""
        return {
            key: self.value(key, row)
            for key in RowTemplates.model_fields
            if getattr(self, key) is not None or key in row
        }

    def value(self, key: str, row: Mapping[str, Any]) -> Any:
        """The value of one key; None where it has no template and the row no such column."""
        template = getattr(self, key)
        if template is None:
            return row.get(key)
        variables = {**row, "row": row}
        try:
            if isinstance(template, Template):
                return template(variables)
            return [part(variables) for part in template]
        except UnknownColumn:
            raise
        except FILLING_ERRORS as error:
            raise ValueError(f"row.{key}: {error}") from error

    def origin(self, key: str) -> str:
        """The template that makes a key's value, as the task file has it; else nothing."""
        template = getattr(self, key, None)
        if template is None:
            return ""
        if isinstance(template, Template):
            return template.text
        return f"[{', '.join(part.text for part in template)}]"


class ExamplesRule(Strict):
    """Where few-shot examples come from, unless `--examples` names a file."""

    split: str | None = None
    """The split whose first rows they are; without it, `--examples` is needed."""
    of_subject: Literal["always", "where_it_has_any", "never"] = "where_it_has_any"
    """Whether a question's examples are of its own subject."""
    else_first_asked: bool = False
    """Where the data have no such split, the first of the asked questions are the examples; they
    are not asked then."""


class HeaderTemplates(_TemplatesInside):
    """What stands before the examples, as `questions.Headers` when the variables are filled in.

    `topic` and `subject` are variables.
    """

    letters: Jinja = Template(
        # Two spaces before the topic: hendrycks/test ends this sentence's "about" with one, and
        # puts another before each word of the topic.
        "The following are multiple choice questions (with answers) about  {{ topic }}.\n\n"
    )
    letters_in_chat: Jinja | None = None
    """Where it is another in a chat."""
    continuation: Jinja = Template("")


class TaskFile(_TemplatesInside):
    """A task."""

    data: DataSource = DataSource()
    split: str = "test"
    """The split that is asked."""
    other_split: str | None = None
    """One to choose and to fit on. `check` names it for a temperature, and a sweep that selects on
    this task must ask it. It may be `examples.split`, as boolq's is, only where that has many more
    rows than a prompt has examples: rows that are shown as examples are not asked."""
    row: RowTemplates = RowTemplates()
    examples: ExamplesRule = ExamplesRule()
    topic: Jinja = Template("{{ subject | replace('_', ' ') }}")
    headers: HeaderTemplates = HeaderTemplates()
    scoring: ScoringName = "letters"
    """The convention of the task's users."""
    normalise: Normaliser = "sum"
    """By what texts' log-probabilities are divided; of written answers "tokens" unless given."""
    stop: Annotated[Seq[str], Field(min_length=1)] = ("\n",)
    """Where a written answer ends, if the model does not end it before."""
    max_tokens: Annotated[int, Field(ge=1)] = 32
    """The most tokens of a written answer."""
    shots: Annotated[int, Field(ge=0)] | None = None
    """Few-shot examples; 5, by continuation 0, unless given."""
    delimiter: str | None = None
    """What stands between a question and its answer, such as "" for Chinese: a space unless given,
    and nothing where the question ends in white space. In a chat nothing precedes an answer that
    is a turn."""
    strips_in_chat: bool = False
    """Whether a chat's questions lose white space around them, as lm-evaluation-harness's do."""
    letters: bool = True
    """Whether letters may be scored; not where the right choice is always the same one."""

    @model_validator(mode="before")
    @classmethod
    def _written_answers_are_divided_by_tokens(cls, keys: Any) -> Any:
        if isinstance(keys, dict) and keys.get("scoring") == "generate":
            return {"normalise": "tokens", **keys}
        return keys

    @model_validator(mode="after")
    def _divides_by_lengths_that_there_are(self) -> "TaskFile":
        of_written = ("tokens", "sum")
        if self.scoring == "generate" and self.normalise not in of_written:
            raise ValueError(f"normalise is {self.normalise!r}, expected tokens or sum")
        if self.scoring != "generate" and self.normalise == "tokens":
            raise ValueError("normalise is 'tokens', which is for scoring: generate")
        return self


def is_task_name(task: str) -> bool:
    """Whether this is a built-in task's name or could be a task file's path."""
    return task in BUILTIN_NAMES or task.endswith(SUFFIXES)


def read(task: str) -> TaskFile:
    """The task of a built-in name or of a file; `InputError` names file, key and value."""
    if task in BUILTIN_NAMES:
        return _read_builtin(task)
    return _read_file(Path(task))


@cache
def _read_builtin(name: str) -> TaskFile:
    return _read_file(BUILTIN_FOLDER / f"{name}.yaml")


def _read_file(path: Path) -> TaskFile:
    values, _ = yaml_text.parse(read_text(path, yaml_text.MOST_BYTES), str(path))
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected the keys of a task, such as data, row and scoring")
    return checked(TaskFile, values, str(path))


def leaves_folder(path: str) -> bool:
    """Whether a path below a folder leads out of it: a task file may be anybody's."""
    return os.path.isabs(path) or os.path.normpath(path).split(os.sep)[0] == os.pardir


def default_data(task: str) -> str | None:
    """Where a task's file says that its data are: `hub:NAME`, a path, or None."""
    source = read(task).data
    if source.path is not None:
        path = Path(task).parent / source.path
        folder = os.path.realpath(Path(task).parent)
        if leaves_folder(source.path) or not Path(os.path.realpath(path)).is_relative_to(folder):
            raise InputError(
                f"{task}: data.path: {source.path} lies outside the task file's folder and would "
                f"be read: if you mean it, --data {os.path.realpath(path)}"
            )
        return str(path)
    return f"hub:{source.hub}" if source.hub is not None else None
