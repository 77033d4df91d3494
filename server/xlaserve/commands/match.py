"""`xlaserve match`: finds the settings with which a model gives the answers of a notebook."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from xlaserve.commands import arguments, subject
from xlaserve.commands.command import EXECUTION, FAILED, Command, Invocation
from xlaserve.config import Mode, Precision
from xlaserve.errors import ConfigError, ModelFailed
from xlaserve.images.decoder import ImageLimits
from xlaserve.models import example_files
from xlaserve.models.examples import MAX_DIFFERENCE
from xlaserve.programs.tf.device import check_temporary_folder

TIMEOUT_S: Final = 60.0
# The network is called without what is tried, and in the precision of notebooks.
_BARE: Final = {
    "preprocess": "none",
    "precision": Precision.FLOAT32,
    "openvino_precision": None,
    "calibration": None,
}


def run(invocation: Invocation) -> int:
    """Prints the settings that give the expected outputs, or the nearest ones; fails where none are near."""
    own, limits = invocation.own, ImageLimits.of(invocation.settings)
    check_temporary_folder()
    if not own.images.is_dir():
        raise ConfigError(f"IMAGES: expected a folder of images, got {own.images}")
    settings = subject.model_settings(invocation.settings, own.model)
    examples = example_files.read(own.images, own.expected)
    if settings.weights == "random":
        raise ConfigError(f"{own.model} has random weights, which answer as no notebook does; configure its weights")
    loaded = subject.load(invocation.settings, own.model, own.bucket, Mode.GRAPH, _BARE).model
    if not loaded.is_of_one_image:
        raise ModelFailed(f"match: expected a model of one image, got other inputs: {', '.join(loaded.names)}")
    model = replace(loaded, settings=loaded.settings.model_copy(update={"preprocess": settings.preprocess}))
    # They import TensorFlow, which had to be set up first.
    from xlaserve.inspection.match import answers, choices, report, search  # noqa: PLC0415

    chosen = choices.choices_of(model)
    usual = next(choices.combinations(chosen))
    computed = answers.Answers(model, chosen, examples, limits)
    if computed.is_random(usual):
        raise ModelFailed(
            "the model answers the same image differently each time, as its file has augmentation or dropout that is"
            " active; model.save(...) keeps these off, model.export(...) does not"
        )
    with _progress() as show:
        result = search.search(
            chosen,
            computed,
            len(examples),
            few=computed.telling(usual),
            exact=computed.exact,
            timeout_s=own.timeout,
            on_tried=show,
        )
    found = report.report(result, computed, own.limit, settings, own.expected)
    sys.stdout.write(str(found))
    return FAILED if found.entry is None else 0


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Yields a function that shows how many combinations were tried, on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("trying settings"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")
        yield lambda tried, total: bar.update(task, completed=tried, total=total)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument("model", metavar="MODEL", help="a configured model, or a source such as flowers.keras")
    parser.add_argument("images", type=Path, metavar="IMAGES", help="the folder of the images")
    expected_help = (
        "the outputs of the notebook: a file .npz with files and the outputs by name, or .csv with file and scores;"
        " predictions.npz or predictions.csv in the folder by default"
    )
    parser.add_argument("--expected", type=Path, metavar="FILE", help=expected_help)
    limit_help = "call settings near whose outputs differ by at most this share of the largest number (%(default)s)"
    parser.add_argument("--limit", type=arguments.share, default=MAX_DIFFERENCE, metavar="SHARE", help=limit_help)
    parser.add_argument(
        "--bucket", type=arguments.bucket, metavar="BxHxW", help="the size of a model that takes several"
    )
    timeout_help = "seconds after which nothing more is tried (%(default)g)"
    parser.add_argument("--timeout", type=arguments.duration_s, default=TIMEOUT_S, metavar="S", help=timeout_help)


COMMAND = Command(run, add_options, (*EXECUTION, "max_image_bytes", "max_image_pixels"))
