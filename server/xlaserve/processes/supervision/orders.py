"""The orders of a process, which its supervisor sends over a stream socket, with descriptors."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from xlaserve.telemetry.logs import Format

SPARE: Final = "spare"
"""The name of a process that has imported the modules of others, and forks these as orders come."""
READY: Final = b"r"
"""The message of a spare process that is ready to fork."""
STDERR: Final = "xlaserve.stderr"
"""The name of the descriptor for stderr, beside the descriptors of a role."""
MAX_DESCRIPTORS: Final = 253
"""The most descriptors that the kernel sends at once (SCM_MAX_FD)."""


class Orders(NamedTuple):
    """The orders of a process; see `Role`."""

    name: str
    target: str
    payload: bytes
    cores: Sequence[int]
    log: tuple[str, Format]
    """The level and the format of the process's log."""
    descriptors: Mapping[str, int]
    """Descriptors by their names, as they are numbered in the process that has the orders."""

    def send(self, to: socket.socket) -> None:
        """Sends the orders and their descriptors. Raises OSError."""
        places = {name: place for place, name in enumerate(self.descriptors)}
        with os.fdopen(os.memfd_create("xlaserve"), "w+b") as file:
            pickle.dump(tuple(self._replace(descriptors=places)), file)
            file.seek(0)
            socket.send_fds(to, [b"\n"], [file.fileno(), *self.descriptors.values()])

    @classmethod
    def read(cls, received: Sequence[int]) -> Orders:
        """Returns the orders that came with the descriptors `received`, the first of which is read and closed."""
        file, *numbers = received
        with os.fdopen(file, "rb") as opened:
            orders = cls(*pickle.load(opened))
        return orders._replace(descriptors={name: numbers[place] for name, place in orders.descriptors.items()})


def receive(supervisor: socket.socket) -> list[int]:
    """Waits for orders and returns the descriptors that came with them; none where there will be no more orders."""
    _, descriptors, _, _ = socket.recv_fds(supervisor, 1, MAX_DESCRIPTORS)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return descriptors
