from __future__ import annotations

import os
import signal
import subprocess
import sys

from bench.processes import OWN, processor_s

BUSY_CHILD = """
import os, time
child = os.fork()
while not child and time.process_time() < 0.3:
    pass
if not child:
    print("busy", flush=True)
time.sleep(60)
"""


def test_the_time_of_one_process_that_has_a_parent_is_that_of_both() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY_CHILD], stdout=subprocess.PIPE, process_group=0) as server:
        try:
            assert server.stdout
            server.stdout.readline()
            found = processor_s(server.pid)
        finally:
            os.killpg(server.pid, signal.SIGKILL)
    assert found.keys() == {OWN}
    tick_s = 1 / os.sysconf("SC_CLK_TCK")  # the kernel tells times in whole ticks, for user and system apart
    assert found[OWN] > 0.3 - 2 * tick_s
