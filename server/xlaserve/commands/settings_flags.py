"""Settings as flags of commands, and as text: what each is for, its values and its default."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import PlainSerializer
from pydantic.fields import FieldInfo

from xlaserve import config
from xlaserve.config import BucketSettings, ModelSettings, Settings
from xlaserve.config.base import Frozen
from xlaserve.config.errors_in_words import leaves
from xlaserve_client.cli_parser import Parser

USUAL: Final = frozenset(
    (
        *("host", "grpc_port", "http_port", "access", "tls_certificate", "tls_key"),
        *("fronts", "device", "lanes", "compile_cache", "ready_when", "log_level"),
    )
)
"""Settings whose flags a command's help shows where it has more than these; `--help-all` shows all."""
_PLACEHOLDERS: Final[Mapping[object, str]] = {
    **{bool: "{true,false}", int: "N", float: "X", Path: "PATH", BucketSettings: "N"},
}


def parser_of(names: Sequence[str]) -> Parser:
    """Returns the parser of `--config` and of the flags of some settings."""
    found = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    found.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        default=None,
        help="YAML file of settings; without it the built-in configuration serves builtin:digits",
    )
    fields = found.add_argument_group(
        "settings", "Each overrides the environment's XLASERVE_<NAME> and the file; [defaults]."
    )
    for name in names:
        _add_flag(fields, name, Settings.model_fields[name])
    return found


def rare(parser: argparse.ArgumentParser, names: Sequence[str]) -> list[argparse.Action]:
    """Returns the flags of `names` that the help of a command leaves out; none where it has few."""
    if len(names) <= 2 * len(USUAL):
        return []
    return [action for action in parser._actions if action.dest in names and action.dest not in USUAL]


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    flag = f"--{name.replace('_', '-')}"
    text = _explained(field).replace("%", "%%")
    if field.annotation in (bool, bool | None):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif name == "models":
        group.add_argument(flag, type=_yaml, metavar="YAML", help=f"{text} A YAML or JSON list.")
    else:
        kind = Path if Path in get_args(field.annotation) else str
        group.add_argument(flag, type=kind, metavar=_takes(field.annotation), help=text)


def models_explained() -> str:
    """Returns the text about the fields of a model, which have no flags."""
    lines = ["fields of a model, in a file or in --models:"]
    width = shutil.get_terminal_size().columns - 2
    for prefix, settings in _with_nested("", ModelSettings):
        for name, field in settings.model_fields.items():
            is_mapping = any(isinstance(item, PlainSerializer) for item in field.metadata)
            lines.append(f"  {prefix}{name} {_mapping(field.annotation) if is_mapping else _takes(field.annotation)}")
            lines.append(textwrap.fill(_explained(field), width, initial_indent=" " * 8, subsequent_indent=" " * 8))
    return "\n".join(lines)


def _with_nested(prefix: str, settings: type[Frozen]) -> Iterator[tuple[str, type[Frozen]]]:
    """Yields settings and those that their fields hold, each behind what the names of its fields begin with."""
    yield prefix, settings
    for name, field in settings.model_fields.items():
        for kind in leaves(field.annotation):
            if isinstance(kind, type) and issubclass(kind, Frozen):
                yield from _with_nested(f"{prefix}{name}.", kind)


def _explained(field: FieldInfo) -> str:
    """Returns what a field is for, and its default where that is a plain value or a list of such."""
    text = (field.description or "").replace("\n", " ")
    if field.is_required():
        return f"{text} [required]"
    values = field.default if isinstance(field.default, tuple) else (field.default,)
    words = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
    is_plain = words and all(isinstance(value, (str, int, float, BucketSettings)) for value in values)
    return f"{text} [{', '.join(words)}]" if is_plain else text


def _mapping(pairs: Any) -> str:
    """Returns what stands for a mapping, which is kept as pairs: `{NAME: TEXT}`."""
    _, value = get_args(get_args(pairs)[0])
    return f"{{NAME: {_takes(value)}}}"


def _takes(kind: Any) -> str:
    """Returns what stands for a value of a type: `{all,first_bucket}`, `N`, `[N,...]`, `N|PATH` for either."""
    origin, parts = get_origin(kind), [part for part in get_args(kind) if part is not NoneType]
    if isinstance(kind, type) and issubclass(kind, Enum):
        origin, parts = Literal, [member.value for member in kind]
    if origin is Literal:
        return f"{{{','.join(map(str, parts))}}}"
    if origin is Annotated:
        return _takes(parts[0])
    if origin is tuple:
        return f"[{','.join('...' if part is ... else _takes(part) for part in parts)}]"
    if origin in (Union, UnionType):
        return "|".join(dict.fromkeys(map(_takes, parts)))
    return "{FIELD: VALUE}" if issubclass(kind, Frozen) else _PLACEHOLDERS.get(kind, "TEXT")


def _yaml(text: str) -> object:
    try:
        return config.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not YAML: {error}") from None
