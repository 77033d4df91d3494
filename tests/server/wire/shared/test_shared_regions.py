"""Regions of shared memory that several processes register."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from xlaserve.errors import QueueFull
from xlaserve.wire.shared import shared_regions
from xlaserve.wire.shared.shared_regions import Region, Regions

WRITER = """
import sys
from xlaserve.wire.shared.shared_regions import Region, Regions

regions = Regions(int(sys.argv[1]))
print("ready", flush=True)
number = 0
while True:
    number += 1
    with regions.changed() as changed:
        changed.clear()
        changed.update({f"{name}": Region("/key", number, number, (1, number)) for name in range(100)})
"""
HOLDER = """
import sys
from xlaserve.wire.shared.shared_regions import Regions

with Regions(int(sys.argv[1])).changed():
    print("ready", flush=True)
    sys.stdin.read()
"""
ONE = Region("/a", 1, 2, (3, 4))


@pytest.fixture
def file() -> Iterator[int]:
    file = shared_regions.create()
    yield file
    os.close(file)


def started(program: str, file: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", program, str(file)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[file])
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


def test_what_one_front_registers_all_see(file: int) -> None:
    one, other = Regions(file), Regions(file)
    assert other.current() == {}
    with one.changed() as regions:
        regions["a"] = ONE
    assert other.current() == {"a": ONE}
    with other.changed() as regions:
        regions['\0 "b"'] = ONE._replace(key="/ü")
    assert one.current() == {"a": ONE, '\0 "b"': ONE._replace(key="/ü")}
    with one.changed() as regions:
        del regions["a"]
    assert [*other.current()] == ['\0 "b"']
    assert Regions().current() == {}


def test_a_change_that_fails_changes_nothing(file: int) -> None:
    regions = Regions(file)
    with pytest.raises(ZeroDivisionError), regions.changed() as changed:
        changed["a"] = ONE
        raise ZeroDivisionError
    with pytest.raises(QueueFull, match="names of 1048576 bytes"), regions.changed() as changed:
        changed["a" * shared_regions.MAX_CONTENT_BYTES] = ONE
    assert regions.current() == Regions(file).current() == {}


def test_a_front_killed_during_a_change_leaves_it_whole_or_undone(file: int) -> None:
    reader, draw = Regions(file), random.Random(1)
    for _ in range(10):
        writer = started(WRITER, file)
        for _ in range(draw.randrange(200)):
            assert len({region.offset for region in reader.current().values()}) <= 1
            assert len(reader.current()) in (0, 100)
        writer.kill()
        writer.communicate()
        assert len({region.offset for region in Regions(file).current().values()}) <= 1
    with reader.changed() as regions:
        regions.clear()
    assert reader.current() == {}


def test_a_change_that_does_not_end_holds_up_nobody_for_long(file: int) -> None:
    holder = started(HOLDER, file)
    regions = Regions(file)
    with pytest.raises(QueueFull, match="another process"), regions.changed():
        raise AssertionError
    assert regions.current() == {}
    holder.kill()
    holder.communicate()
    with regions.changed() as changed:
        changed["a"] = ONE
    assert regions.current() == {"a": ONE}
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
