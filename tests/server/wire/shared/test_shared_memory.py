"""Shared memory in a folder of its own, with clients that lie, die and change their files."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from xlaserve.admission.caller import CURRENT, Caller, Origin, Role
from xlaserve.admission.message_memory import MessageMemory
from xlaserve.errors import InvalidArgument, NotFound, QueueFull
from xlaserve.wire.shared.shared_memory import MAX_INLINE_BYTES, MAX_REGIONS, SharedMemory, Slot, is_local, slot_of

MAX_TENSOR_BYTES = 2 * MAX_INLINE_BYTES
MAX_BYTES = 4 * MAX_INLINE_BYTES


@pytest.fixture
def message_memory() -> MessageMemory:
    return MessageMemory(MAX_BYTES, MAX_TENSOR_BYTES, 10 * MAX_BYTES, lambda: 0)


@pytest.fixture
def memory(tmp_path: Path, message_memory: MessageMemory) -> SharedMemory:
    (tmp_path / "shm").mkdir()
    return SharedMemory(MAX_TENSOR_BYTES, MAX_BYTES, message_memory, tmp_path / "shm")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shm"


@pytest.mark.parametrize("size_bytes", [5, MAX_INLINE_BYTES + 1])
async def test_a_tensor_is_read_and_written_where_its_slot_is(
    memory: SharedMemory, folder: Path, size_bytes: int
) -> None:
    data = os.urandom(size_bytes)
    (folder / "a").write_bytes(b"123" + b"45" + data + b"end")
    memory.register("in", "/a", 3, size_bytes + 4)
    slot = Slot("in", 2, size_bytes)
    assert await memory.read(slot, "inputs.x") == data
    answer = data[::-1]
    assert await memory.write(slot, [answer[:2], memoryview(answer[2:])], "outputs.y") == size_bytes
    assert (folder / "a").read_bytes() == b"123" + b"45" + answer + b"end"


async def test_what_is_read_is_counted_as_messages_are_until_its_request_ends(
    memory: SharedMemory, folder: Path, message_memory: MessageMemory
) -> None:
    (folder / "a").write_bytes(bytes(100))
    memory.register("in", "/a", 0, 100)
    release = asyncio.Event()

    async def request() -> None:
        await memory.read(Slot("in", 0, 100), "inputs.x")
        await release.wait()

    task = asyncio.create_task(request())
    await asyncio.sleep(0)
    assert message_memory.held_bytes == 100
    message_memory.take(MAX_BYTES - 100)
    with pytest.raises(QueueFull):
        await asyncio.create_task(memory.read(Slot("in", 0, 1), "inputs.x"))
    release.set()
    await task
    await asyncio.sleep(0)
    assert message_memory.held_bytes == MAX_BYTES - 100


def test_regions_are_listed_and_forgotten(memory: SharedMemory, folder: Path) -> None:
    (folder / "a").write_bytes(bytes(8))
    memory.register("one", "/a", 0, 4)
    memory.register("two", "a", 4, 4)
    assert [(name, one.key, one.offset, one.size_bytes) for name, one in memory.status("").items()] == [
        ("one", "/a", 0, 4),
        ("two", "a", 4, 4),
    ]
    assert list(memory.status("two")) == ["two"]
    memory.unregister("one")
    memory.unregister("one")
    with pytest.raises(NotFound):
        memory.status("one")
    memory.unregister("")
    assert memory.status("") == {}


def link(folder: Path) -> None:
    (folder / "x").symlink_to(folder.parent / "secret")


def fifo(folder: Path) -> None:
    os.mkfifo(folder / "x")


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize("make", [link, fifo, Path.mkdir, nothing])
def test_only_regular_files_of_the_folder_are_opened(
    memory: SharedMemory, folder: Path, make: Callable[[Path], None]
) -> None:
    (folder.parent / "secret").write_bytes(bytes(8))
    make(folder / "x" if make is Path.mkdir else folder)
    with pytest.raises(InvalidArgument) as refused:
        memory.register("r", "/x", 0, 4)
    assert str(folder) not in str(refused.value)


@pytest.mark.parametrize(
    "key", ["", "/", ".", "..", "/../secret", "../secret", "//etc/passwd", "a/b", "a\0b", "k" * 256]
)
def test_keys_lead_nowhere_else(memory: SharedMemory, folder: Path, key: str) -> None:
    (folder.parent / "secret").write_bytes(bytes(8))
    with pytest.raises(InvalidArgument, match=r"^key: expected /NAME, the name of a file in /dev/shm"):
        memory.register("r", key, 0, 4)


def test_a_file_of_another_user_must_be_open_to_all(
    memory: SharedMemory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a").write_bytes(bytes(8))
    monkeypatch.setattr(os, "geteuid", lambda: (folder / "a").stat().st_uid + 1)
    for mode in (0o600, 0o664, 0o662):
        (folder / "a").chmod(mode)
        with pytest.raises(InvalidArgument, match=r"^key: expected a file of the user that runs the server"):
            memory.register("r", "/a", 0, 4)
    (folder / "a").chmod(0o666)
    memory.register("r", "/a", 0, 4)


@pytest.mark.parametrize(
    ("region", "says"),
    [
        (("", 0, 4), "name: expected a name of 1 to 255 characters"),
        (("n" * 256, 0, 4), "name: expected a name of 1 to 255 characters"),
        (("taken", 0, 4), "name: expected one that is not registered"),
        (("r", 0, 0), "byte_size: expected 1 to"),
        (("r", 0, 9), "byte_size: expected at most the file's 8 bytes, got 9"),
        (("r", 2**63, 2**63 - 1), "byte_size: expected at most the file's 8 bytes"),
    ],
)
def test_what_is_no_part_of_a_file_is_not_registered(
    memory: SharedMemory, folder: Path, region: tuple[str, int, int], says: str
) -> None:
    (folder / "a").write_bytes(bytes(8))
    memory.register("taken", "/a", 0, 4)
    name, offset, size_bytes = region
    with pytest.raises(InvalidArgument, match=f"^{says}"):
        memory.register(name, "/a", offset, size_bytes)


async def test_a_slot_beyond_its_region_or_the_largest_message_is_refused(memory: SharedMemory, folder: Path) -> None:
    (folder / "a").write_bytes(bytes(MAX_TENSOR_BYTES + 2))
    memory.register("small", "/a", 0, 8)
    memory.register("large", "/a", 0, MAX_TENSOR_BYTES + 2)
    for slot in (Slot("small", 5, 4), Slot("small", 2**62, 2**62), Slot("large", 0, MAX_TENSOR_BYTES + 1)):
        with pytest.raises(InvalidArgument, match=r"^inputs\.x\.shared_memory_byte_size: expected"):
            await memory.read(slot, "inputs.x")
    with pytest.raises(
        InvalidArgument, match=r"^outputs\.y\.shared_memory_byte_size: expected at least the output's 3"
    ):
        await memory.write(Slot("small", 0, 2), [b"123"], "outputs.y")
    with pytest.raises(NotFound, match="no shared memory region 'unknown'"):
        await memory.read(Slot("unknown", 0, 1), "inputs.x")


def truncate(file: Path) -> None:
    os.truncate(file, 3)


def replace(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(bytes(100))
    other.replace(file)


@pytest.mark.parametrize("change", [truncate, replace, Path.unlink])
async def test_a_client_that_changes_or_removes_its_file_gets_an_error(
    memory: SharedMemory, folder: Path, change: Callable[[Path], None]
) -> None:
    (folder / "a").write_bytes(bytes(8))
    memory.register("r", "/a", 0, 8)
    change(folder / "a")
    with pytest.raises(InvalidArgument, match=r"^inputs\.x: expected "):
        await memory.read(Slot("r", 0, 8), "inputs.x")
    with pytest.raises(InvalidArgument, match=r"^outputs\.y: expected "):
        await memory.write(Slot("r", 0, 8), [bytes(8)], "outputs.y")


async def test_a_file_that_is_truncated_all_the_time_gives_data_or_an_error(memory: SharedMemory, folder: Path) -> None:
    size_bytes = MAX_INLINE_BYTES + 1
    (folder / "a").write_bytes(bytes(size_bytes))
    memory.register("r", "/a", 0, size_bytes)
    stop = threading.Event()

    def flicker() -> None:
        while not stop.is_set():
            os.truncate(folder / "a", 10)
            os.truncate(folder / "a", size_bytes)

    thread = threading.Thread(target=flicker)
    thread.start()
    try:
        for _ in range(200):
            try:
                data = await asyncio.create_task(memory.read(Slot("r", 0, size_bytes), "inputs.x"))
                assert len(data) == size_bytes
            except InvalidArgument:
                pass
    finally:
        stop.set()
        thread.join()


def test_regions_of_clients_that_are_gone_make_room(memory: SharedMemory, folder: Path) -> None:
    for number in range(MAX_REGIONS):
        (folder / f"{number}").write_bytes(bytes(1))
        memory.register(f"{number}", f"/{number}", 0, 1)
    (folder / "new").write_bytes(bytes(1))
    with pytest.raises(QueueFull, match=f"at most {MAX_REGIONS} regions"):
        memory.register("new", "/new", 0, 1)
    (folder / "7").unlink()
    memory.register("new", "/new", 0, 1)
    assert "7" not in memory.status("")
    assert len(memory.status("")) == MAX_REGIONS


def test_all_regions_together_are_bounded(memory: SharedMemory, folder: Path) -> None:
    (folder / "a").touch()
    os.truncate(folder / "a", MAX_BYTES)
    memory.register("a", "/a", 0, MAX_BYTES)
    with pytest.raises(QueueFull, match=f"of {MAX_BYTES} bytes together"):
        memory.register("b", "/a", 0, 1)


@contextmanager
def called_by(caller: Caller) -> Iterator[None]:
    token = CURRENT.set(caller)
    try:
        yield
    finally:
        CURRENT.reset(token)


ROOT = Caller("root", frozenset(Role))
OTHERS = [
    Caller("other", frozenset(Role)),
    Caller("root", frozenset(Role), origin=Origin.TOKEN),
    Caller("roo", frozenset(Role)),
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda caller: caller.identity)
async def test_a_region_is_its_caller_s_alone(memory: SharedMemory, folder: Path, other: Caller) -> None:
    (folder / "a").write_bytes(b"secret")
    (folder / "b").write_bytes(b"public")
    with called_by(ROOT):
        memory.register("in", "/a", 0, 6)
    with called_by(other):
        assert memory.status("") == {}
        memory.unregister("in")
        memory.unregister("")
        with pytest.raises(NotFound):
            memory.status("in")
        with pytest.raises(NotFound):
            await memory.read(Slot("in", 0, 6), "inputs.x")
        with pytest.raises(NotFound):
            await memory.write(Slot("in", 0, 6), [b"mine"], "outputs.y")
        memory.register("in", "/b", 0, 6)  # a name is taken for its caller alone
        assert await memory.read(Slot("in", 0, 6), "inputs.x") == b"public"
    rotated = Caller("root", frozenset([Role.INFER]), ("a", "b"))
    with called_by(rotated):  # another key of the same name
        assert [*memory.status("")] == ["in"]
        assert await memory.read(Slot("in", 0, 6), "inputs.x") == b"secret"
        memory.unregister("")
        assert memory.status("") == {}
    with called_by(other):
        assert [*memory.status("")] == ["in"]


def test_no_caller_takes_the_regions_of_all(memory: SharedMemory, folder: Path) -> None:
    (folder / "a").write_bytes(bytes(MAX_BYTES))
    with called_by(ROOT):
        memory.register("half", "/a", 0, MAX_BYTES // 2)
        with pytest.raises(QueueFull, match="each caller 1/2 of both"):
            memory.register("one more", "/a", 0, 1)
    with called_by(OTHERS[0]):
        for number in range(MAX_REGIONS // 2):
            memory.register(f"{number}", "/a", 0, 1)
        with pytest.raises(QueueFull):
            memory.register("one more", "/a", 0, 1)
    with called_by(OTHERS[1]):
        memory.register("still room", "/a", 0, 1)


def test_no_file_stays_open(memory: SharedMemory, folder: Path) -> None:
    (folder / "a").write_bytes(bytes(8))
    before = len([*Path("/proc/self/fd").iterdir()])
    for number in range(50):
        memory.register(f"{number}", "/a", 0, 1)
    assert len([*Path("/proc/self/fd").iterdir()]) == before


@pytest.mark.parametrize(
    ("parameters", "slot"),
    [
        ({}, None),
        ({"binary_data_size": 7}, None),
        ({"shared_memory_region": "r", "shared_memory_byte_size": 7}, Slot("r", 0, 7)),
        (
            {"shared_memory_region": "r", "shared_memory_byte_size": 7, "shared_memory_offset": 2, "other": 1},
            Slot("r", 2, 7),
        ),
    ],
)
def test_a_slot_is_read_from_parameters(parameters: dict[str, Any], slot: Slot | None) -> None:
    assert slot_of(parameters.items(), "inputs.x") == slot


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"shared_memory_byte_size": 7}, "region"),
        ({"shared_memory_offset": 7}, "region"),
        ({"shared_memory_region": 1, "shared_memory_byte_size": 7}, "region"),
        ({"shared_memory_region": "r"}, "byte_size"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": 0}, "byte_size"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": True}, "byte_size"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": 7, "shared_memory_offset": -1}, "offset"),
        ({"shared_memory_region": "r", "shared_memory_byte_size": 2**63}, "byte_size"),
    ],
)
def test_a_slot_that_is_named_by_half_is_refused(parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^inputs\.x\.shared_memory_{field}: expected"):
        slot_of(parameters.items(), "inputs.x")


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:5000", True),
        ("ipv4:127.8.0.1:5000", True),
        ("ipv6:[::1]:5000", True),
        ("ipv6:%5B::1%5D:5000", True),
        ("ipv6:[::ffff:127.0.0.1]:5000", True),
        ("unix:", True),
        ("unix:/tmp/socket", True),
        ("ipv4:10.0.0.1:127", False),
        ("ipv6:[fe80::1%25eth0]:5000", False),
        ("ipv6:[::ffff:10.0.0.1]:5000", False),
        ("ipv4:localhost.evil.example:1", False),
        ("unknown", False),
        ("", False),
    ],
)
def test_only_peers_on_this_machine_are_local(peer: str, local: bool) -> None:
    assert is_local(peer) is local


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE])
async def test_without_a_free_descriptor_no_region_is_taken_for_lost(
    memory: SharedMemory, folder: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    (folder / "a").write_bytes(bytes(MAX_BYTES))
    memory.register("a", "/a", 0, MAX_BYTES)
    open_file, opened = os.open, 0

    def few(*arguments: Any, **named: Any) -> int:
        nonlocal opened
        opened += 1
        if opened > 1:
            raise OSError(error, os.strerror(error))
        return open_file(*arguments, **named)

    monkeypatch.setattr(os, "open", few)
    with pytest.raises(QueueFull, match="unregister others first"):
        memory.register("b", "/a", 0, 1)
    with pytest.raises(QueueFull, match="no file descriptor"):
        memory.register("c", "/a", 0, 1)
    assert memory.status("").keys() == {"a"}
