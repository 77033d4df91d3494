"""`xlaserve explain`: what XLA or OpenVINO made of a model, what it costs, and what it takes."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.table import Table

from xlaserve.commands import arguments, subject
from xlaserve.commands.command import EXECUTION, Command, Invocation
from xlaserve.config import Mode
from xlaserve.errors import ConfigError
from xlaserve.inspection import dump, html_page
from xlaserve.inspection.explanation import GROUP_COLUMNS, Explanation, Row, amount, seconds
from xlaserve.programs.tf.device import check_temporary_folder
from xlaserve.telemetry import console

if TYPE_CHECKING:
    from xlaserve.inspection.compile_and_explain import Explained
    from xlaserve.inspection.layers import LayersExplained

STAGES: Final = ("hlo", "optimized_hlo", "stablehlo")

log = logging.getLogger(__name__)


def run(invocation: Invocation) -> int:
    """Prints the explanation, or one stage's program; writes all of it where a folder is given."""
    own = invocation.own
    if own.mode is Mode.OPENVINO:
        return _in_openvino(invocation)
    check_temporary_folder()
    if own.out is not None:
        arguments.make_folder(own.out)
    peak = (own.peak_gflops and own.peak_gflops * 1e9, own.bandwidth_gbs and own.bandwidth_gbs * 1e9)
    with dump.dumped() as folder:
        loaded = subject.load(invocation.settings, own.model, own.bucket)
        compilation = loaded.compile(Mode.XLA)
        from xlaserve.inspection.compile_and_explain import explain  # noqa: PLC0415 - TensorFlow had to be set up first

        explained = explain(loaded.model, loaded.bucket, loaded.device, compilation, folder=folder, peak=peak)
    if own.out is not None:
        _write(own.out, explained)
    if own.stage is not None:
        programs = explained.programs
        texts = (programs.hlo, programs.optimized_hlo, explained.stablehlo)
        sys.stdout.write(dict(zip(STAGES, texts, strict=True))[own.stage])
    elif own.json:
        console.print_json(explained.explanation.json())
    else:
        _print(explained.explanation, own.top)
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument("model", metavar="MODEL", help="a configured model, or any source, with random weights")
    parser.add_argument("--bucket", type=arguments.bucket, metavar="BxHxW", help="the bucket: 8, or 8x224x224")
    mode_help = "xla, or openvino: what each layer takes there (%(default)s)"
    parser.add_argument("--mode", type=Mode, choices=(Mode.XLA, Mode.OPENVINO), default=Mode.XLA, help=mode_help)
    parser.add_argument("--stage", choices=STAGES, help="print this program instead of the explanation")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write programs and explain.html there")
    parser.add_argument("--json", action="store_true", help="print JSON")
    top_help = "instructions to list (%(default)s)"
    parser.add_argument("--top", type=arguments.count, default=10, metavar="N", help=top_help)
    parser.add_argument("--peak-gflops", type=arguments.positive, metavar="G", help="its peak; measured by default")
    parser.add_argument("--bandwidth-gbs", type=arguments.positive, metavar="G", help="its memory; measured by default")


def _in_openvino(invocation: Invocation) -> int:
    own = invocation.own
    if unfit := [name for name in ("stage", "out", "peak_gflops", "bandwidth_gbs") if getattr(own, name) is not None]:
        raise ConfigError(f"--{unfit[0].replace('_', '-')}: expected --mode xla with it, got --mode openvino")
    check_temporary_folder()
    loaded = subject.load(invocation.settings, own.model, own.bucket, Mode.OPENVINO)
    compilation = loaded.compile(Mode.OPENVINO)
    from xlaserve.inspection import layers  # noqa: PLC0415 - TensorFlow had to be set up first

    explained = layers.explain(loaded.model, loaded.bucket, loaded.device, compilation)
    if own.json:
        console.print_json(explained.json())
        return 0
    out = console.stdout(140)
    out.print(_lines(_summary_of_layers(explained)))
    groups = _table(explained.group_cells(), *layers.COLUMNS[:2], numbers=layers.COLUMNS[2:])
    out.print("\n[bold]By operation and kernel[/bold]", groups)
    cells = ((one.name, one.operation, one.kernel, seconds(one.seconds)) for one in explained.slowest(own.top))
    slowest = _table(cells, "layer", "operation", "kernel", numbers=("took",))
    out.print("\n[bold]Layers: took longest[/bold]", slowest)
    return 0


