"""The clients of others that are run unmodified against a server, and what is called in each."""

from __future__ import annotations

import ast
import base64
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from scripts.environments import run
from tests.clients.environments import FOLDER, REPOSITORY, debian_library, environment, version

SAMPLE: Final = REPOSITORY / "scripts" / "samples" / "digits" / "3_1765.png"
SIDE: Final = 32
TIMEOUT_S: Final = 120
WORKS: Final = "works"
SHORT: Final = ("-p", "400", "-s", "999", "-r", "3")
"""Three windows of perf_analyzer, however they differ: it is asked whether it works, not how fast."""


class Target(NamedTuple):
    """A server: HOST:PORT of each protocol."""

    grpc: str
    http: str
    locked: Path
    """What clients need of servers that ask who calls, as `locked.running` writes it."""


@dataclass(frozen=True)
class Client:
    """A client of others. `calls` are as docs/clients.md shows them, and the order of what `results` yields."""

    name: str
    package: str
    """The package whose version is shown, among those of NAME.txt; empty for a program of the system."""
    calls: tuple[str, ...]
    results: Callable[[Target, Path], Iterator[str]]
    """Yields how each call ended, WORKS or why it did not; writes into a folder."""
    is_quick: bool = False
    """Whether `make test` runs it, as it needs a small environment."""

    @property
    def version(self) -> str:
        return version(self.name, self.package) if self.package else "the system's"


def documented_calls(script: str) -> Mapping[str, str]:
    """Returns the functions of a script that have a docstring, and the docstring."""
    tree = ast.parse((FOLDER / script).read_text())
    functions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return {node.name: text for node in functions if (text := ast.get_docstring(node))}


def python_client(
    name: str,
    package: str,
    script: str,
    addresses: Callable[[Target], Iterable[str]] = lambda target: [target.grpc],
    *,
    is_quick: bool = False,
) -> Client:
    """Returns a client whose calls are the documented functions of `script`, a script in Python."""
    calls = documented_calls(script)

    def results(target: Target, folder: Path) -> Iterator[str]:
        python = environment(name) / "bin" / "python" if package else sys.executable
        ended: dict[str, str] = json.loads(
            run(python, FOLDER / script, *addresses(target), SAMPLE, timeout_s=TIMEOUT_S, cwd=folder)
        )
        for call in calls:
            yield ended[call] or WORKS

    return Client(name, package, tuple(calls.values()), results, is_quick=is_quick)


def with_access(client: Client, *protocols: str) -> Client:
    """Returns a client that is also run against servers that ask who calls, by each of some protocols."""
    calls = documented_calls("access_calls.py")

    def results(target: Target, folder: Path) -> Iterator[str]:
        yield from client.results(target, folder)
        python = environment(client.name) / "bin" / "python" if client.package else sys.executable
        for protocol in protocols:
            way = f"{client.name}.{protocol}"
            ended = json.loads(
                run(python, FOLDER / "access_calls.py", way, target.locked, timeout_s=TIMEOUT_S, cwd=folder)
            )
            for call in calls:
                yield ended[call] or WORKS

    more = (f"{protocol}: {text}" for protocol in protocols for text in calls.values())
    return replace(client, calls=(*client.calls, *more), results=results)


def shown(arguments: str) -> str:
    """Returns how a command of perf_analyzer is shown."""
    return f"`perf_analyzer -u HOST:PORT -i grpc {arguments}`"


PERF_ANALYZER: Final = (
    "-m digits",
    "-m digits -b 8",
    "-m digits --concurrency-range 4",
    "-m digits -a --concurrency-range 4",
    "-m digits -a --streaming --concurrency-range 4",
    "-m digits --request-rate-range 50",
    "-m digits --shared-memory system",
    "-m digits --shared-memory system -b 8",
    "-m digits --input-data pixels.json",
    "-m digits --input-data folder",
    "-m digits-images --input-data images.json",
    "-m change",
    "-m change -b 4 --concurrency-range 4",
    "-m change --shared-memory system",
)


def perf_analyzer(address: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs perf_analyzer in a folder, over gRPC."""
    client = environment("perf-analyzer")
    libraries = [*client.glob("lib/python*/site-packages/nvidia/cuda_runtime/lib")]
    if base64_library := debian_library("perf-analyzer", "libb64-0d", "libb64.so.0d"):
        libraries.append(base64_library)
    return subprocess.run(
        [client / "bin" / "perf_analyzer", "-u", address, "-i", "grpc", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=folder,
        env={**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, libraries))},
    )


def perf_analyzer_results(target: Target, folder: Path) -> Iterator[str]:
    """Runs perf_analyzer once for each call."""
    write_input_data(folder)
    for arguments in PERF_ANALYZER:
        done = perf_analyzer(target.grpc, folder, *arguments.split(), *SHORT)
        rates = re.findall(r"throughput: ([\d.]+) infer/sec", done.stdout)
        is_fine = done.returncode == 0 and rates and float(rates[-1]) > 0
        yield WORKS if is_fine else (done.stderr.strip() or done.stdout.strip()).splitlines()[-1][:200]


def write_input_data(folder: Path) -> None:
    """Writes pixels and images as perf_analyzer reads them."""
    pixels = bytes(range(256)) * (SIDE * SIDE * 3 // 256)
    image = SAMPLE.read_bytes()
    (folder / "folder").mkdir()
    (folder / "folder" / "pixels").write_bytes(pixels)
    listed = {"data": [{"pixels": {"content": [*pixels], "shape": [SIDE, SIDE, 3]}}]}
    (folder / "pixels.json").write_text(json.dumps(listed))
    # An element of BYTES in base64 includes its length.
    encoded = base64.b64encode(struct.pack("<I", len(image)) + image).decode()
    (folder / "images.json").write_text(json.dumps({"data": [{"image": {"b64": encoded}}] * 2}))


SCHEMATHESIS: Final = "--phases examples,coverage,fuzzing --max-examples 10 --continue-on-failure --no-color"


def schemathesis_results(target: Target, folder: Path) -> Iterator[str]:
    """Lets schemathesis make up requests of the OpenAPI document. Models stay loaded, for other clients."""
    done = subprocess.run(
        [
            environment("schemathesis") / "bin" / "schemathesis",
            *("--config-file", FOLDER / "schemathesis.toml", "run", f"http://{target.http}/openapi.json"),
            *("--exclude-path-regex", "/(un)?load$", *SCHEMATHESIS.split()),
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=folder,
    )
    faults = re.findall(r"^- (.*)$", done.stdout, re.MULTILINE)
    yield WORKS if done.returncode == 0 else "; ".join(faults) or (done.stdout + done.stderr)[-300:]


CLIENTS: Final = (
    with_access(python_client("tritonclient", "tritonclient", "tritonclient_calls.py", is_quick=True), "grpc", "http"),
    Client("perf-analyzer", "tritonclient", tuple(map(shown, PERF_ANALYZER)), perf_analyzer_results),
    with_access(python_client("kserve", "kserve", "kserve_calls.py", lambda target: target[:2]), "grpc", "http"),
    Client(
        "schemathesis",
        "schemathesis",
        ("`schemathesis run http://HOST:PORT/openapi.json`: no error of the server, and answers as documented",),
        schemathesis_results,
    ),
    with_access(
        python_client(
            "tensorflow-serving",
            "tensorflow-serving-api",
            "tensorflow_serving_calls.py",
            lambda target: target[:2],
        ),
        "grpc",
        "http",
    ),
    with_access(
        python_client("curl", "", "curl_calls.py", lambda target: [target.http], is_quick=bool(shutil.which("curl"))),
        "http",
    ),
)
