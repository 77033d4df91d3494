from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import trustme
from tests.loadtest.known_servers import measured
from tests.loadtest.run_files import compared, run_file

from xlaserve.planning.virtual_time import VirtualTimeLoop
from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.run import ceilings, strain
from xlaserve_loadtest.run.recorder import Ceiling
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.schedule.tensors import Tensor
from xlaserve_loadtest.settings import NULL, Settings
from xlaserve_loadtest.targets.references import References
from xlaserve_loadtest.targets.target import Array, Connection, ModelInfo, Reply

__all__ = ["compared", "measured", "run_file"]  # fixtures, for all tests of the load tester

PUPPET = (sys.executable, str(Path(__file__).parent / "puppet.py"))

PuppetCommand = Callable[..., list[str]]
StartPuppet = Callable[..., str]


@pytest.fixture(scope="module", autouse=True)
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Has the servers that the load tester starts keep what they compile, and no server that other tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLASERVE_COMPILE_CACHE", str(tmp_path_factory.getbasetemp() / "compile_cache"))
        yield


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths of PEM files: an authority, and the key and certificate of a server and a client."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    paths = {"ca": folder / "ca.pem"}
    authority.cert_pem.write_to_path(str(paths["ca"]))
    for name, issued in (("server", authority.issue_cert("served.test")), ("client", authority.issue_cert("me@test"))):
        paths[f"{name}-key"], paths[f"{name}-cert"] = folder / f"{name}.key", folder / f"{name}.pem"
        issued.private_key_pem.write_to_path(str(paths[f"{name}-key"]))
        issued.cert_chain_pems[0].write_to_path(str(paths[f"{name}-cert"]))
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture
def in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]:
    """Runs a coroutine function on a `VirtualTimeLoop`, whose time no hypervisor steals."""
    monkeypatch.setattr(strain, "stolen_share", lambda before, after: 0.0)

    def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(main())

    return run


class FakeTarget:
    """Answers with what `handle` says; `handle` may sleep."""

    def __init__(self, handle: Callable[[Request], Awaitable[Reply]]) -> None:
        self.handle = handle
        self.connections = 0
        self.in_flight = 0
        self.peak_in_flight = 0

    @asynccontextmanager
    async def connect(
        self, models: Sequence[ModelInfo], addresses: Sequence[str], references: References
    ) -> AsyncIterator[Connection]:
        self.connections += 1
        yield self

    async def outputs(self, request: Request) -> list[Array]:
        raise NotImplementedError

    async def send(self, request: Request) -> Reply:
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            return await self.handle(request)
        finally:
            self.in_flight -= 1


@pytest.fixture
def fake_target() -> type[FakeTarget]:
    return FakeTarget


@pytest.fixture
def model_info() -> ModelInfo:
    return ModelInfo("digits", (32, 32), (Tensor("scores", "FP32", (-1, 10)),), {}, "puppet 1")


@pytest.fixture
def given_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what the generator can send: to measure it starts a server, and takes a second of each run."""
    start = ceilings.null_server

    def null_server(settings: Settings) -> AbstractAsyncContextManager[Any]:
        return start(settings) if settings.targets == (NULL,) else nullcontext()

    async def measure(protocol: str, server: None, workers: Sequence[Any]) -> Ceiling:
        return Ceiling(per_s=10_000.0, own_ms=0.3)

    monkeypatch.setattr(ceilings, "null_server", null_server)
    monkeypatch.setattr(ceilings, "measure", measure)


@pytest.fixture
def puppet_command() -> PuppetCommand:
    """The command line of a puppet server that does what the flags say."""
    return lambda *flags: [*PUPPET, *flags]


@contextmanager
def servers(folder: Path) -> Iterator[Callable[..., str]]:
    """Yields a function that starts the servers of a command and returns their addresses; ends them afterwards."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> str:
        ready = folder / f"ready-{len(started)}"
        os.mkfifo(ready)
        started.append(subprocess.Popen([*command, "--ready-file", str(ready)], stdout=subprocess.DEVNULL))
        return str(json.loads(ready.read_text())["grpc"])

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., str]]:
    with servers(tmp_path) as start:
        yield start


@pytest.fixture(scope="session")
def puppet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a puppet server that all tests share: it answers all alike."""
    with servers(tmp_path_factory.mktemp("puppet")) as start:
        yield start(*PUPPET)


@pytest.fixture
def start_puppet(start_server: Callable[..., str], request: pytest.FixtureRequest) -> StartPuppet:
    """Starts puppet servers with these flags, and returns their addresses. The first without any flag is shared."""
    shared = iter(["puppet"])

    def start(*flags: str) -> str:
        if not flags and (name := next(shared, None)):
            return str(request.getfixturevalue(name))
        return start_server(*PUPPET, *flags)

    return start


@pytest.fixture
def start_foreign(start_server: Callable[..., str]) -> StartPuppet:
    """Starts servers of another kind with these flags, and returns their addresses."""
    return lambda *flags: start_server(sys.executable, str(Path(__file__).parent / "foreign.py"), *flags)


OK = Reply(Status.OK)
