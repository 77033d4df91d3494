"""A program that becomes COMMAND, which gets SIGTERM when the process that started it dies, however that comes.

python -I -S launcher.py PARENT COMMAND...

PARENT is the number of that process. A server whose load test is killed would otherwise go on unseen, on cores that the
next one measures with. The kernel is asked here and not between fork and exec, where a process with threads may run
next to nothing. Nothing is imported that takes long: it delays every start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def ending_with_us(command: Sequence[str]) -> Sequence[str]:
    """Returns the command line that runs `command` so that it ends with this process; on Linux only.

    The kernel watches the thread that starts it, which therefore has to last as long.
    """
    if sys.platform != "linux":
        return command
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), *command)


def main(arguments: Sequence[str]) -> None:
    """Becomes the command; ends at once where the parent has died already."""
    parent, *command = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if os.getppid() == int(parent):  # otherwise no signal would ever come
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
