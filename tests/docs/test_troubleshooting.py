"""The page quotes messages; each must be one that the code can still say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("server/xlaserve", "loadtest/xlaserve_loadtest", "client/xlaserve_client")
PLACEHOLDER = "..."
HOLE = "\0"
HEADING = re.compile(r"^#### `(.*)`$", re.MULTILINE)
OF_GRPC = ("Received message larger than max (...", "received metadata size exceeds hard limit (...")
"""Messages that clients read from gRPC itself."""
QUOTED = HEADING.findall((ROOT / "docs" / "troubleshooting.md").read_text())


def _text(node: ast.AST) -> str:
    """Returns a string as it is written, with a hole for each value that is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdg]|%\.0f", HOLE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    return HOLE


def _messages() -> Iterator[str]:
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr | ast.Constant):
                    yield _text(node)
                elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "InvalidArgument":
                    field, expected = (_text(argument) for argument in node.args[:2])
                    yield f"{field}: expected {expected}, got {HOLE}"


def _is_said(quoted: str, messages: str) -> bool:
    """Whether one message has all the words of `quoted` in their order, with values where it has `...`."""
    words = [re.escape(part.strip()) for part in quoted.split(PLACEHOLDER) if part.strip(" ,;:()")]
    return re.search(r"[^\n]*?".join(words), messages) is not None


@pytest.fixture(scope="module")
def messages() -> str:
    return "\n".join(message.replace("\n", " ") for message in _messages())


def test_the_page_quotes_messages() -> None:
    assert len(QUOTED) > 30


@pytest.mark.parametrize("quoted", [quoted for quoted in QUOTED if quoted not in OF_GRPC])
def test_each_quoted_message_stands_in_the_code(quoted: str, messages: str) -> None:
    assert _is_said(quoted, messages)


@pytest.mark.parametrize("quoted", OF_GRPC)
def test_each_message_of_grpc_is_on_the_page_and_in_its_library(quoted: str) -> None:
    assert quoted in QUOTED
    (library,) = Path(grpc.__file__).parent.glob("_cython/cygrpc*.so")
    assert quoted.partition(" (")[0].encode() in library.read_bytes()


def test_a_message_that_nobody_says_is_noticed(messages: str) -> None:
    assert not _is_said("grpc_port: expected a port of ...", messages)
