"""The tap, in processes of their own: what is written to stderr and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xlaserve.programs.watch import stderr_filter

TIMEOUT_S = 30
EVENT = "I0000 00:00:1795276051.596105    7857 device_compiler.h:538] Compilation of XLA executable time: x (5 us)"
TAPPED = """
import logging, os, signal, subprocess, sys, threading, time
from xlaserve.programs.watch.stderr_tap import StderrTap

logging.basicConfig(format="LOG %(message)s")
EVENT = {event!r}
heard = []
def hear(line):
    heard.append(line)
    if "RAISES" in os.environ:
        raise ValueError(line)
def write(text):  # as a library in C++ does
    os.write(2, text.encode())
def wait(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
with StderrTap() as tap:
    tap.restore_environment()
    tap.listen(hear)
    {body}
print("left", sys.stderr is sys.__stderr__)
write("after\\n")
"""


def script(body: str) -> list[str]:
    indented = body.strip().replace("\n", "\n    ")
    return [sys.executable, "-c", TAPPED.format(event=EVENT, body=indented)]


def run(body: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TF_CPP_")} | (env or {})
    return subprocess.run(
        script(body), capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False, env=environment
    )


def test_lines_come_out_as_they_were_and_events_are_heard_instead() -> None:
    done = run("""
write("a line\\n\\n  E0000 indented\\nbytes \\xff\\n" + EVENT + "\\nE0000 00:00:1.5    1 other.cc:3] an error\\n")
wait(lambda: heard)
print(heard == [EVENT])
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\nleft True\n"
    assert done.stderr == "a line\n\n  E0000 indented\nbytes \xff\nE0000 00:00:1.5    1 other.cc:3] an error\nafter\n"


@pytest.mark.parametrize(
    ("level", "shown"), [("0", "IWEF"), ("1", "WEF"), ("2", "EF"), ("3", "F"), ("nonsense", "IWEF")]
)
def test_what_the_environment_silences_stays_silent(level: str, shown: str) -> None:
    done = run(
        """
for letter in "IWEF":
    write(letter + "0000 00:00:1.5    1 file.cc:3] said\\n")
print(os.environ["TF_CPP_MIN_LOG_LEVEL"])
""",
        env={"TF_CPP_MIN_LOG_LEVEL": level},
    )
    assert "".join(line[0] for line in done.stderr.splitlines()[:-1]) == shown
    assert done.stdout.splitlines()[0] == level, "others that it starts have the environment as it was"


def test_a_silenced_message_is_silent_to_its_end_and_a_crash_is_not() -> None:
    done = run(
        r"""
refused = "W0000 00:00:1.5    1 op_kernel.cc:3] OP_REQUIRES failed: unsupported operations\n"
trace = 'The op is created at: \nFile "a/b.py", line 3, in f\n\ttf2xla conversion failed while converting f\n'
unknown = 'The op is created at: \ndummy_file_name:10:dummy_function_name\n'  # that of a SavedModel
write(refused + unknown)
write(refused + trace + 'Fatal Python error: aborted\n  File "/a/b.py", line 3 in f\n')
write("E0000 00:00:1.5    1 op_kernel.cc:3] an error\n" + trace)
""",
        env={"TF_CPP_MIN_LOG_LEVEL": "2"},
    )
    first, second, error, *shown = done.stderr.splitlines()[:-1]
    assert (first, second) == ("Fatal Python error: aborted", '  File "/a/b.py", line 3 in f')
    assert error.endswith("an error")
    assert [line.split()[0] for line in shown] == ["The", "File", "tf2xla"]


def test_python_writes_where_it_always_did() -> None:
    done = run("""
logging.warning("first")
sys.stderr.write("second\\n")
tap._filter.kill()
tap._filter.wait()
logging.warning("third")
wait(lambda: all(thread.name != 'xla-events' for thread in threading.enumerate()))
write("fourth\\n")
""")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines[:2] == ["LOG first", "second"]
    assert {"LOG third", "fourth", "after"} < set(lines)
    assert "LOG the filter of stderr has ended: recompilations by XLA are not seen any more" in lines


@pytest.mark.parametrize("end", ["os._exit(3)", "os.abort()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_what_was_written_comes_out_however_the_process_ends(end: str) -> None:
    done = run(f"write('x' * 100_000 + '\\nlast line\\n'); {end}")
    assert done.returncode != 0
    assert done.stderr.endswith("\nlast line\n")
    assert len(done.stderr) > 100_000


def test_a_line_that_is_not_ended_comes_out_as_well() -> None:
    process = subprocess.Popen(script("write('password: '); sys.stdin.read()"), stdin=-1, stdout=-1, stderr=-1)
    assert process.stderr is not None
    assert os.read(process.stderr.fileno(), 100) == b"password: "
    process.communicate(timeout=TIMEOUT_S)


def test_an_event_is_heard_in_whatever_pieces_it_is_written() -> None:
    done = run("""
for part in (EVENT[:1], EVENT[1:12], EVENT[12:], "\\n"):
    write(part)
    time.sleep(0.2)
wait(lambda: heard == [EVENT])
""")
    assert done.stderr == "after\n"


def test_a_process_that_it_started_may_outlive_it() -> None:
    done = run("subprocess.Popen(['sh', '-c', 'sleep 0.3; echo child >&2'])")
    assert done.returncode == 0
    assert sorted(done.stderr.splitlines()) == ["after", "child"]


def test_an_error_while_listening_is_logged_and_stops_nothing() -> None:
    done = run("write(2 * (EVENT + '\\n'))\nwait(lambda: len(heard) == 2)", env={"RAISES": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("LOG an event of XLA could not be understood") == 2


def test_without_a_stderr_it_works_all_the_same() -> None:
    command = " ".join(["exec", sys.executable, "-c", '"$0"', "2>&-"])
    body = script("write(EVENT + '\\n'); wait(lambda: heard); print('heard')")[-1]
    done = subprocess.run(
        ["sh", "-c", command, body], stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.stdout.splitlines()[0] == "heard"


def test_a_reader_of_stderr_that_goes_away_has_nobody_wait(tmp_path: Path) -> None:
    process = subprocess.Popen(
        script("sys.stdin.read(1)\nwrite('x\\n' * 200_000 + EVENT + '\\n'); wait(lambda: heard); print('heard')"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    process.stderr.close()
    process.stderr = None
    assert b"heard" in process.communicate(b"go", timeout=TIMEOUT_S)[0]


def test_a_library_that_holds_pythons_lock_may_write_as_much_as_it_likes() -> None:
    body = (
        "import ctypes; lines = (EVENT + '\\n').encode() * 20_000\n"
        "while lines: lines = lines[ctypes.PyDLL(None).write(2, lines, len(lines)):]\n"
        "wait(lambda: len(heard) == 20_000); print('heard')"
    )
    done = subprocess.run(script(body), stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    assert done.stdout.splitlines()[0] == "heard"


def test_signals_that_stop_the_server_do_not_stop_the_filter() -> None:
    reading, writing = os.pipe()
    out, out_in = os.pipe()
    command = [sys.executable, stderr_filter.__file__, "2"]
    process = subprocess.Popen(command, stdin=reading, stdout=subprocess.DEVNULL, stderr=out_in)
    os.close(reading)
    os.write(writing, b"ready\n")
    assert os.read(out, 100) == b"ready\n"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    time.sleep(0.1)
    os.write(writing, b"still here\n")
    assert os.read(out, 100) == b"still here\n"
    os.close(writing)
    assert process.wait(TIMEOUT_S) == 0
    os.close(out)
    os.close(out_in)