def _summary_of_layers(explained: LayersExplained) -> tuple[tuple[str, str], ...]:
    rate = f"{explained.bucket.batch / explained.measured_s:,.0f} images/s"
    return (
        ("program", f"{explained.model} {explained.bucket}, {explained.source}"),
        ("device", f"{explained.device}; {explained.versions}"),
        ("computes in", explained.precision),
        ("layers run", f"{len(explained.layers)}, {seconds(explained.layers_s)} together while profiled"),
        ("measured", f"{seconds(explained.measured_s)}, {rate}; compiled in {seconds(explained.compile_s)}"),
    )


def _write(folder: Path, explained: Explained) -> None:
    programs, explanation = explained.programs, explained.explanation
    (folder / "hlo.txt").write_text(programs.hlo)
    (folder / "optimized_hlo.txt").write_text(programs.optimized_hlo)
    (folder / "stablehlo.mlir").write_text(explained.stablehlo)
    (folder / "buffer_assignment.txt").write_text(programs.buffer_assignment)
    (folder / "explain.json").write_text(json.dumps(explanation.json(), indent=2))
    (folder / "explain.html").write_text(html_page.render(explanation))
    log.info("written: %s", folder / "explain.html")


def _print(explained: Explanation, top: int) -> None:
    out = console.stdout(140)
    out.print(_lines(_summary(explained)))
    groups = _table(explained.group_cells(), GROUP_COLUMNS[0], numbers=GROUP_COLUMNS[1:])
    out.print("\n[bold]By opcode[/bold]", groups)
    tables = (
        ("took longest", lambda row: row.measured_s or 0.0),
        ("most FLOPs", lambda row: row.cost.flops),
        ("most bytes", lambda row: row.cost.bytes),
    )
    for title, key in tables:
        if heaviest := explained.heaviest(key, top):
            out.print(f"\n[bold]Instructions: {title}[/bold]", _rows(heaviest))


def _summary(explained: Explanation) -> tuple[tuple[str, str], ...]:
    cost, memory, machine = explained.cost, explained.memory, explained.machine
    fusions = ", ".join(f"{count} {kind}" for kind, count in explained.fusions.items()) or "none"
    how = "measured" if explained.machine_is_measured else "as given"
    images_per_s = explained.bucket.batch / explained.measured_s
    return (
        ("program", f"{explained.model} {explained.bucket}, {explained.source}"),
        ("device", f"{explained.device}; {explained.versions}"),
        ("operations", f"{explained.operations_before} before optimisation, {explained.operations_after} after"),
        ("instructions run", f"{len(explained.rows)}; fusions: {fusions}"),
        ("arithmetic", f"{amount(cost.flops, 'FLOP')}, {cost.intensity:.1f} FLOPs a byte of {amount(cost.bytes, 'B')}"),
        (
            "memory",
            f"weights {amount(memory.parameters, 'B')}, constants {amount(memory.constants, 'B')}, images "
            f"{amount(memory.input, 'B')}, temporaries {amount(memory.temporaries, 'B')}, outputs "
            f"{amount(memory.outputs, 'B')}",
        ),
        ("machine", f"{amount(machine.flops_per_s, 'FLOP/s')}, {amount(machine.bytes_per_s, 'B/s')} ({how})"),
        ("roofline", f"{seconds(explained.bound_s)} at best"),
        (
            "measured",
            f"{seconds(explained.measured_s)}, {images_per_s:,.0f} images/s, "
            f"{amount(cost.flops / explained.measured_s, 'FLOP/s')}, {explained.bound_s / explained.measured_s:.0%} of "
            f"the roofline; compiled in {seconds(explained.compile_s)}",
        ),
    )


def _lines(lines: tuple[tuple[str, str], ...]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for line in lines:
        table.add_row(*line)
    return table


def _rows(rows: list[Row]) -> Table:
    cells = ((row.name, row.opcode, row.layer, row.shape, *row.figures) for row in rows)
    numbers = ("FLOPs", "bytes", "FLOPs/B", "roofline", "took")
    return _table(cells, "instruction", "opcode", "layer", "result", numbers=numbers)


def _table(rows: Iterable[Iterable[str]], *titles: str, numbers: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    return table


COMMAND = Command(run, add_options, EXECUTION)
