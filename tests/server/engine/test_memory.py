from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys

import pytest

from xlaserve.engine.memory import own_bytes, resident_bytes

COPY_TWICE = """
import resource
from xlaserve.engine.memory import keep_freed_memory

def copy_twice():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    first = b"".join(parts)
    second = first[:-1] + b"."
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

parts = [bytes(2**20)] * 18
keep_freed_memory()
copy_twice()
print(copy_twice(), resource.getpagesize())
"""


def faults(environment: dict[str, str]) -> tuple[int, int]:
    """Returns the page faults of two copies of 18 MiB, made for the second time, and the bytes of a page."""
    inherited = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES" and "MALLOC_" not in key}
    command = (sys.executable, "-c", COPY_TWICE)
    done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=True, timeout=60)
    pages, page_bytes = map(int, done.stdout.split())
    return pages, page_bytes


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_of_a_large_message_is_used_again_for_the_next() -> None:
    pages, page_bytes = faults({})
    assert pages * page_bytes < 4 * 2**20
    pages, page_bytes = faults({"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"})
    assert pages * page_bytes > 30 * 2**20, "what the environment says goes first"


def test_memory_that_is_shared_is_not_a_process_s_own() -> None:
    own, resident, size_bytes = own_bytes(), resident_bytes(), 64 * 2**20
    with mmap.mmap(-1, size_bytes) as shared:
        shared[:] = b"1" * size_bytes
        assert resident_bytes() - resident > 0.9 * size_bytes
        assert (resident_bytes() - resident) - (own_bytes() - own) > 0.9 * size_bytes
