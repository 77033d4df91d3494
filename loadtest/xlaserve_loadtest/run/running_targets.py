"""The running targets: their processes, and how they describe themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import grpc.aio
import psutil

from xlaserve_loadtest.addresses import CLEAR, FLEET, SECURE, Address
from xlaserve_loadtest.record.lines import Arm, LedgerEntry, Server
from xlaserve_loadtest.run import usage
from xlaserve_loadtest.run.others import is_here
from xlaserve_loadtest.run.workers import WorkerProcess
from xlaserve_loadtest.schedule.arms import AS_IT_IS
from xlaserve_loadtest.targets.channel import PLAIN, Transport, open_channel
from xlaserve_loadtest.targets.embedded import EmbeddedServer
from xlaserve_loadtest.targets.protocols import describe
from xlaserve_loadtest.targets.server_fleet import ready_server
from xlaserve_loadtest.targets.target import ModelInfo, TargetError
from xlaserve_proto import vision_pb2, vision_pb2_grpc

_DEADLINE_S: Final = 10.0


@dataclass
class RunningTarget:
    """A target: a server process of ours, running servers of others, or a worker that is its own target."""

    id: int
    arms: tuple[Arm, ...]
    addresses: tuple[str, ...] = ()
    http_address: str | None = None
    pid: int | None = None
    process: EmbeddedServer | None = None
    models: dict[str, ModelInfo] = field(default_factory=dict)
    ledger: tuple[LedgerEntry, ...] = ()
    ready_s: float | None = None
    is_hidden: bool = False
    """Whether it is on this machine and its process can't be seen, so that it can't be told from other processes."""
    own_workers: tuple[WorkerProcess, ...] = ()
    """Workers that only this target has."""

    def models_of(self, arm: str) -> tuple[str, ...]:
        """Returns the models that an arm runs."""
        return next(own.served for own in self.arms if own.name == arm)

    def line(self) -> Server:
        """Returns the target's line in the record."""
        first = next(iter(self.models.values()))
        return Server(
            id=self.id,
            arms=tuple(arm.name for arm in self.arms),
            address=",".join(self.addresses) or first.server,
            name=first.server,
            pid=self.pid,
            models={name: dict(info.properties) for name, info in self.models.items()},
            ledger=self.ledger,
            ready_s=self.ready_s,
        )


async def of_server(number: int, arms: Sequence[Arm], server: EmbeddedServer, models: Sequence[str]) -> RunningTarget:
    """Describes a server that we started, once it is ready. Raises TargetError."""
    return RunningTarget(
        id=number,
        arms=tuple(arms),
        addresses=(server.address,),
        http_address=server.http_address,
        pid=server.pid,
        process=server,
        models={model: await describe(server.address, model) for model in models},
        ledger=await read_ledger(server.address, models),
        ready_s=server.ready_s,
    )


async def of_targets(
    number: int,
    arms: Sequence[Arm],
    addresses: Sequence[str],
    models: Sequence[str],
    *,
    http_address: str | None,
    transport: Transport,
) -> RunningTarget:
    """Describes servers that others run. Raises TargetError."""
    descriptions = {model: [await describe(address, model, transport) for address in addresses] for model in models}
    for model, own in descriptions.items():
        for info, address in zip(own, addresses, strict=True):
            if info.outputs != own[0].outputs:
                raise TargetError(f"{address}: {model} has other outputs than at {addresses[0]}")
    for arm in arms:
        for name in arm.served:
            for address, info in zip(addresses, descriptions[name], strict=True):
                _check_mode(address, info, arm.mode)
    is_fleet = Address.parse(addresses[0]).protocol == FLEET
    is_one = len(addresses) == 1 and not is_fleet
    pid, own_http = await asyncio.to_thread(_local_process, addresses[0]) if is_one else (None, ())
    is_hidden = pid is None and await asyncio.to_thread(lambda: any(map(is_here, addresses)))
    if http_address is not None:
        if await usage.counts(http_address, models) is None:
            raise TargetError(f"--target-http: expected the address of a server's /metrics, got {http_address}")
    else:
        for candidate in own_http:
            if await usage.counts(candidate, models) is not None:
                http_address = candidate
                break
    return RunningTarget(
        id=number,
        arms=tuple(arms),
        addresses=tuple(addresses),
        http_address=http_address,
        pid=pid,
        is_hidden=is_hidden,
        models={model: own[0] for model, own in descriptions.items()},
        ledger=await read_ledger(await ready_server(addresses[0]) if is_fleet else addresses[0], models, transport),
    )


def _check_mode(address: str, info: ModelInfo, mode: str) -> None:
    """Raises TargetError for a mode that the server does not offer, before any request asks for it."""
    if mode == AS_IT_IS or mode in info.modes:
        return
    if not info.modes:
        raise TargetError(f"{address} names no modes of {info.name}: leave out the mode {mode}")
    raise TargetError(f"{address} does not offer the mode {mode} of {info.name}: it has {', '.join(info.modes)}")


async def read_ledger(address: str, models: Sequence[str], transport: Transport = PLAIN) -> tuple[LedgerEntry, ...]:
    """Asks an xlaserve server what it compiled for `models`; returns nothing for any other server."""
    where = Address.parse(address)
    if where.protocol in (*CLEAR, *SECURE):
        return ()
    async with open_channel(where.authority, transport) as channel:
        stub: Any = vision_pb2_grpc.VisionStub(channel)
        try:
            answer = await stub.ListModels(
                vision_pb2.ListModelsRequest(), timeout=_DEADLINE_S, metadata=transport.headers
            )
        except grpc.aio.AioRpcError:
            return ()
    return tuple(
        LedgerEntry(
            mode=program.mode,
            bucket=(program.bucket.batch, program.bucket.height, program.bucket.width),
            trace_s=program.trace_s,
            compile_s=program.compile_s,
            run_s=program.run_s,
            run_loaded_s=program.run_loaded_s or None,
            model=model.name,
            from_cache=program.from_cache,
        )
        for model in answer.models
        if model.name in models
        for program in model.programs
    )


def _local_process(address: str) -> tuple[int | None, tuple[str, ...]]:
    """Returns the process that listens at a loopback address, where it can be seen, and its other addresses."""
    where = Address.parse(address)
    if not where.is_loopback:
        return None, ()
    with suppress(psutil.Error, OSError):
        listening = {
            (connection.laddr[1], connection.pid)
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.pid
        }
        for own_port, pid in listening:
            if own_port == where.port:
                others = [other for other, owner in listening if owner == pid and other != own_port]
                return pid, tuple(where._replace(port=other).authority for other in others)
    return None, ()
