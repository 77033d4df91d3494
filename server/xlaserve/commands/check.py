"""`xlaserve check`: does each model compile, how fast is it, and do its modes compute the same?"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from xlaserve.commands import arguments, subject
from xlaserve.commands.command import FAILED, Command, Invocation
from xlaserve.config import BucketSettings, Mode, ModelSettings, PerformanceHint, Precision, Settings
from xlaserve.config.modes import TRAITS
from xlaserve.config.sources import Source
from xlaserve.errors import ConfigError
from xlaserve.inspection.check import record, runner, tables
from xlaserve.inspection.check.record import Checked
from xlaserve.models.sources import source_names
from xlaserve.programs.tf.device import check_temporary_folder
from xlaserve.telemetry import console

log = logging.getLogger(__name__)

MODES: Final = tuple(mode for mode, traits in TRAITS.items() if not traits.choice)
"""Modes with programs of their own; eager first, because the others are compared with it."""
_DEFAULT_MODES: Final = tuple(mode for mode in MODES if mode.traits.is_checked)
TIMEOUT_S: Final = 300.0
SETTINGS: Final = ("device", "gpu_memory_mib", "log_level", "log_format", "models")
WIDE: Final = 320
"""Columns of text where no terminal says how many it has: nothing is to be folded."""


def run(invocation: Invocation) -> int:
    """Checks the models and prints the table; fails where anything is wrong with one."""
    # The end that SIGTERM makes would leave the process of the check and its files behind.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return _run(invocation)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(invocation: Invocation) -> int:
    own, settings = invocation.own, invocation.settings
    check_temporary_folder()
    asked = _asked(own, settings)
    # One lane with all threads: each program runs alone, and as fast as it can. And all bits of float32: what is looked
    # for are differences between the modes.
    alone = {"performance_hint": PerformanceHint.LATENCY, "lanes": None, "threads_per_lane": None, "tf32": False}
    server = settings.model_copy(update=alone)
    known = {model.name: model for model in _before(own)}
    if own.json:
        record.check_writable(own.json)  # said before the work, and not after
    # What failed before comes last: each sitting of a long run begins with what is new.
    for number, model in sorted(enumerate(asked, start=1), key=lambda numbered: numbered[1].name in known):
        progress = f"{number} of {len(asked)}: {model.name}"
        if model.name in known and known[model.name].answers(own.modes, own.batches, own.lowerings):
            log.info("%s: checked before", progress)
            continue
        log.info("%s", progress)
        checked = known[model.name] = runner.check(
            model,
            server=server,
            modes=own.modes,
            batches=own.batches,
            lowerings=own.lowerings,
            timeout_s=own.timeout,
            on_step=partial(log.debug, "%s: %s", progress),
        )
        for line in tables.failures([checked]):
            log.error("%s", line)
        if own.json:
            record.write(own.json, known.values())
    found = [known[model.name] for model in asked]
    console.stdout(WIDE).print(tables.rich_table(found))
    for line in (*tables.notes(found), *tables.failures(found)):
        sys.stdout.write(f"{line}\n")
    return FAILED if any(model.has_failed for model in found) else 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument(
        "names",
        nargs="*",
        default=(),
        metavar="MODEL",
        help="a configured name, or a source such as keras.applications:ResNet50; all that are configured by default",
    )
    parser.add_argument("--all", action="store_true", help="check every model of the catalog")
    modes_help = f"some of {','.join(MODES)}; {','.join(_DEFAULT_MODES)} by default"
    parser.add_argument("--modes", type=_modes, default=_DEFAULT_MODES, metavar="LIST", help=modes_help)
    parser.add_argument(
        "--batches", type=arguments.counts, default=(1, 8), metavar="LIST", help="batch sizes; 1,8 by default"
    )
    parser.add_argument(
        "--lowerings",
        action="store_true",
        help="try XLA without each lowering of the model as well (see disable_lowerings)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records, after each model")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the records in --json FILE, and check only what is not in it and, after that, what failed",
    )
    timeout_help = f"seconds for one model; {TIMEOUT_S:g} by default"
    parser.add_argument("--timeout", type=arguments.duration_s, default=TIMEOUT_S, metavar="S", help=timeout_help)


def _asked(own: argparse.Namespace, settings: Settings) -> list[runner.Candidate]:
    """Returns the models to check. Raises ConfigError."""
    if own.resume and own.json is None:
        raise ConfigError("--resume: expected --json FILE with it, got none")
    if own.all and own.names:
        raise ConfigError(f"--all: expected no MODEL with it, got {', '.join(own.names)}")
    names = own.names or tuple(model.name for model in settings.models)
    if own.all:
        names = tuple(name for name in source_names.names() if name not in Source.NOOP.forms)
    return [
        runner.Candidate(name, _with(subject.model_settings(settings, name), own.modes, own.batches))
        for name in dict.fromkeys(names)
    ]


def _with(model: ModelSettings, modes: tuple[Mode, ...], batches: Sequence[int]) -> ModelSettings:
    """Returns `model` with what is to be checked: `batches` at its first resolution."""
    sized = [bucket[1:] for bucket in model.buckets if bucket.height is not None]
    sizes = [*sized, *model.resolutions, (None, None)]
    buckets = tuple(BucketSettings(batch, *sizes[0]) for batch in batches)
    changes: dict[str, object] = {"modes": modes, "default_mode": None, "buckets": buckets, "resolutions": ()}
    changes |= {"precision": Precision.FLOAT32, "openvino_precision": None, "calibration": None}
    if model.weights == "random":
        changes["score_threshold"] = 0.0  # else a detector finds nothing, and all modes agree on that
    return model.model_copy(update=changes)


def _before(own: argparse.Namespace) -> tuple[Checked, ...]:
    """Returns the records to go on from. Raises ConfigError."""
    if own.json is None or not own.json.exists():
        return ()
    if not own.resume:
        raise ConfigError(f"--json: expected a new file or --resume to go on with it, got {own.json}, which exists")
    return record.read(own.json)


def _modes(text: str) -> tuple[Mode, ...]:
    wanted = {word.strip() for word in text.split(",")}
    if unknown := wanted - set(MODES):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(MODES)}, got {', '.join(sorted(unknown))!r}")
    return tuple(mode for mode in MODES if mode in wanted)


COMMAND = Command(run, add_options, SETTINGS)
