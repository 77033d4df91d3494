"""Runs a command that is asked to end, with SIGTERM, when the process that started it dies.

python -m xlaserve_fleet.launcher PARENT COMMAND ...

A server whose supervisor is killed would otherwise go on unseen, on cores that are given to another. It is set up here
and not between fork and exec, where a process with threads may run next to nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def main(arguments: Sequence[str]) -> None:
    """Becomes the command; ends at once where the parent has died already."""
    parent, *command = arguments
    with suppress(PermissionError):  # Ray's workers are nicer than others by 15, which only root may undo
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) == 0 and os.getppid() == int(parent):
        os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
