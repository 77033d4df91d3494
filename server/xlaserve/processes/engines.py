"""The engines of a server of several processes, as its supervisor starts them: roles, sockets and files of each."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from xlaserve.config import Settings
from xlaserve.engine import under_way as under_way_of
from xlaserve.errors import ConfigError
from xlaserve.models.held_folder import held_folder, remove_left
from xlaserve.processes import engine_process
from xlaserve.processes.crashes import Crashes
from xlaserve.processes.engine_orders import EngineOrders
from xlaserve.processes.engine_replacement import InitialModels
from xlaserve.processes.handover import ClientOverrides
from xlaserve.processes.link.engine_end.host import bound
from xlaserve.processes.supervision.process import Process, as_words
from xlaserve.processes.supervision.role import Role
from xlaserve.programs.tf.device import Share, shares, usable_cores
from xlaserve.telemetry import gpus

ENGINE: Final = "engine"
FOLDERS: Final = "xlaserve-engines-"
"""Prefix of the names of folders for engines' sockets."""
LATER_S: Final = 5.0
"""Time beyond its own limits that a process may take to end before it is killed."""
MOST_ENGINES: Final = 10**9
"""More engines than are ever started one after the other: the length of a socket's name is checked with it."""
DRAINING, RUNNING = 1, 0
"""Stages of the end: fronts answer their requests before the engines end."""

log = logging.getLogger(__name__)


def is_engine(role: str) -> bool:
    """Returns whether a role is an engine's, by its name."""
    return role.split(" ", maxsplit=1)[0] == ENGINE


