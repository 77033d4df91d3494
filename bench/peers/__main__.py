"""What others serve of the same network on this machine: `python -m bench.peers [--json FILE] [--quick]`.

MobileNetV2 in float32, one image a request, from xlaserve as it is by default and with `modes: [auto]`; from a bare
servicer of grpcio on asyncio and uvloop around OpenVINO, with either of its performance hints; and from PyTriton and
MLServer with their defaults around OpenVINO. All have the same weights, and their answers are compared first. Each peer
has an environment of its own in build/peers, which is made from the package index; one that can't be made is left out.
Blocks take turns; exits 1 when the target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import grpc
import numpy as np
from scripts.environments import make

from bench import processes
from bench.figures import Figure, finish, ratio
from bench.generator import answer, closed_loop, pixels_request
from bench.peers import KERAS, SAVED, SIDE
from bench.trials import interleaved
from xlaserve.programs.tf.device import cpu_name

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = Path(__file__).parent
BUILT: Final = ROOT / "build" / "peers"
OURS: Final = "xlaserve"
AUTO: Final = "xlaserve, auto"
OWN: Final[Mapping[str, Mapping[str, object]]] = {OURS: {}, AUTO: {"modes": ["auto"]}}
"""Our own servers, and the settings of their model."""
CONCURRENCY: Final = (1, 8, 32)
LEAST: Final = 1.15
"""Of the images/s of the best of them, the least that xlaserve is to serve, at every concurrency."""
BUCKETS: Final = (1, 2, 4, 8)
START_S: Final = 120.0
END_S: Final = 20.0
POLL_S: Final = 0.1
SYSTEM_PYTHON: Final = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
"""PyTriton loads the shared library of the system's Python, with which that of another build does not go together."""
TOLERANCE: Final = 0.01
"""Of scores, relative to how far these differ among themselves: all classes are nearly as likely to random weights."""


class Peer(NamedTuple):
    """Another server."""

    environment: str
    """The file with what is installed for it, without `.txt`, and the name of its environment."""
    words: tuple[str, ...]
    """What its Python runs; `{saved}`, `{port}` and `{folder}` are filled in."""


PEERS: Final[Mapping[str, Peer]] = {
    "bare OpenVINO, throughput": Peer(
        "openvino", ("-m", "bench.peers.bare_openvino", "{saved}", "{port}", "THROUGHPUT")
    ),
    "bare OpenVINO, latency": Peer("openvino", ("-m", "bench.peers.bare_openvino", "{saved}", "{port}", "LATENCY")),
    "PyTriton": Peer("pytriton", ("-m", "bench.peers.pytriton_server", "{saved}", "{port}")),
    "MLServer": Peer("mlserver", ("-c", "from mlserver.cli import main; main()", "start", "{folder}")),
}


def compared(concurrency: int, rates: Mapping[str, list[float]]) -> Iterator[Figure]:
    """Yields xlaserve's images/s over those of each other, and of the best of them."""
    others = [arm for arm in rates if arm not in OWN]
    for arm in others:
        yield ratio(f"images/s at {concurrency}, xlaserve / {arm}", rates[OURS], rates[arm], None)
    if others:
        best = max(others, key=lambda arm: median(rates[arm]))
        for own in filter(rates.__contains__, OWN):
            yield ratio(f"images/s at {concurrency}, {own} / the best", rates[own], rates[best], LEAST)


