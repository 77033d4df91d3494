"""The events of a supervisor."""

from __future__ import annotations

from xlaserve.processes.supervision.process import Process
from xlaserve.processes.supervision.role import Role


class Watcher:
    """Receives a supervisor's events, on the event loop. This class ignores all of them."""

    def stopping(self) -> None:
        """All processes are about to be told to end."""

    def began(self, role: Role, process: Process) -> None:
        """The process was started."""

    def filled(self, role: Role, process: Process) -> None:
        """The process fills the role from now on: as it was started, or in the place of another."""

    def became_ready(self, role: Role, process: Process) -> None:
        """The process has said that it is ready, for the first time or with other details than before."""

    def asked_for_successor(self, role: Role, process: Process, content: bytes) -> None:
        """The process wants another one in its place, which is to begin with `content`.

        The process waits for the outcome (`Process.tell_outcome`), even where others have taken its place meanwhile.
        """

    def keeps(self, role: Role, process: Process, content: bytes) -> None:
        """The process that fills the role has said what the next one is to begin with if this one ends unasked."""

    def announced_end(self, role: Role, process: Process) -> None:
        """The process has said that it is about to end. One that ends without a word was ended by something in it."""

    def reloading(self) -> None:
        """Processes are about to be told to read the configuration again."""

    def sent_metrics(self, role: Role, process: Process, metrics: bytes) -> None:
        """The process has sent its metrics. Raises ValueError where they can't be understood."""

    def ended(self, role: Role, process: Process, status: int, was_ready: bool) -> None:
        """The process has ended."""
