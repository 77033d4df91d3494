from __future__ import annotations

import os
import random
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from xlaserve.errors import InvalidArgument, QueueFull
from xlaserve.processes.link.arena import PAGE_BYTES, TRIM_BYTES, Arena, ArenaView, Extent, Share, arrays_in


def test_extents_do_not_overlap_and_all_come_back() -> None:
    arena = Arena(100 * PAGE_BYTES)
    draw = random.Random(1)
    held: list[Extent] = []
    for _ in range(3000):
        if held and draw.random() < 0.5:
            held.pop(draw.randrange(len(held)))
        try:
            extent = arena.take(draw.randrange(1, 10 * PAGE_BYTES))
        except QueueFull:
            held.pop()
            continue
        assert extent.offset % PAGE_BYTES == 0
        stop = extent.offset + len(extent.memory)
        assert all(stop <= one.offset or one.offset + len(one.memory) <= extent.offset for one in held)
        held.append(extent)
        del extent
    held.clear()
    assert arena.used_bytes == 0
    assert len(arena.take(100 * PAGE_BYTES).memory) == 100 * PAGE_BYTES, "nothing is left in pieces"


def test_an_extent_is_kept_as_long_as_any_array_of_it() -> None:
    arena = Arena(4 * PAGE_BYTES)
    pixels = arena.take(3 * PAGE_BYTES).memory[: 2 * 2 * 3].reshape(1, 2, 2, 3)[:, :1]
    assert arena.used_bytes == 3 * PAGE_BYTES
    with pytest.raises(QueueFull, match="8192 more bytes exceed what is left of 16384"):
        arena.take(2 * PAGE_BYTES)
    thread = threading.Thread(target=pixels.sum)  # drops the last reference
    del pixels
    thread.start()
    thread.join()
    assert arena.used_bytes == 0


def test_what_an_arena_could_never_hold_is_an_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="images: expected at most 4096 bytes with their outputs, got 4097"):
        Arena(PAGE_BYTES).take(PAGE_BYTES + 1)


def test_both_ends_see_the_same_bytes() -> None:
    arena = Arena(2 * PAGE_BYTES)
    view = ArenaView(arena.file, arena.size_bytes)
    first, extent = arena.take(1), arena.take(10)
    extent.memory[:] = 7
    seen = view.memory(extent.offset, 10)
    assert (seen == 7).all()
    seen[:] = 8
    assert (extent.memory == 8).all()
    assert len(first.memory) == 1
    arena.end()


def test_a_process_that_crashes_dumps_no_arena() -> None:
    arena = Arena(2**36)
    view = ArenaView(arena.file, arena.size_bytes)
    flags = [
        mapping.rpartition("VmFlags:")[2].split()
        for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
        if "xlaserve-arena" in mapping.partition("\n")[0]
    ]
    assert len(flags) >= 2
    assert all("dd" in of_one for of_one in flags)
    del view
    arena.end()


@pytest.mark.parametrize(("offset", "size_bytes"), [(0, 0), (1, 1), (0, 8193), (8192, 1), (2**63, 1), (4096, 2**63)])
def test_nothing_outside_an_arena_is_seen(offset: int, size_bytes: int) -> None:
    arena = Arena(2 * PAGE_BYTES)
    view = ArenaView(arena.file, arena.size_bytes)
    with pytest.raises(ValueError, match="no extent of"):
        view.memory(offset, size_bytes)
    arena.end()


def test_a_file_that_could_be_cut_off_is_refused() -> None:
    file = os.memfd_create("other")
    os.ftruncate(file, PAGE_BYTES)
    with pytest.raises(ValueError, match="expected a sealed file of 4096 bytes"):
        ArenaView(file, PAGE_BYTES)
    os.close(file)
    arena = Arena(PAGE_BYTES)
    with pytest.raises(ValueError, match="expected a sealed file of 8192 bytes"):
        ArenaView(arena.file, 2 * PAGE_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.file, 0)
    arena.end()


def test_outputs_lie_one_behind_the_other_aligned() -> None:
    memory = np.zeros(1000, np.uint8)
    layout = ((np.dtype(np.float32), (3,)), (np.dtype(np.int32), ()), (np.dtype(np.uint8), (2, 2)))
    outputs = arrays_in(memory, 10, 5, layout)
    assert [output.shape for output in outputs] == [(5, 3), (5,), (5, 2, 2)]
    starts = [output.ctypes.data - memory.ctypes.data for output in outputs]
    assert starts == [64, 128, 192]
    with pytest.raises(ValueError, match="arrays of 1024 bytes and more, in an extent of 1000"):
        arrays_in(memory, 1000, 0, layout)
    with pytest.raises(ValueError, match="in an extent of 1000"):
        arrays_in(memory, 0, 100, layout)


