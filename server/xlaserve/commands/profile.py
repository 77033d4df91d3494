"""`xlaserve profile`: a trace for TensorBoard, of batches in this process or of what a running server does."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from xlaserve.commands import arguments, remote, subject
from xlaserve.commands.command import EXECUTION, Command, Invocation
from xlaserve.config import Mode
from xlaserve.engine.warmup.compiler import measure, noise
from xlaserve.errors import ConfigError
from xlaserve.inspection.explanation import amount, seconds
from xlaserve_proto import admin_pb2, admin_pb2_grpc

ANSWER_S: Final = 120.0
"""How long a server may take to write what it recorded."""
HEAVIEST: Final = 10


def run(invocation: Invocation) -> int:
    """Records, and says where to look."""
    own = invocation.own
    if own.target is not None:
        return _of_server(own.target, own.seconds)
    if own.model is None:
        raise ConfigError("model: expected a model to run, or --target")
    arguments.make_folder(own.out)
    loaded = subject.load(invocation.settings, own.model, own.bucket, own.mode)
    program = loaded.compile(own.mode)
    inputs = loaded.model.inputs
    measure(program.executable, loaded.bucket, lanes=1, inputs=inputs)  # until it runs as it will

    from xlaserve.programs.tf import trace  # noqa: PLC0415 - TensorFlow had to be set up first

    rows = noise(loaded.bucket, inputs)
    with trace.recorded(own.out):
        batches = _run_batches(lambda: program.executable(*rows), loaded.device.lanes, own.seconds)
    images = batches * loaded.bucket.batch
    say = sys.stdout.write
    say(f"{batches} batches of {loaded.bucket} in {own.mode}, {images / own.seconds:,.0f} images/s while recording\n")
    took = sorted(trace.instruction_s(own.out).items(), key=lambda item: item[1], reverse=True)[:HEAVIEST]
    for name, second in took:
        say(f"  {seconds(second / batches):>10} a batch  {name}\n")
    say(f"look at it with: tensorboard --logdir {own.out}   (pip install tensorboard tensorboard-plugin-profile)\n")
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a configured model, or any source, to be run here")
    remote.add_target(parser, "record what this running server does instead; it must be configured with admin: true")
    parser.add_argument("--seconds", type=arguments.duration_s, default=5.0, metavar="S", help="how long (%(default)g)")
    parser.add_argument("--out", type=Path, default=Path("xlaserve-profile"), metavar="DIR", help="%(default)s")
    parser.add_argument("--bucket", type=arguments.bucket, metavar="BxHxW", help="the bucket: 8, or 8x224x224")
    modes = [mode for mode in Mode if not mode.traits.choice]
    parser.add_argument("--mode", type=Mode, choices=modes, default=Mode.XLA, help="how to run it (%(default)s)")


def _of_server(server: str, seconds: float) -> int:
    with remote.channel(server, needs="it records no profiles; start it with admin: true, or --admin") as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        answer = stub.Profile(
            admin_pb2.ProfileRequest(seconds=seconds), timeout=seconds + ANSWER_S, metadata=remote.metadata()
        )
    size = amount(answer.size_bytes, "B")
    sys.stdout.write(f"{size} recorded in {answer.seconds:g} s: {answer.folder}, in the server's profile_dir\n")
    return 0


def _run_batches(run: Callable[[], object], lanes: int, duration_s: float) -> int:
    """Runs batches on every lane for `duration_s`, and returns how many."""
    end = threading.Event()

    def lane() -> int:
        count = 0
        while not end.is_set():
            run()
            count += 1
        return count

    with ThreadPoolExecutor(lanes, thread_name_prefix="lane") as pool:
        counts = [pool.submit(lane) for _ in range(lanes)]
        time.sleep(duration_s)
        end.set()
        return sum(count.result() for count in counts)


COMMAND = Command(run, add_options, EXECUTION)
