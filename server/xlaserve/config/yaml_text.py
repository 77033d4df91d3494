"""YAML for configurations: what nobody means is an error, and its size is bounded.

Over PyYAML's safe loader: a key stands once and is text, `2024-13-45` is text and not an invalid date, a number has at
most 64 bits, and aliases do not add up to more than MAX_NODES values. Only true and false are booleans, as in YAML
1.2: `off` is text, and a value that a setting may have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import yaml

MAX_NODES: Final = 100_000
"""Values, each counted as often as aliases repeat it: a page of them can stand for more than memory holds."""
_TIMESTAMP: Final = "tag:yaml.org,2002:timestamp"
_BOOL: Final = "tag:yaml.org,2002:bool"
_INT: Final = "tag:yaml.org,2002:int"
_MERGE: Final = "tag:yaml.org,2002:merge"


def parse(text: str) -> Any:
    """Returns what `text` stands for. Raises ValueError with one line that says what is wrong, and where."""
    return _read(text, yaml.load)


def lines(text: str) -> Callable[[Sequence[int | str]], int | None]:
    """Returns what finds the line, from 1, in which a value of `text` stands, by the keys and indexes that lead to it.

    Where it does not stand there, as a default does not, the line is that of the innermost value around it; None where
    there is none. Raises ValueError as `parse` does.
    """
    root = _read(text, yaml.compose)

    def line_of(place: Sequence[int | str]) -> int | None:
        node, line = root, None
        for part in place:
            if isinstance(node, yaml.MappingNode):
                at, node = next((entry for entry in node.value if entry[0].value == part), (None, None))
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                at = node = node.value[part]
            else:
                break
            line = line if at is None else at.start_mark.line + 1
        return line

    return line_of


def _read(text: str, how: Callable[[str, type[yaml.SafeLoader]], Any]) -> Any:
    try:
        return how(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{error.problem}{where}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("expected fewer levels of nesting") from None


class _Loader(yaml.SafeLoader):
    """The safe loader, and stricter."""

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        # Before anything is made of it: merging changes nodes.
        if node is not None and _check(node, {}) > MAX_NODES:
            raise yaml.constructor.ConstructorError(
                None, None, f"expected at most {MAX_NODES} values, aliases included", node.start_mark
            )
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, OverflowError):  # of what looks like a number, say
            raise _wrong("a value that can be read", node) from None

    def construct_number(self, node: yaml.ScalarNode) -> int:
        """Returns an int."""
        value: int = self.construct_yaml_int(node)
        if value.bit_length() > 64:
            raise _wrong("a number of at most 64 bits", node)
        return value


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_TIMESTAMP, _BOOL)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_constructor(_INT, _Loader.construct_number)


def _check_keys(node: yaml.MappingNode) -> None:
    """Raises ConstructorError for a key that is given twice, or that is no text."""
    seen = set()
    for key, _ in node.value:
        if key.tag == _MERGE:
            continue
        if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
            raise _wrong("text as a key; put it in quotation marks", key)
        if key.value in seen:
            raise _wrong("each key once", key)
        seen.add(key.value)


def _check(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Returns how many values `node` stands for. Raises ConstructorError for what is never meant."""
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise _wrong("no alias within what it stands for", node)
        return sizes[id(node)]
    sizes[id(node)] = 0
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
    elif isinstance(node, yaml.ScalarNode) and "\0" in node.value:
        raise _wrong("text without null characters", node)
    sizes[id(node)] = 1 + sum(_check(child, sizes) for child in _children(node))
    return sizes[id(node)]


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value


def _wrong(expected: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    got = f", got {node.value[:40]}" if isinstance(node, yaml.ScalarNode) and node.value.isprintable() else ""
    return yaml.constructor.ConstructorError(None, None, f"expected {expected}{got}", node.start_mark)
