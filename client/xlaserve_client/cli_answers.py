"""The answers of the commands that send images: asked for side by side, printed in order, as text or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from xlaserve_client.errors import InvalidRequest
from xlaserve_client.results import Answer

AnswerT = TypeVar("AnswerT", bound=Answer)

_IN_FLIGHT: Final = 16
"""Requests under way at the same time, of one image each, so that the server can batch them."""


def ask_each(
    options: argparse.Namespace,
    ask: Callable[..., AnswerT],
    lines: Callable[[Path, AnswerT], Iterable[str]],
    as_json: Callable[[AnswerT], dict[str, Any]],
) -> int:
    """Sends each image and prints the answers in order; returns 1 where a request failed, else 0."""
    if getattr(options, "out", None):
        make_folder(options.out)
    answered: list[dict[str, Any]] = []
    failed = False
    with ThreadPoolExecutor(_IN_FLIGHT) as pool:
        pending = [(path, pool.submit(ask, path, model=options.model, mode=options.mode)) for path in options.images]
        try:
            for path, future in pending:
                try:
                    result = future.result()
                    about = list(lines(path, result))
                except OSError as error:
                    failed = True
                    complain(options, f"{error.filename or path}: {error.strerror or error}")
                except InvalidRequest as error:
                    failed = True
                    complain(options, f"{path}: {error.message}")
                else:
                    if options.json:
                        answered.append({"image": str(path), **as_json(result)})
                    else:
                        say([heading(path, result), *about])
        finally:
            pool.shutdown(cancel_futures=True)
    if options.json:
        say([json.dumps(answered, indent=2)])
    return int(failed)


def say(lines: Iterable[str]) -> None:
    """Prints lines."""
    for line in lines:
        sys.stdout.write(f"{line}\n")


def complain(options: argparse.Namespace, problem: object) -> None:
    """Prints a problem, in one line that begins with the command's `program`."""
    sys.stderr.write(f"{options.program}: {problem}\n")


def heading(path: Path | str, result: Answer) -> str:
    """Returns the line above an answer: what it is about, the mode that it came from, and the time it took."""
    spent = f", {result.timings.total_s * 1000:.1f} ms in the server" if result.timings else ""
    return f"{path}  ({result.mode or 'unknown mode'}{spent})"


def class_text(label: str, index: int) -> str:
    """Returns a class in words: its label, and its number unless that is the label."""
    return label if label == str(index) else f"{label}  ({index})"


def facts(result: Answer) -> dict[str, Any]:
    """Returns the fields that answers of every task have, for JSON."""
    timings = dataclasses.asdict(result.timings) if result.timings else None
    return {"model": result.model, "version": result.version, "mode": result.mode, "timings": timings}


def output_files(options: argparse.Namespace, command: str, suffix: str) -> dict[Path, Path]:
    """Returns the file that is written for each image: named after it and the command, with a number where a name
    recurs."""
    if options.out is None:
        return {}
    named: Counter[str] = Counter()
    files = {}
    for image in dict.fromkeys(options.images):
        named[image.stem] += 1
        number = f"-{named[image.stem]}" if named[image.stem] > 1 else ""
        files[image] = options.out / f"{image.stem}-{command}{number}{suffix}"
    return files


def make_folder(folder: Path) -> None:
    """Makes the folder of `--out`. Raises ValueError where it can't."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out: expected a folder, got {folder}: {error.strerror}") from None
