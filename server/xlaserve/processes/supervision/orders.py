"""What a process is there for, as its supervisor tells it over a stream socket, with descriptors."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from xlaserve.telemetry.logs import Format

SPARE: Final = "spare"
"""The name of a process that has imported what others need, and forks them as orders come."""
READY: Final = b"r"
"""Said by such a process once it can do that."""
STDERR: Final = "xlaserve.stderr"
"""The descriptor of its stderr, beside those of a role."""
MAX_DESCRIPTORS: Final = 253
"""How many the kernel sends at once (SCM_MAX_FD)."""


class Orders(NamedTuple):
    """What a process is there for: see `Role`."""

    name: str
    target: str
    payload: bytes
    cores: Sequence[int]
    log: tuple[str, Format]
    """The level and the format of its log."""
    descriptors: Mapping[str, int]
    """By names, as they are numbered here."""

    def send(self, to: socket.socket) -> None:
        """Raises OSError."""
        places = {name: place for place, name in enumerate(self.descriptors)}
        with os.fdopen(os.memfd_create("xlaserve"), "w+b") as file:
            pickle.dump(tuple(self._replace(descriptors=places)), file)
            file.seek(0)
            socket.send_fds(to, [b"\n"], [file.fileno(), *self.descriptors.values()])

    @classmethod
    def read(cls, received: Sequence[int]) -> Orders:
        """Returns those that came with the descriptors `received`, and closes the first of them, which it reads."""
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
