"""The filter of a process's stderr: passes lines on, and returns those of XLA's compilations to the process.

A program of its own, `python stderr_filter.py SEVERITY FILE...`, that needs no package: it outlives the process that it
works for, so that what a crash has written still comes out. Lines come in on stdin and go on to stderr; those that the
source FILEs logged go to stdout; TensorFlow's below SEVERITY (0 to 3: info to fatal) end here.
"""

import os
import re
import select
import signal
import sys

CHUNK_BYTES = 65_536
PARTIAL_LINE_S = 0.1
"""A line that is not ended, such as a question, is passed on after this time, unless it begins as logged ones do."""
LOGGED = re.compile(rb"^([IWEF])\d{4} \d\d:\d\d:[\d.]+ +\d+ ([\w./-]+):\d+\] ")
CONTINUED = re.compile(
    rb'(The op is created at:|File "[^"]+", line \d+, in |dummy_file_name:\d+:|\ttf2xla conversion failed )'
)
"""Beginning of the further lines of a message about an operation that XLA can't compile; a crash's are indented."""
BEGUN = re.compile(rb"^[IWEF](\d{0,3}$|\d{4})")
STDIN, STDOUT, STDERR = 0, 1, 2


def main(severity: int, files: set[bytes]) -> None:
    """Filters until the last writer has closed stdin."""
    # Signals that stop the process must not stop the filter: it ends when there is nothing left to read.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    rest = b""
    events = bytearray()
    passes_on = True
    os.set_blocking(STDOUT, False)
    while True:
        timeout_s = PARTIAL_LINE_S if rest and not BEGUN.match(rest) else None
        readable, writable, _ = select.select([STDIN], [STDOUT] if events else [], [], timeout_s)
        if writable:
            hand_over(events)
        if readable:
            chunk = os.read(STDIN, CHUNK_BYTES)
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                passes_on = pass_on(line + b"\n", severity, files, events, passes_on)
            if not chunk:
                os.set_blocking(STDOUT, True)
                hand_over(events)
                write(STDERR, rest)
                return
        elif not writable:
            write(STDERR, rest)
            rest = b""


def pass_on(line: bytes, severity: int, files: set[bytes], events: bytearray, passed_on: bool) -> bool:
    """Sends a line where it belongs; returns whether further lines of the same message go on to stderr.

    `passed_on` is what this returned for the line before.
    """
    logged = LOGGED.match(line)
    if logged is None:
        if passed_on or not CONTINUED.match(line):
            write(STDERR, line)
        return passed_on
    if logged[2] in files:
        events += line
        return False
    is_shown = b"IWEF".index(logged[1]) >= severity
    if is_shown:
        write(STDERR, line)
    return is_shown


def hand_over(events: bytearray) -> None:
    """Writes to the process as many events as it reads now.

    It may be the one that writes them, in a call that holds Python's lock: if this waited for it, both would for ever.
    """
    try:
        del events[: os.write(STDOUT, events)]
    except BlockingIOError:
        return
    except OSError:  # nobody listens any more
        events.clear()


def write(descriptor: int, text: bytes) -> None:
    """Writes all of `text`, or gives up where there is no reader: logging must never block."""
    try:
        while text:
            text = text[os.write(descriptor, text) :]
    except OSError:
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), {file.encode() for file in sys.argv[2:]})
