"""Reads protobuf's text format without a schema, so that unknown fields can be named."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from xlaserve.errors import ConfigError

Scalar = str | int | float | bool
MAX_DEPTH: Final = 64

_TOKEN: Final = re.compile(
    r"""(?P<space>[\s,;]+|\#[^\n]*)
    | (?P<string> "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*')
    | (?P<word>[\w.+-]+)
    | (?P<mark>[{}<>\[\]:/])""",
    re.VERBOSE,
)
_ESCAPE: Final = re.compile(r"\\(?:x(?P<hex>[0-9a-fA-F]{1,2})|(?P<octal>[0-7]{1,3})|(?P<letter>.))")
_LETTERS: Final = {"n": "\n", "r": "\r", "t": "\t"}
_ENDS: Final = {"{": "}", "<": ">"}


class Message:
    """A message: its fields are taken out one by one, and what is left can be named."""

    def __init__(self) -> None:
        self._fields: dict[str, list[Scalar | Message]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def add(self, name: str, values: Sequence[Scalar | Message]) -> None:
        """Adds values to a field."""
        self._fields.setdefault(name, []).extend(values)

    def scalars(self, name: str) -> list[Scalar]:
        """Takes the values of a field."""
        return [value for value in self._fields.pop(name, []) if not isinstance(value, Message)]

    def text(self, name: str) -> str:
        """Takes the last value of a field as text, empty where there is none."""
        values = self.scalars(name)
        return str(values[-1]) if values else ""

    def number(self, name: str, default: int = 0) -> int:
        """Takes the last value of a field as an integer; of a wrapper as well, `{value: 3}`."""
        values = self._fields.pop(name, [])
        last = values[-1] if values else default
        found = last.number("value", default) if isinstance(last, Message) else last
        if not isinstance(found, int):
            raise ConfigError(f"{name}: expected an integer, got {found!r}")
        return found

    def integers(self, name: str) -> list[int]:
        """Takes the integers of a field."""
        return [value for value in self.scalars(name) if isinstance(value, int)]

    def messages(self, name: str) -> list[Message]:
        """Takes the messages of a field."""
        return [value for value in self._fields.pop(name, []) if isinstance(value, Message)]

    def message(self, name: str) -> Message:
        """Takes the last message of a field, an empty one where there is none."""
        return (self.messages(name) or [Message()])[-1]

    def left(self) -> list[str]:
        """Returns the names of the fields that were not taken."""
        return [*self._fields]


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def parse(text: str) -> Message:
    """Returns the message that `text` holds. Raises ConfigError with the line of what is wrong."""
    return _Parser(_tokens(text)).message("", 0)


def _tokens(text: str) -> Iterator[_Token]:
    position, line = 0, 1
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ConfigError(f"line {line}: expected protobuf's text format, got {text[position : position + 20]!r}")
        assert match.lastgroup is not None
        if match.lastgroup != "space":
            yield _Token(match.lastgroup, match.group(), line)
        line += match.group().count("\n")
        position = match.end()
    yield _Token("end", "", line)


class _Parser:
    def __init__(self, tokens: Iterator[_Token]) -> None:
        self._tokens = tokens
        self._next = next(tokens)

    def message(self, end: str, depth: int) -> Message:
        """Returns the message up to and including `end`."""
        if depth > MAX_DEPTH:
            raise self._error(f"at most {MAX_DEPTH} levels")
        found = Message()
        while self._next.text != end:
            name = self._name()
            if self._next.text == ":":
                self._take()
            found.add(name, self._values(depth))
        self._take()
        return found

    def _name(self) -> str:
        if self._next.text == "[":  # of an extension, or of what an Any holds
            name = ""
            while self._next.text != "]" and self._next.kind != "end":
                name += self._take().text
            self._expect("]")
            return f"{name}]"
        if self._next.kind != "word":
            raise self._error("a field's name")
        return self._take().text

    def _values(self, depth: int) -> list[Scalar | Message]:
        if self._next.text == "[":
            self._take()
            values: list[Scalar | Message] = []
            while self._next.text != "]":
                values.append(self._value(depth))
            self._take()
            return values
        return [self._value(depth)]

    def _value(self, depth: int) -> Scalar | Message:
        token = self._take()
        if token.kind == "string":
            text = _unescaped(token.text)
            while self._next.kind == "string":
                text += _unescaped(self._take().text)
            return text
        if token.text in _ENDS:
            return self.message(_ENDS[token.text], depth + 1)
        if token.kind == "word":
            return _scalar(token.text)
        raise ConfigError(f"line {token.line}: expected a value, got {token.text or 'the end'!r}")

    def _take(self) -> _Token:
        token = self._next
        self._next = next(self._tokens, token)
        return token

    def _expect(self, text: str) -> None:
        if self._next.text != text:
            raise self._error(repr(text))
        self._take()

    def _error(self, expected: str) -> ConfigError:
        return ConfigError(f"line {self._next.line}: expected {expected}, got {self._next.text or 'the end'!r}")


def _scalar(word: str) -> Scalar:
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (lambda text: int(text, 0), int, lambda text: float(text.rstrip("fF"))):
        try:
            value: Scalar = kind(word)
        except ValueError:
            continue
        return value
    return word


def _unescaped(quoted: str) -> str:
    def letter(match: re.Match[str]) -> str:
        if match["hex"]:
            return chr(int(match["hex"], 16))
        if match["octal"]:
            return chr(int(match["octal"], 8))
        return _LETTERS.get(match["letter"], match["letter"])

    return _ESCAPE.sub(letter, quoted[1:-1])
