"""A front's link to an engine, and the models that the engine has published to it."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from xlaserve.engine.batching.model_queues import Live
from xlaserve.processes.link.arena import Arena
from xlaserve.processes.link.channel import Channel
from xlaserve.processes.link.engine_state import Snapshot
from xlaserve.processes.link.front_end.arena_memory import addressable_bytes, trim_regularly
from xlaserve.processes.link.front_end.engine_calls import EngineCalls
from xlaserve.processes.link.front_end.remote_model import RemoteModel
from xlaserve.processes.link.link_records import (
    Answered,
    Count,
    Counted,
    Failed,
    Levels,
    Moved,
    OutputLayout,
    Outstanding,
    Published,
    Record,
    Refused,
    Released,
    Settled,
    Succeeded,
)
from xlaserve.processes.link.record_codec import RecordReader, pack_hello

log = logging.getLogger(__name__)

MAX_JOBS: Final = 2**16
"""More than all models together have under way: the limits of each model bound its own."""
MAX_HELD_S: Final = 1e-3
"""How long records wait at most, while this front has other work, for others to be sent with them."""
GREETING_S: Final = 10.0
MONOTONIC: Final = "clock_gettime(CLOCK_MONOTONIC)"
"""The clock of deadlines: the one that all processes of a machine share."""


class EngineLink:
    """A link to an engine. All methods run on the event loop.

    `models` are those that the engine has published last, by the ids of their snapshots. When the link ends, all that
    is under way fails with EngineLost at once. `on_models` and `tally` are those of `connect`.
    """

    def __init__(
        self,
        arena_bytes: int | None,
        max_jobs: int,
        on_models: Callable[[EngineLink], object],
        tally: Callable[[], object],
    ) -> None:
        self.epoch = 0
        self.details: object = None
        """The details of the last snapshot."""
        self.about: object = None
        """The engine's data about itself as of about a second ago; None until it has run something."""
        self._models: dict[int, RemoteModel] = {}
        self._on_models = on_models
        self._tally = tally
        self._lost_as = ""
        self._lost = asyncio.Event()
        self._published = asyncio.Event()
        self._superseded = asyncio.Event()
        """Set once another engine has taken this one's place, or the link has ended."""
        self._moved = asyncio.Event()
        """Set once this front has linked to that other engine, or the link has ended."""
        self._trimming: asyncio.Task[None] | None = None
        self.channel = Channel(RecordReader.from_engine(), self._receive, self._end, MAX_HELD_S)
        self._calls = EngineCalls(Arena(arena_bytes or addressable_bytes()), max_jobs, self.channel.send)

    @property
    def arena(self) -> Arena:
        """The memory with the pixels and outputs of all models."""
        return self._calls.arena

    @property
    def models(self) -> Mapping[int, RemoteModel]:
        """The models of the last snapshot, by their ids."""
        return MappingProxyType(self._models)

    @property
    def jobs(self) -> int:
        """Jobs that the engine has not given back."""
        return self._calls.jobs

    @property
    def is_lost(self) -> bool:
        """Whether the link has ended."""
        return bool(self._lost_as)

    async def lost(self) -> str:
        """Returns why the link has ended, once it has."""
        await self._lost.wait()
        return self._lost_as

    async def published(self) -> None:
        """Returns once the engine has published its models, or the link has ended."""
        await self._published.wait()

    @property
    def is_superseded(self) -> bool:
        """Whether another engine has taken this one's place."""
        return self._superseded.is_set() and not self._lost_as

    async def superseded(self) -> bool:
        """Returns True once another engine has taken this one's place, and False once the link has ended."""
        await self._superseded.wait()
        return not self._lost_as

    def move(self) -> None:
        """Tells the engine that this front sends its new requests to another one.

        `on_models` is called no more. Jobs that are under way go on.
        """
        self.channel.send(Moved())
        self._moved.set()

    async def moved(self) -> None:
        """Returns once `move` was called, or the link has ended."""
        await self._moved.wait()

    async def ask(self, question: str, **arguments: object) -> Any:
        """Returns the engine's answer to a question; see `EngineCalls.ask`."""
        return await self._calls.ask(question, **arguments)

    async def answered(self) -> None:
        """Returns once all questions are answered."""
        await self._calls.answered()

    def check(self) -> None:
        """Raises EngineLost where the link has ended."""
        self._calls.check()

    def close(self) -> None:
        """Ends the link."""
        self.channel.end("it was closed")

    def _receive(self, record: Record) -> None:
        match record:
            case Settled():
                self._calls.settle(record)
            case Failed(number, tail):
                self._calls.fail(number, tail)
            case Released(number):
                self._calls.release(number)
            case OutputLayout(number, tail):
                self._calls.add_layout(number, pickle.loads(tail))
            case Published(_, tail):
                self._update_models(pickle.loads(tail))
            case Outstanding(model, seconds):
                if model in self._models:
                    self._models[model].update_outstanding(seconds)
            case Levels(tail):
                levels, self.about = pickle.loads(tail)
                self._update_levels(levels)
            case Succeeded():
                self._superseded.set()
            case Count(number):
                self.channel.send(Counted(number, json.dumps(self._tally()).encode()))
            case Answered(number, tail):
                self._calls.answer(number, tail)
            case Refused(number, tail):
                self._calls.refuse(number, tail)

    def _update_levels(self, levels: Mapping[int, Live]) -> None:
        for number, live in levels.items():
            if (model := self._models.get(number)) is not None:
                model.update_live(live)

    def _update_models(self, snapshot: Snapshot) -> None:
        for gone in self._models.keys() - {model.id for model in snapshot.models}:
            self._models.pop(gone).close()
        for model_snapshot in snapshot.models:
            if (known := self._models.get(model_snapshot.id)) is None:
                self._models[model_snapshot.id] = RemoteModel(self._calls, model_snapshot)
            else:
                known.update(model_snapshot)
        self.epoch, self.details = snapshot.epoch, snapshot.details
        self._published.set()
        self._trimming = self._trimming or asyncio.create_task(trim_regularly(self.arena), name="trim")
        if not self._moved.is_set():
            self._on_models(self)

    def _end(self, reason: str) -> None:
        self._lost_as = reason
        if jobs := self._calls.lose():
            log.warning("the link to the engine ended with %d jobs under way: %s", jobs, reason)
        if self._trimming is not None:
            self._trimming.cancel()
        for event in (self._lost, self._published, self._superseded, self._moved):
            event.set()


