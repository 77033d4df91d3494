"""`xlaserve ledger`: what a running server has compiled, and when."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from datetime import UTC

from google.protobuf.json_format import MessageToDict

from xlaserve.commands import remote
from xlaserve.commands.command import ADDRESS, Command, Invocation
from xlaserve.config import Bucket, Mode
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.warmup.ledger import Entry
from xlaserve.telemetry import console
from xlaserve_proto import vision_pb2 as pb


def run(invocation: Invocation) -> int:
    """Prints the ledger, and what XLA compiled although nothing asked for it."""
    answer = remote.list_models(invocation.own.target or remote.address(invocation.settings))
    entries = [_entry(model, program) for model in answer.models for program in model.programs]
    unexpected = answer.unexpected_compilations
    if invocation.own.json:
        console.print_json(
            {
                "programs": [console.ledger_json(entry) for entry in entries],
                "unexpected": [MessageToDict(each, preserving_proto_field_name=True) for each in unexpected],
            }
        )
        return 0
    console.print_ledger(entries, as_json=False)
    _print_unexpected(unexpected)
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    remote.add_target(parser, "the server to ask; by default the one that the settings describe")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _entry(model: pb.Model, program: pb.Program) -> Entry:
    return Entry(
        model=model.name,
        version=model.version,
        mode=Mode(program.mode),
        bucket=Bucket(program.bucket.batch, program.bucket.height, program.bucket.width),
        trace_s=program.trace_s,
        compile_s=program.compile_s,
        cost=Cost(program.run_s, program.run_loaded_s),
        at=program.ready_at.ToDatetime(UTC),
        from_cache=program.from_cache,
        in_background=program.in_background,
    )


def _print_unexpected(unexpected: Iterable[pb.UnexpectedCompilation]) -> None:
    out = console.stdout(120, markup=False)
    for each in unexpected:
        constants = f"; compile-time constants: {', '.join(each.constants)}" if each.constants else ""
        out.print(
            f"{each.ended_at.ToDatetime(UTC):%Y-%m-%d %H:%M:%S}Z compiled WHILE SERVING in {each.compile_s:.2f} s: "
            f"{each.function} of ({', '.join(each.arguments[:4])}{', ...' * (len(each.arguments) > 4)}) -> "
            f"{each.result}{constants}"
        )


COMMAND = Command(run, add_options, ADDRESS)
