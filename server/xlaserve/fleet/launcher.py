"""Runs a command that is asked to end, with SIGTERM, when the process that started it dies.

python -m xlaserve.fleet.launcher PARENT COMMAND ...

A server whose supervisor is killed would otherwise go on unseen, on cores that are given to another. It is set up here
and not between fork and exec, where a process with threads may run next to nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from xlaserve.processes.supervision import linux


def main(arguments: Sequence[str]) -> None:
    """Becomes the command; ends at once where the parent has died already."""
    parent, *command = arguments
    with suppress(PermissionError):  # Ray's workers are nicer than others by 15, which only root may undo
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    if linux.end_with(int(parent), signal.SIGTERM):
        os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
