"""YAML that may be somebody else's: it is read in time, or one line says where it is none."""

from typing import Any

import yaml

from calibeval.io import InputError

# With libyaml it is ten times as fast.
SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MOST_BYTES = 1 << 20  # of a file
MOST_LEVELS = 100  # of lists and mappings in each other; Python walks through about 1,000
# Of values without a tag of their own, such as `!!binary` or `!!set`.
PLAIN_TAGS = {"str", "int", "float", "bool", "null", "timestamp", "seq", "map"}
# What PyYAML raises for a value that is not of the type that its tag or its form says, such as the
# 30th of February.
VALUE_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def parse(text: str, source: str, loader_class: Any = SafeLoader) -> tuple[Any, yaml.Node | None]:
    """The value of a YAML text, and its root node, which is None where the text is empty.

    Raises `InputError`, beginning with `source`, where the text is no YAML; where a key is no
    single word; where lists and mappings are nested too deep; for aliases (`*name`), with which a
    few lines stand for billions of values; and for values of other kinds, which hide texts.
    """
    loader = loader_class(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _refuse_what_is_not_plain(node, source)
        return loader.construct_document(node), node
    except yaml.MarkedYAMLError as error:
        place = source if error.problem_mark is None else _place(error.problem_mark, source)
        raise InputError(f"{place}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:  # characters that YAML does not allow
        raise InputError(f"{source}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise InputError(f"{source}: not YAML: nested too deep") from error
    except InputError:
        raise
    except VALUE_ERRORS as error:
        raise InputError(f"{source}: not YAML: {error}") from error
    finally:
        loader.dispose()


def _place(mark: yaml.Mark, source: str) -> str:
    return f"{source}:{mark.line + 1}:{mark.column + 1}"


def _refuse_what_is_not_plain(root: yaml.Node, source: str) -> None:
    """Raise `InputError` for a node in two places, too deep, or of another kind; for odd keys."""
    known = set()
    nodes = [(root, 0)]
    while nodes:
        node, level = nodes.pop()
        if level > MOST_LEVELS:
            raise InputError(f"{_place(node.start_mark, source)}: not YAML: nested too deep")
        if id(node) in known:
            place = _place(node.start_mark, source)
            raise InputError(f"{place}: is used again by an alias: write it where it is used")
        known.add(id(node))
        if node.tag.removeprefix("tag:yaml.org,2002:") not in PLAIN_TAGS:
            place = _place(node.start_mark, source)
            raise InputError(
                f"{place}: is of the kind {node.tag}: write a text, in quotes, or a number"
            )
        if isinstance(node, yaml.SequenceNode):
            nodes.extend((item, level + 1) for item in node.value)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    place = _place(key.start_mark, source)
                    raise InputError(f"{place}: expected a word as a key, found a list or keys")
                nodes.extend(((key, level + 1), (value, level + 1)))
