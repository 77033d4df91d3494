"""Memory that images take while they are decoded: bounded, and shared by fronts."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest

from xlaserve.admission.image_memory import ImageMemory
from xlaserve.errors import ImageTooLarge, QueueFull

PATIENCE_S = 20


def test_bytes_wait_for_room_and_one_holder_is_always_let_in() -> None:
    memory = ImageMemory(100)
    peak = used = 0
    lock = threading.Lock()

    def hold(size_bytes: int) -> None:
        nonlocal used, peak
        with memory.hold(size_bytes):
            with lock:
                used += size_bytes
                peak = max(peak, used)
                assert used <= 100 or used == size_bytes
            time.sleep(0.001)
            with lock:
                used -= size_bytes

    sizes = [1, 30, 60, 99, 100, 101, 5000] * 5
    threads = [threading.Thread(target=hold, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    assert peak == 5000


def test_one_holder_is_refused_beyond_what_there_is_without_others() -> None:
    memory = ImageMemory(100)
    memory.max_alone_bytes = 300
    with memory.hold(300):
        pass
    with pytest.raises(ImageTooLarge), memory.hold(301):
        pass
    memory.free_bytes = 200  # for now
    with pytest.raises(QueueFull), memory.hold(201):
        pass
    assert memory.used_bytes == 0


def test_a_large_holder_is_not_passed_for_ever_by_small_ones() -> None:
    memory = ImageMemory(100)
    held = threading.Event()

    def hold_large() -> None:
        with memory.hold(100):
            held.set()

    with ExitStack() as stack:
        stack.enter_context(memory.hold(10))
        large = threading.Thread(target=hold_large)
        large.start()
        while not memory._is_next.locked():
            time.sleep(0.001)
        small = threading.Thread(target=lambda: stack.enter_context(memory.hold(10)))
        small.start()
        small.join(0.05)
        assert small.is_alive()
    assert held.wait(PATIENCE_S)
    for thread in (small, large):
        thread.join(PATIENCE_S)
