"""The engine's side of all links: takes in fronts, publishes models to them, and ends the links."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from xlaserve.config import Mode
from xlaserve.errors import UnsupportedFeature
from xlaserve.processes.link.arena import ArenaView
from xlaserve.processes.link.engine_end.front_link import Answer, FrontLink
from xlaserve.processes.link.engine_end.hosted_models import Hosted, HostedModels
from xlaserve.processes.link.link_records import Garbled, Levels, Succeeded
from xlaserve.processes.link.record_codec import HELLO, unpack_hello

log = logging.getLogger(__name__)

GREETING_S: Final = 5.0
"""The time within which a front has to send its greeting."""
ACCEPT_RETRY_S: Final = 0.1
CLOSING_S: Final = 1.0
"""How long a front may take to read its last answers."""
COUNT_S: Final = 0.25
"""How long `count` waits for fronts that do not answer. Their last counts stand."""
LEVELS_S: Final = 1.0
"""How often fronts are told the load of models that have run something since."""


class Host:
    """Takes in the links of fronts, runs their jobs, and has `answer` answer their questions.

    Once in a while fronts are told what `about` returns: plain data on the engine. `on_linked` is called for each front
    that was taken in, `on_gone` with the last counts of each whose link has ended. All methods run on the event loop.
    """

    def __init__(
        self,
        answer: Answer | None = None,
        about: Callable[[], object] = lambda: None,
        on_gone: Callable[[Any], object] = lambda tally: None,
        on_linked: Callable[[], object] = lambda: None,
    ) -> None:
        self._answer: Answer = answer or _refuse_questions
        self._about = about
        self._on_gone = on_gone
        self._on_linked = on_linked
        self._has_successor = False
        self._counts = 0
        self._models = HostedModels()
        self._copying = ThreadPoolExecutor(1, "copy")
        self._links: set[FrontLink] = set()
        self._changed = asyncio.Event()
        """Set when a link has ended, or its front has linked to the engine in this one's place."""
        self._listening: list[asyncio.Task[None]] = []
        self._greeting: set[asyncio.Task[None]] = set()

    @property
    def fronts(self) -> int:
        """Links that are open."""
        return len(self._links)

    def publish(self, models: Iterable[Hosted], details: object = None) -> None:
        """Has fronts use these models from now on, and no others. Jobs of others that are on their way fail."""
        self._models.publish(models, details)
        record = self._models.record()
        for link in self._links:
            link.publish(record)

    async def accept(self, connection: socket.socket) -> None:
        """Takes in the front at the other end of a connected socket. Raises Garbled, TimeoutError, or OSError."""
        try:
            connection.setblocking(False)
            view, max_jobs = await asyncio.wait_for(_greeted(connection), GREETING_S)
            link = FrontLink(
                self._models,
                view,
                max_jobs,
                answer=self._answer,
                copying=self._copying,
                on_moved=self._changed.set,
                on_end=self._forget,
            )
            await asyncio.get_running_loop().connect_accepted_socket(lambda: link.channel, connection)
        except BaseException:
            connection.close()
            raise
        link.publish(self._models.record())
        if link.channel.is_open:
            self._links.add(link)
            self._on_linked()
            if self._has_successor:
                link.channel.send(Succeeded())
        else:
            link.release_all()

    def listen(self, listener: socket.socket) -> None:
        """Takes in the fronts that connect to a listening socket, as `bound` returns it, until `close`."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        self._listening = [
            loop.create_task(self._listen(listener), name="fronts"),
            loop.create_task(self._tell_levels(), name="levels"),
        ]

    async def open(self, model: int, height: int, width: int) -> None:
        """Makes a model ready for a resolution without buckets, as a front asks for it. Raises what `Ticket.open`
        and `ModelEngine.admit` raise."""
        resolution = height, width
        with self._models.engine(model).admit(0, 0, resolution) as admitted:
            await admitted.open(resolution, Mode.GRAPH)

    async def count(self) -> list[Any]:
        """Returns the counts of each front: those of now if it answers soon, else the last that it has sent."""
        self._counts += 1
        answers = [link.count(self._counts) for link in self._links]
        if answers:
            await asyncio.wait(answers, timeout=COUNT_S)
        return [link.tally for link in self._links if link.tally is not None]

    async def succeed(self) -> None:
        """Takes in no more fronts, and has all link to the engine that takes this one's place.

        Returns once each of them sends its new requests there, or its link has ended.
        """
        self._has_successor = True
        self._listening[0].cancel()
        for link in self._links:
            link.channel.send(Succeeded())
        while not all(link.has_moved for link in self._links):
            await self._next_change()

    async def drained(self) -> None:
        """Returns once the links of all fronts have ended."""
        while self._links:
            await self._next_change()

    async def close(self) -> None:
        """Takes in no more fronts, sends the answers that are there, and ends all links."""
        for task in self._listening:
            task.cancel()
        if self._listening:
            await asyncio.wait(self._listening)
        for greeting in self._greeting:
            greeting.cancel()
        for link in [*self._links]:
            link.channel.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_S):
                await self.drained()
        for link in [*self._links]:  # their fronts do not read
            link.channel.end("it was closed")
        self._copying.shutdown(wait=False)

    def _forget(self, link: FrontLink) -> None:
        """Drops a link that has ended."""
        self._links.discard(link)
        if link.tally is not None:
            self._on_gone(link.tally)
        self._changed.set()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:  # out of file descriptors: some are free once something has ended
                    log.warning("a front could not be taken in: %s", error)
                    await asyncio.sleep(ACCEPT_RETRY_S)
                    continue
                greeting = loop.create_task(self._try(connection))
                self._greeting.add(greeting)
                greeting.add_done_callback(self._greeting.discard)

    async def _tell_levels(self) -> None:
        while True:
            await asyncio.sleep(LEVELS_S)
            levels = self._models.levels()
            if levels and self._links:
                record = Levels(pickle.dumps((levels, self._about())))
                for link in self._links:
                    link.channel.send(record)

    async def _try(self, connection: socket.socket) -> None:
        try:
            await self.accept(connection)
        except (Garbled, OSError, TimeoutError) as error:
            log.warning("a front was not taken in: %s", error or type(error).__name__)


def bound(path: Path) -> socket.socket:
    """Returns a socket that listens at `path`, to which only this user may connect. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)  # before `bind`, which makes the file with this mode
        listener.bind(str(path))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


async def _refuse_questions(question: str, arguments: Mapping[str, Any]) -> object:
    raise UnsupportedFeature(f"expected no question, got {question[:64]!r}")


async def _greeted(connection: socket.socket) -> tuple[ArenaView, int]:
    """Returns the arena of a new front, and the most jobs it will have. Raises Garbled and OSError."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    data, files, _, _ = socket.recv_fds(connection, HELLO.size, 1)
    try:
        hello = unpack_hello(data)
        if len(files) != 1:
            raise Garbled(f"a greeting with {len(files)} files")
        return ArenaView(files[0], hello.arena_bytes), hello.max_jobs
    except ValueError as error:
        raise Garbled(f"an arena that can't be used: {error}") from None
    finally:
        for file in files:
            os.close(file)