class Engines:
    """The roles of engines, and the orders, sockets and files that each process of them is started with.

    Each process listens on a socket of its own. Each role has one of the `addresses`, a symbolic link to the socket of
    the process that fills the role. The first processes begin with the models of the server whose place this one takes,
    as `taken_over` says; later ones with `initial_models`, pickled, those of the engine with the latest change.
    """

    def __init__(
        self,
        settings: Settings,
        read_settings: Callable[[], Settings],
        folder: Path,
        was_ready: Callable[[], bool],
        taken_over: ClientOverrides | None = None,
    ) -> None:
        self._folder = folder
        self.initial_models = b""
        self._changed_ns = 0
        """`changed_ns` of `initial_models`."""
        self._was_ready = was_ready
        self._taken_over = taken_over
        self._settings = settings
        self._read_settings = read_settings
        self._next = count()
        self._number = 0
        self._sockets: dict[int, Path] = {}
        """Sockets by process number."""
        self._filling: dict[str, int] = {}
        """By role, the number of the process that fills it, or filled it last."""
        self._files: dict[int, tuple[int, ...]] = {}
        """By process number, descriptors of its files of what is under way and of last words."""
        self._announced: set[int] = set()
        """Numbers of processes that have announced their end."""
        self._own_files: tuple[int, ...] = ()
        """The files of an engine that is about to be started."""
        self._crashes = Crashes()
        each = shares_of_machine(settings)
        names = [ENGINE] if len(each) == 1 else [f"{ENGINE} {number}" for number in range(1, len(each) + 1)]
        self._shares = dict(zip(names, each, strict=True))
        self.roles = [self._role(name, share) for name, share in self._shares.items()]
        self.addresses = tuple(folder / name for name in names)

    @property
    def changes(self) -> ClientOverrides:
        """The differences between the models that serve and the configured ones."""
        return (
            ClientOverrides.of(pickle.loads(self.initial_models))
            if self.initial_models
            else self._taken_over or ClientOverrides()
        )

    def keep(self, content: bytes) -> None:
        """Keeps the pickled initial models that an engine sends, unless another engine has made a later change."""
        initial: InitialModels = pickle.loads(content)
        if initial.changed_ns >= self._changed_ns:
            self.initial_models, self._changed_ns = content, initial.changed_ns

    def beside(self, role: Role, initial_models: bytes) -> Role:
        """Returns the role for an engine that is to take the place of the one that serves, with these models."""
        return replace(role, payload=lambda: self._orders(self._shares[role.name], initial_models, is_beside=True))

    def began(self, process: Process) -> None:
        """Notes the process of the engine that was started last."""
        self._sockets[process.pid] = self._socket
        self._files[process.pid], self._own_files = self._own_files, ()

    def announced_end(self, process: Process) -> None:
        """Notes that an engine is about to end: as it was told to, or for a reason that it has logged."""
        self._announced.add(process.pid)

    def ended(self, process: Process, status: int) -> bool:
        """Forgets an engine that has ended. Returns whether a model may have crashed it, if it filled its role."""
        is_filling = process.pid in self._filling.values()  # its socket stays: fronts look for it
        if not is_filling and process.pid in self._sockets:
            self._sockets.pop(process.pid).unlink(missing_ok=True)
        under_way, last_words = self._files.pop(process.pid)
        has_said_so = process.pid in self._announced
        self._announced.discard(process.pid)
        how = self._crashes.note(status, under_way, last_words, has_said_so=has_said_so) if is_filling else ""
        os.close(under_way)
        os.close(last_words)
        if how:
            log.error("process %d ended with %s while %s", process.pid, as_words(status), how)
        return bool(how)

    def filled(self, role: Role, process: Process) -> None:
        """Points the role's address to this engine's socket."""
        point(self._folder / role.name, self._sockets[process.pid])
        before = self._sockets.pop(self._filling.get(role.name, 0), None)
        self._filling[role.name] = process.pid
        if before is not None:
            before.unlink(missing_ok=True)

    def _role(self, name: str, share: Share) -> Role:
        return Role(
            name=name,
            target=f"{engine_process.__name__}:{engine_process.run.__name__}",
            payload=lambda: self._orders(share, self.initial_models, is_beside=False),
            connect=self._listen,
            cores=share.cores,
            stage=RUNNING,
            stop_timeout_s=self._settings.drain_timeout_s + LATER_S,
        )

    @property
    def _socket(self) -> Path:
        return self._folder / f"{ENGINE}-{self._number}"

    def _listen(self) -> Mapping[str, int]:
        """Opens the socket and the files of the next engine; returns its descriptors by name. Raises OSError."""
        self._forget_unstarted()
        self._number = next(self._next)
        with ExitStack() as opened:
            listener = opened.enter_context(bound(self._socket))
            files = []
            for create in (under_way_of.create, partial(os.memfd_create, "xlaserve-last-words", os.MFD_CLOEXEC)):
                file = create()
                opened.callback(os.close, file)
                files += [file, os.dup(file)]
                opened.callback(os.close, files[-1])
            opened.pop_all()
        under_way, their_under_way, last_words, their_last_words = files
        self._own_files = under_way, last_words
        return {
            engine_process.FRONTS: listener.detach(),
            engine_process.UNDER_WAY: their_under_way,
            engine_process.LAST_WORDS: their_last_words,
        }

    def _forget_unstarted(self) -> None:
        """Closes the files, and removes the socket, of an engine that could not be started."""
        if self._own_files:
            self._socket.unlink(missing_ok=True)
            for file in self._own_files:
                os.close(file)
            self._own_files = ()

    def _orders(self, share: Share, initial_models: bytes, *, is_beside: bool) -> bytes:
        # A model that fails ends a start, and never what was serving.
        is_fatal = self._settings.exit_on_model_failure and not self._was_ready()
        return pickle.dumps(
            EngineOrders(
                self._settings.model_copy(update={**share.settings, "exit_on_model_failure": is_fatal}),
                self._read_settings,
                number=self._number,
                initial_models=initial_models,
                is_beside=is_beside,
                taken_over=None if self._was_ready() else self._taken_over,
                set_aside=self._crashes.set_aside,
                own=share.settings,
            )
        )


def shares_of_machine(settings: Settings) -> list[Share]:
    """Divides this machine among engines. Raises ConfigError."""
    return shares(settings, sorted(os.sched_getaffinity(0)), usable_cores(), gpus.count_visible())


def point(address: Path, place: Path) -> None:
    """Points a symbolic link to the socket at `place` by one rename: it is never missing. Raises OSError."""
    link = address.with_suffix(".next")
    link.symlink_to(place)
    link.replace(address)


def folder_of_engines(stack: ExitStack) -> Path:
    """Returns a new folder for the sockets of engines, which `stack` removes. Raises ConfigError."""
    try:
        remove_left(FOLDERS)  # of supervisors that were killed
        folder = stack.enter_context(held_folder(FOLDERS))
        bound(folder / f"{ENGINE}-{MOST_ENGINES}").close()
    except OSError as error:
        expected, got = "a folder with room for a socket, with a short name", os.environ.get("TMPDIR") or "/tmp"
        raise ConfigError(f"TMPDIR: expected {expected}, got {got}: {error.strerror or error}") from None
    return folder
