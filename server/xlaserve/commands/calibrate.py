"""`xlaserve calibrate`: makes a model int8 for the mode `openvino`, on a user's images, where it stays the same."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import yaml
from rich.table import Table

from xlaserve import __version__
from xlaserve.commands import arguments, subject
from xlaserve.commands.command import EXECUTION, Command, Invocation
from xlaserve.config import Mode, Precision
from xlaserve.errors import ConfigError, ModelFailed, RequestError
from xlaserve.images.decoder import ImageLimits
from xlaserve.inspection.explanation import seconds
from xlaserve.programs.openvino import calibration as record
from xlaserve.programs.openvino import openvino_program, quantize
from xlaserve.programs.tf.device import check_temporary_folder
from xlaserve.telemetry import console

if TYPE_CHECKING:
    from xlaserve.models.int8 import Int8

LEAST_AGREEMENT: Final = 0.99
MOST_IMAGES: Final = 500
MAX_SHOWN: Final = 5
_FLOAT32: Final = {"openvino_precision": None, "calibration": None}
_ENDS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

log = logging.getLogger(__name__)


def run(invocation: Invocation) -> int:
    """Calibrates the model, prints what was measured, and writes the folder if it agrees well enough with float32."""
    own = invocation.own
    check_temporary_folder()
    for package, said in (("openvino", openvino_program.NOT_INSTALLED), ("nncf", quantize.NOT_INSTALLED)):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(said)
    settings = subject.model_settings(invocation.settings, own.model)
    if settings.precision is not Precision.FLOAT32:
        raise ConfigError(f"precision: expected float32, which int8 is made of, got {settings.precision}")
    out: Path = own.out or Path(f"{settings.name}-int8")
    if os.path.lexists(out):  # a link to nothing as well
        raise ConfigError(f"--out: expected a folder that is to be made, got {out}, which exists")
    loaded = subject.load(invocation.settings, own.model, own.bucket, Mode.OPENVINO, _FLOAT32).model
    from xlaserve.models import int8  # noqa: PLC0415 - TensorFlow had to be set up first

    folder = int8.ImageFolder(own.images, own.most_images, loaded, ImageLimits.of(invocation.settings))
    for file, reason in list(folder.skipped.items())[:MAX_SHOWN]:
        log.warning("%s is left out: %s", file, reason)
    if len(folder.skipped) > MAX_SHOWN:
        log.warning("%d more files are left out", len(folder.skipped) - MAX_SHOWN)
    log.info("%d images, and %d that are held out", len(folder.calibrating), len(folder.held_out))
    made: list[Int8] = []
    try:
        with _made(out) as partial:
            try:
                made += int8.make(loaded, folder)
            except (OSError, RequestError) as error:
                raise ConfigError(f"--images: one could be decoded before and can't now: {error}") from None
            text = _write(partial, own, loaded.settings.source, made, images=len(folder.calibrating))
    finally:
        if made:  # nobody need read it for the folder to be written
            console.stdout(140).print(_table(made))
    sys.stdout.write(f"\n{text}; written: {out}\n\n{_fields(out)}")
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument("model", metavar="MODEL", help="a configured model, or any source, with random weights")
    images_help = "a folder of JPEG, PNG and WebP images such as the model will be asked about, a few hundred"
    parser.add_argument("--images", type=Path, required=True, metavar="DIR", help=images_help)
    out_help = "the folder to write, which must not exist; NAME-int8 by default"
    parser.add_argument("--out", type=Path, metavar="DIR", help=out_help)
    parser.add_argument("--bucket", type=arguments.bucket, metavar="BxHxW", help="for images of this size alone")
    least_help = "of held-out images, refuse less agreement with float32 than this, from 0 to 1 (%(default)s)"
    parser.add_argument(
        "--least-agreement", type=arguments.share, default=LEAST_AGREEMENT, metavar="SHARE", help=least_help
    )
    most_help = "of more, take as many, chosen by chance, the same each time (%(default)s)"
    parser.add_argument("--most-images", type=arguments.count, default=MOST_IMAGES, metavar="N", help=most_help)


def _write(partial: Path, own: argparse.Namespace, source: str, made: Sequence[Int8], *, images: int) -> str:
    """Writes the calibration; returns what is to be said of it. Raises ModelFailed where it agrees too little."""
    least: float = own.least_agreement
    for one in made:
        if not one.agreement >= least:
            raise ModelFailed(
                f"int8 agrees with float32 on {one.agreement:.4f} of what is in the held-out images, expected at least"
                f" {least:g} (--least-agreement): nothing is written"
            )
    models = tuple(
        record.Calibrated(
            size=one.size,
            graph=one.digest,
            files=record.save(partial, one.size, one.graph),
            held_out=one.held_out,
            agreement=one.agreement,
            difference=one.difference,
        )
        for one in made
    )
    calibration = record.Calibration(
        source=source,
        images=images,
        least_agreement=least,
        xlaserve=__version__,
        openvino=openvino_program.version(),
        nncf=quantize.version(),
        models=models,
    )
    (partial / record.FILE).write_text(calibration.model_dump_json(indent=2) + "\n", "utf-8")
    return str(calibration)


@contextmanager
def _made(out: Path) -> Iterator[Path]:
    """Yields a folder that becomes `out` at once where nothing is raised, and is removed otherwise.

    Raises ConfigError.
    """
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        with _removed(partial):
            yield partial
            partial.rename(out)
    except OSError as error:
        raise ConfigError(f"--out: {out} can't be written: {error.strerror}") from None


@contextmanager
def _removed(folder: Path) -> Iterator[None]:
    """Removes a folder at the end, also at that which a signal makes of the process."""

    def end(number: int, _: object) -> NoReturn:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(128 + number)  # an exception would get lost where OpenVINO or NNCF has called Python

    before = {number: signal.getsignal(number) for number in _ENDS}
    acted_on = [number for number, handler in before.items() if handler is not signal.SIG_IGN]  # as nohup has it
    for number in acted_on:
        signal.signal(number, end)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for number in acted_on:
            signal.signal(number, before[number])


def _table(made: Sequence[Int8]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, title in enumerate(
        ("bucket", "computes in", "agreement", "largest difference", "a batch", "images per CPU second", "of float32's")
    ):
        table.add_column(title, justify="right" if index > 1 else "left")
    for one in made:
        rates = {name: one.bucket.batch / max(speed.processor_seconds, 1e-9) for name, speed in one.speeds.items()}
        for name, speed in one.speeds.items():
            is_int8 = name is Precision.INT8
            table.add_row(
                str(one.bucket),
                name,
                f"{one.agreement:.4f}" if is_int8 else "",
                f"{one.difference:.2g}" if is_int8 and one.difference is not None else "",
                seconds(speed.seconds),
                f"{rates[name]:,.1f}",
                f"{rates[name] / rates[Precision.FLOAT32]:.2f}",
            )
    return table


def _fields(out: Path) -> str:
    """Returns what to add to the model's settings, as YAML."""
    return yaml.safe_dump(
        {"modes": ["openvino"], "openvino_precision": "int8", "calibration": str(out.absolute())}, sort_keys=False
    )


COMMAND = Command(run, add_options, (*EXECUTION, "max_image_bytes", "max_image_pixels"))