async def connect(
    address: Path | socket.socket,
    *,
    arena_bytes: int | None = None,
    max_jobs: int = MAX_JOBS,
    on_models: Callable[[EngineLink], object] = lambda link: None,
    tally: Callable[[], object] = dict,
) -> EngineLink:
    """Opens a link to an engine that listens at a path, or at the other end of a connected socket.

    Returns once the engine has published its models; `on_models` is called then and whenever they change. `tally`
    returns, in plain data of JSON, what this front has counted, whenever the engine asks for it. `arena_bytes` bound
    the pixels and outputs that this front has there for all models; by default there are addresses enough. Raises
    EngineLost, and OSError where nobody listens.
    """
    if time.get_clock_info("perf_counter").implementation != MONOTONIC:
        raise RuntimeError("fronts and engines need a clock that is the same in all processes, as Linux has it")
    loop = asyncio.get_running_loop()
    connection = address if isinstance(address, socket.socket) else socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        if isinstance(address, Path):
            await loop.sock_connect(connection, str(address))
        link = EngineLink(arena_bytes, max_jobs, on_models, tally)
    except BaseException:
        connection.close()
        raise
    try:
        socket.send_fds(connection, [pack_hello(link.arena.size_bytes, max_jobs)], [link.arena.file])
        await loop.connect_accepted_socket(lambda: link.channel, connection)
    except BaseException:
        link.arena.end()
        connection.close()
        raise
    try:
        async with asyncio.timeout(GREETING_S):
            await link.published()
    except BaseException:
        link.close()
        raise
    link.check()
    return link