def test_a_share_bounds_what_one_has_and_leaves_the_others_alone() -> None:
    arena = Arena(100 * PAGE_BYTES)
    share, other = Share("a", 10 * PAGE_BYTES), Share("b", 95 * PAGE_BYTES)
    extents = [arena.take(PAGE_BYTES + 1, share) for _ in range(5)]
    with pytest.raises(
        QueueFull, match="model a: 1 more bytes exceed the 40960 for its images and outputs, of which 40960"
    ):
        arena.take(1, share)
    with pytest.raises(InvalidArgument, match="images: expected at most 40960 bytes with their outputs, got 40961"):
        arena.take(10 * PAGE_BYTES + 1, share)
    assert len(arena.take(90 * PAGE_BYTES, other).memory)
    extents.pop()
    assert len(arena.take(2 * PAGE_BYTES, share).memory), "its whole pages came back"
    extents.clear()
    assert (arena.used_bytes, share.used_bytes, other.used_bytes) == (0, 0, 0)


def test_the_smallest_gap_that_fits_is_taken() -> None:
    arena = Arena(100 * PAGE_BYTES)
    held = [arena.take(pages * PAGE_BYTES) for pages in (5, 1, 2, 1, 3, 1)]
    gaps = {pages: held[index].offset for index, pages in enumerate((5, 1, 2, 1, 3, 1)) if pages > 1}
    for index in (0, 2, 4):
        held[index] = held[1]
    assert arena.take(3 * PAGE_BYTES).offset == gaps[3]
    assert arena.take(2 * PAGE_BYTES).offset == gaps[2]
    assert arena.take(4 * PAGE_BYTES).offset == gaps[5]


def test_memory_goes_back_to_the_system_and_none_that_is_in_use() -> None:
    arena = Arena(2**36)
    view = ArenaView(arena.file, arena.size_bytes)
    kept, burst = [], []
    for number in range(6):
        burst.append(arena.take(3 * TRIM_BYTES // 2))
        kept.append(arena.take(PAGE_BYTES))
        burst[-1].memory[:] = 1
        kept[-1].memory[:] = number
        view.memory(kept[-1].offset, PAGE_BYTES).sum()
    most = 9 * TRIM_BYTES + 6 * PAGE_BYTES
    assert most <= arena.resident_bytes <= most + TRIM_BYTES, "where there are huge pages, the last may be one"
    assert arena.most_used_bytes() == most
    assert not any(True for _ in arena.trim(0)), "all is in use"
    burst.clear()
    assert arena.most_used_bytes() == most, "it was, since the last call"
    assert most <= arena.resident_bytes, "nothing goes back by itself"
    before_bytes = arena.resident_bytes
    for _ in arena.trim(most // 2):
        assert before_bytes - TRIM_BYTES <= arena.resident_bytes <= before_bytes
        before_bytes = arena.resident_bytes
    assert most // 2 - TRIM_BYTES <= arena.resident_bytes <= most // 2
    for step, _ in enumerate(arena.trim(0)):
        if step == 0:
            again = arena.take(TRIM_BYTES)  # while it gives back
            again.memory[:] = 77
    assert 0 <= arena.resident_bytes - (6 * PAGE_BYTES + TRIM_BYTES) < TRIM_BYTES
    assert (again.memory == 77).all()
    for number, extent in enumerate(kept):
        assert (extent.memory == number).all()
        assert (view.memory(extent.offset, PAGE_BYTES) == number).all()
    assert arena.most_used_bytes() == 6 * PAGE_BYTES + TRIM_BYTES


def test_what_was_given_back_is_not_given_back_again() -> None:
    arena = Arena(2**36)
    arena.take(64 * TRIM_BYTES).memory[:] = 1
    for _ in arena.trim(0):
        pass
    for _ in range(3):
        arena.take(4 * TRIM_BYTES).memory[:] = 1
        assert sum(1 for _ in arena.trim(2 * TRIM_BYTES)) <= 4 + 1


def test_what_is_used_while_memory_goes_back_goes_back_later() -> None:
    arena = Arena(2**36)
    below = arena.take(8 * TRIM_BYTES)
    above = arena.take(8 * TRIM_BYTES)
    below.memory[:] = above.memory[:] = 1
    del below
    passing = arena.trim(TRIM_BYTES)
    next(passing)
    again = arena.take(8 * TRIM_BYTES)
    again.memory[:] = 1
    del again, above
    del passing  # as the link ends it where the memory is needed again
    for _ in arena.trim(0):
        pass
    assert arena.resident_bytes == 0
