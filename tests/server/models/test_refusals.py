from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import xlaserve

ROOT = Path(xlaserve.__file__).parent
FILES = [
    *(ROOT / "models" / "sources").rglob("*.py"),
    *(ROOT / "models" / "networks").glob("*.py"),
    *(ROOT / "inspection" / "model_file").glob("*.py"),
    ROOT / "models" / "catalog.py",
    ROOT / "models" / "network_settings.py",
]
NEXT = "; "
"""Between what is wrong and the next step."""


def constants(node: ast.AST) -> str:
    """Returns the text that is written in a part of a program, without docstrings."""
    docstrings = {id(one.value) for one in ast.walk(node) if isinstance(one, ast.Expr)}
    texts = (one for one in ast.walk(node) if isinstance(one, ast.Constant) and id(one) not in docstrings)
    return "".join(one.value for one in texts if isinstance(one.value, str))


def named() -> dict[str, str]:
    """Returns the text in constants and functions of modules, by their names."""
    found = {}
    for file in (*FILES, ROOT / "images" / "image_input.py"):
        for node in ast.parse(file.read_text()).body:
            match node:
                case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    found[name] = constants(node)
    return found


def refusals() -> Iterator[tuple[str, ast.expr]]:
    """Yields each message that is made where a model is refused, with its place."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="ModelFailed"), args=[ast.Constant() | ast.JoinedStr() as message]):
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", message


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return named()


def test_every_refusal_of_a_model_has_a_next_step(texts: dict[str, str]) -> None:
    found = dict(refusals())
    assert len(found) > 100
    without = []
    for place, message in found.items():
        called = {ast.unparse(one.func) for one in ast.walk(message) if isinstance(one, ast.Call)}
        names = {
            one.id for one in ast.walk(message) if isinstance(one, ast.Name) and (one.id.isupper() or one.id in called)
        }
        if NEXT not in constants(message) + "".join(texts.get(name, "") for name in names):
            without.append((place, constants(message)))
    assert without == []
