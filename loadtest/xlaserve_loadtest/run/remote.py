"""The coordinator's side of generators on other machines."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from itertools import zip_longest
from multiprocessing.connection import Connection
from typing import Final, Self, cast

from xlaserve_loadtest.addresses import Address
from xlaserve_loadtest.record.lines import GeneratorLine
from xlaserve_loadtest.run import handshake
from xlaserve_loadtest.run.calls import Caller, WorkerDied
from xlaserve_loadtest.run.clocks import RemoteGenerator
from xlaserve_loadtest.run.environment import Machine
from xlaserve_loadtest.run.generator import Generator
from xlaserve_loadtest.run.handshake import HandshakeError
from xlaserve_loadtest.run.workers import STOP_TIMEOUT_S, choose_number
from xlaserve_loadtest.targets.target import TargetError

_PING_S: Final = 1.0


class RemoteWorker:
    """A `Worker` in a process of `loadtest generate` at `address` (HOST:PORT); `async with` starts and ends it.

    Entering raises TargetError. A worker that answers nothing for SILENCE_S counts as dead.
    """

    def __init__(self, address: str, key: bytes, session: str) -> None:
        self.address = address
        self._key = key
        self._session = session

    async def __aenter__(self) -> Self:
        self._socket = await _greet(self.address, self._key, self._session)
        self._is_over = asyncio.Event()
        self._caller = Caller(Connection(os.dup(self._socket.fileno())), self._lose)
        self.calls = self._caller.worker
        """The worker. Its methods raise what they raise there, and WorkerDied."""
        self.generator = cast(Generator, RemoteGenerator(self.calls.generator, self.calls.clock, self.address))
        """The generator that sends the worker's requests, with times of this machine's clock."""
        self._heartbeat = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._heartbeat.cancel()
        try:
            # The next coordinator is refused until this worker has ended.
            if not self._caller.is_sending and not self._is_over.is_set():
                with suppress(OSError, TimeoutError):
                    self._socket.shutdown(socket.SHUT_WR)
                    await asyncio.wait_for(self._is_over.wait(), STOP_TIMEOUT_S)
        finally:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._caller.hang_up()
            self._caller.shutdown()

    def _lose(self, how: str = "ended, or can't be reached any more: its own output may say why") -> None:
        self._is_over.set()
        self._caller.end(WorkerDied(f"generator {self.address} {how}"))

    async def _watch(self) -> None:
        """Asks for the time every second, and gives the worker up once there was no answer for SILENCE_S.

        Turns of the loop are counted instead of time, as nothing is heard while this process is busy itself.
        """
        while not self._is_over.is_set():
            await asyncio.sleep(_PING_S)
            question = asyncio.ensure_future(self.calls.clock())
            # Where it fails, the worker is lost already.
            question.add_done_callback(lambda question: question.cancelled() or question.exception())
            silent_turns = 0
            try:
                while not question.done() and silent_turns * _PING_S < handshake.SILENCE_S:
                    await asyncio.wait((question,), timeout=_PING_S)
                    silent_turns += not self._caller.is_sending
                if not question.done():
                    self._lose(f"has not answered for {handshake.SILENCE_S:g} s: it stands still")
            finally:
                question.cancel()


async def start_workers(
    addresses: Sequence[str],
    key: bytes,
    stack: AsyncExitStack,
    *,
    number: int | None,
    slots: int,
) -> tuple[list[RemoteWorker], list[tuple[GeneratorLine, Machine]]]:
    """Starts `number` workers at each address, or as many as its machine is good for; they end with `stack`.

    Raises TargetError.
    """
    session = secrets.token_hex(16)
    workers: list[list[RemoteWorker]] = []
    machines: list[tuple[GeneratorLine, Machine]] = []
    for address in addresses:
        first = await stack.enter_async_context(RemoteWorker(address, key, session))
        machine = await first.calls.machine()
        own = number or choose_number(machine.environment.cores, slots // len(addresses), cores_per_worker=1)
        more = [await stack.enter_async_context(RemoteWorker(address, key, session)) for _ in range(own - 1)]
        workers.append([first, *more])
        machines.append((GeneratorLine(address, machine.name, own, machine.environment), machine))
    # One of each address in turn: a load of a few slots is for all of them, too.
    return [worker for turn in zip_longest(*workers) for worker in turn if worker], machines


def check_reach(address: str, machine: Machine, targets: Sequence[str]) -> None:
    """Raises TargetError where the generator at `address` has no way to a target."""
    if machine.id == Machine.of_this().id:
        return
    for target in targets:
        if ":" not in target:
            raise TargetError(
                f"generator {address} is another machine, {machine.name}, and the servers that loadtest starts listen "
                "on loopback only: start them yourself, and name them with --target"
            )
        if Address.parse(target).is_loopback:
            raise TargetError(
                f"generator {address} is another machine, {machine.name}, where {target} is not the same server: name "
                "one by an address that both can reach"
            )


async def _greet(address: str, key: bytes, session: str) -> socket.socket:
    try:
        async with asyncio.timeout(handshake.TIMEOUT_S):
            sock = await _connect(address)
            try:
                await handshake.greet_generator(sock, key, session)
                handshake.bound_silence(sock)
            except BaseException:
                sock.close()
                raise
    except HandshakeError as error:
        raise TargetError(f"generator {address} {error}") from None
    except TimeoutError:
        raise TargetError(f"generator {address} does not answer within {handshake.TIMEOUT_S:g} s") from None
    except OSError as error:
        raise TargetError(f"generator {address}: {error.strerror or error}") from None
    return sock


async def _connect(address: str) -> socket.socket:
    """Returns a non-blocking socket that is connected to HOST:PORT. Raises OSError."""
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    failure: OSError | None = None
    for family, kind, protocol, _, where in await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, where)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure or OSError(f"no address of {host}")