def figures(names: list[str], blocks: int, block_s: float) -> Iterator[Figure]:
    """Yields what all servers serve, at each number of requests in flight."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        subprocess.run((sys.executable, "-m", "bench.peers.export", str(folder)), check=True)
        model = {"name": "model", "source": str(folder / KERAS), "preprocess": "tf", "buckets": BUCKETS}
        servers = {
            own: stack.enter_context(processes.xlaserve({"models": [{**model, **more}]})).address
            for own, more in OWN.items()
        }
        for name in names:
            try:
                python = _python(PEERS[name].environment)
                servers[name] = stack.enter_context(_running(name, python, folder))
            except (AssertionError, RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"{name} is left out, it can't be installed or started: {error}", flush=True)
        _check(servers)
        payload = pixels_request("model", SIDE)
        for concurrency in CONCURRENCY:
            arms = {
                arm: partial(_images_per_s, address, payload, concurrency, block_s) for arm, address in servers.items()
            }
            rates = interleaved(arms, blocks)
            for arm, found in rates.items():
                print(f"  {arm}, {concurrency} at once: {median(found):.1f} images/s", flush=True)
            yield from compared(concurrency, rates)


def _python(environment: str) -> Path:
    """Returns the interpreter of a peer's environment. Raises AssertionError where that can't be made."""
    python = SYSTEM_PYTHON if environment == "pytriton" and SYSTEM_PYTHON.exists() else sys.executable
    return make(FOLDER / f"{environment}.txt", BUILT / environment, python) / "bin" / "python"


@contextmanager
def _running(name: str, python: Path, folder: Path) -> Iterator[str]:
    """Runs a peer, and gives its address once it answers. What it writes goes into a file in build/peers.

    Raises RuntimeError where it does not answer.
    """
    port, http, metrics = _free_ports(3)
    _configure_mlserver(folder, port, http, metrics)
    filled = [word.format(saved=folder / SAVED, port=port, folder=folder) for word in PEERS[name].words]
    # Only the stubs of ours: other packages of this environment would clash with theirs.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "proto")))}
    environment.pop("GRPC_EXPERIMENTS", None)
    log = BUILT / f"{name.replace(', ', '-').replace(' ', '-')}.log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            (python, *filled), cwd=folder, env=environment, stdout=written, stderr=written, start_new_session=True
        )
    try:
        address = f"127.0.0.1:{port}"
        until = time.monotonic() + START_S
        while not _answers(address):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"not ready, exit status {process.returncode}, see {log}")
            time.sleep(POLL_S)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _configure_mlserver(folder: Path, grpc_port: int, http_port: int, metrics_port: int) -> None:
    """Writes what MLServer reads: its ports, and the model."""
    ports = {"host": "127.0.0.1", "grpc_port": grpc_port, "http_port": http_port, "metrics_port": metrics_port}
    model = {
        "name": "model",
        "implementation": "bench.peers.mlserver_runtime.OpenVino",
        "parameters": {"uri": str(folder / SAVED)},
    }
    (folder / "settings.json").write_text(json.dumps(ports))
    (folder / "model-settings.json").write_text(json.dumps(model))


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _answers(address: str) -> bool:
    try:
        _scores(address)
    except grpc.RpcError:
        return False
    return True


def _scores(address: str) -> Any:
    return np.frombuffer(answer(address, pixels_request("model", SIDE)), np.float32)


def _answer_of(name: str, address: str) -> Any:
    try:
        return _scores(address)
    except grpc.RpcError as error:
        raise RuntimeError(f"{name} answered, and does no longer: {error}") from error


def _check(servers: Mapping[str, str]) -> None:
    """Raises RuntimeError where a server answers something else than xlaserve."""
    expected, *others = (_answer_of(name, address) for name, address in servers.items())
    for name, scores in zip([arm for arm in servers if arm != OURS], others, strict=True):
        difference = float(np.abs(scores - expected).max() / expected.std())
        print(f"  {name}: largest difference of scores {difference:.1e} of their spread", flush=True)
        if not difference < TOLERANCE:
            raise RuntimeError(f"{name} answers something else: not the same network")


def _images_per_s(address: str, payload: bytes, concurrency: int, seconds: float) -> float:
    return closed_loop(address, payload, concurrency, seconds=seconds).per_s


def main() -> None:
    """Runs the command; exits 1 when the target is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--peers", default=None, help=f"separated by semicolons, of: {'; '.join(PEERS)}")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench-peers.json")
    parser.add_argument("--quick", action="store_true", help="shorter: shows that it runs, not what it says")
    options = parser.parse_args()
    names = [*PEERS] if options.peers is None else [name.strip() for name in options.peers.split(";")]
    blocks, block_s = (2, 1.0) if options.quick else (7, 3.0)
    cores = os.cpu_count() or 1
    print(f"{cpu_name()}, {cores} cores, {blocks} blocks of {block_s:g} s", flush=True)
    machine = {"processor": cpu_name(), "cores": cores, "python": platform.python_version()}
    finish(options.json, figures(names, blocks, block_s), machine=machine)


if __name__ == "__main__":
    main()
