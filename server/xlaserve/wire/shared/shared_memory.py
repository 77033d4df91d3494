"""System shared memory, as Triton's extension of that name has it: tensors in files of /dev/shm, not in messages.

Clients lie and die. So nothing of theirs is mapped or kept open: each use opens the file, checks it again, and copies.
One that was truncated, replaced or removed is then an error of that request, and a client that is gone leaves a name.

A region belongs to the caller that registered it, and others neither see nor use it. Where callers are not told apart,
they are all one.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from xlaserve.admission.caller import ANYBODY, CURRENT
from xlaserve.admission.calls import current_call
from xlaserve.admission.message_memory import MessageMemory
from xlaserve.errors import InvalidArgument, NotFound, QueueFull
from xlaserve.wire.shared.input_tensors import SHARED_MEMORY, bounded
from xlaserve.wire.shared.shared_regions import Region, Regions

FOLDER: Final = Path("/dev/shm")
MAX_REGIONS: Final = 256
CALLER_SHARE: Final = 2
"""Callers who are told apart may each have half of the regions and of their bytes."""
MAX_NAME_LENGTH: Final = 255
MAX_INLINE_BYTES: Final = 256 * 1024
"""Tensors up to this size are copied on the event loop, in some 30 microseconds; others on threads."""
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OPEN_TO_ALL: Final = stat.S_IROTH | stat.S_IWOTH
_REGION, _SIZE, _OFFSET = SHARED_MEMORY
_INT64_END: Final = 2**63


class Slot(NamedTuple):
    """The part of a region where a tensor lies, as a request names it."""

    region: str
    offset: int
    """In the region."""
    size_bytes: int


class SharedMemory:
    """The registered regions of the current caller. A tensor may have `max_tensor_bytes`, the regions of all callers
    together `max_bytes`.

    `regions` are shared by all fronts; by default there is no other. `message_memory` counts copies of inputs, too.
    """

    def __init__(
        self,
        max_tensor_bytes: int,
        max_bytes: int,
        message_memory: MessageMemory,
        folder: Path = FOLDER,
        regions: Regions | None = None,
    ) -> None:
        self._message_memory = message_memory
        self._max_tensor_bytes = max_tensor_bytes
        self._max_bytes = max_bytes
        self._folder = folder
        self._regions = regions or Regions()

    def status(self, name: str) -> dict[str, Region]:
        """Returns one region by its name, or all without a `name`. Raises NotFound."""
        if name:
            return {name: self._find(name)}
        regions = self._regions.current()
        return {key.removeprefix(_key("")): region for key, region in regions.items() if _is_own(key)}

    def register(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Registers a part of the file that `key` names, as shm_open does. Raises InvalidArgument and QueueFull."""
        if not 1 <= len(name) <= MAX_NAME_LENGTH:
            raise InvalidArgument("name", f"a name of 1 to {MAX_NAME_LENGTH} characters", f"{len(name)} characters")
        if not 1 <= size_bytes < _INT64_END:
            raise InvalidArgument("byte_size", "1 to 9223372036854775807", size_bytes)
        with self._open(key, "key") as (_, found):
            if offset + size_bytes > found.st_size:
                raise InvalidArgument("byte_size", f"at most the file's {found.st_size} bytes", offset + size_bytes)
            region = Region(key, offset, size_bytes, _identity(found))
        with self._regions.changed() as regions:
            if _key(name) in regions:
                raise InvalidArgument("name", "one that is not registered", repr(name))
            if not self._has_room(regions, size_bytes):
                self._forget_lost(regions)
            if not self._has_room(regions, size_bytes):
                each = "" if CURRENT.get() is ANYBODY else f", each caller 1/{CALLER_SHARE} of both"
                raise QueueFull(
                    f"shared memory: expected at most {MAX_REGIONS} regions of {self._max_bytes} bytes together"
                    f" (max_inflight_bytes){each}, got more; unregister others first"
                )
            regions[_key(name)] = region

    def unregister(self, name: str) -> None:
        """Forgets one region, or all without a `name`. One that is unknown is no error. Raises QueueFull."""
        with self._regions.changed() as regions:
            for key in [_key(name)] if name else [*filter(_is_own, regions)]:
                regions.pop(key, None)

    def check(self, slot: Slot, where: str) -> Region:
        """Returns the region of `slot`. Raises NotFound, and InvalidArgument where the slot is not within it."""
        region = self._find(slot.region)
        if slot.offset + slot.size_bytes > region.size_bytes:
            raise InvalidArgument(
                f"{where}.{_SIZE}", f"a part of the region's {region.size_bytes} bytes", slot.offset + slot.size_bytes
            )
        if slot.size_bytes > self._max_tensor_bytes:
            expected = f"at most {self._max_tensor_bytes} bytes (max_message_bytes)"
            raise InvalidArgument(f"{where}.{_SIZE}", expected, slot.size_bytes)
        return region

    async def read(self, slot: Slot, where: str) -> bytes:
        """Returns a copy of what lies in `slot`, counted until the current task ends.

        Raises NotFound, InvalidArgument and QueueFull.
        """
        region = self.check(slot, where)
        self._message_memory.take(slot.size_bytes)
        current_call().add_done_callback(lambda _: self._message_memory.release(slot.size_bytes))
        if slot.size_bytes <= MAX_INLINE_BYTES:
            return self._read(region, slot, where)
        return await asyncio.to_thread(self._read, region, slot, where)

    async def write(self, slot: Slot, parts: Sequence[bytes | memoryview], where: str) -> int:
        """Writes a tensor to the beginning of `slot`, and returns its bytes. Raises NotFound and InvalidArgument."""
        region = self.check(slot, where)
        size_bytes = sum(memoryview(part).nbytes for part in parts)
        if size_bytes > slot.size_bytes:
            raise InvalidArgument(f"{where}.{_SIZE}", f"at least the output's {size_bytes} bytes", slot.size_bytes)
        if size_bytes <= MAX_INLINE_BYTES:
            self._write(region, slot, parts, where)
        else:
            await asyncio.to_thread(self._write, region, slot, parts, where)
        return size_bytes

    def _has_room(self, regions: Mapping[str, Region], size_bytes: int) -> bool:
        own = {key: region for key, region in regions.items() if _is_own(key)}
        share = 1 if CURRENT.get() is ANYBODY else CALLER_SHARE
        return all(
            len(counted) < MAX_REGIONS // part
            and sum(region.size_bytes for region in counted.values()) + size_bytes <= self._max_bytes // part
            for counted, part in ((regions, 1), (own, share))
        )

    def _read(self, region: Region, slot: Slot, where: str) -> bytes:
        with self._open_registered(region, where) as file:
            data = os.pread(file, slot.size_bytes, region.offset + slot.offset)
        if len(data) < slot.size_bytes:
            raise InvalidArgument(where, f"{slot.size_bytes} bytes in shared memory", f"{len(data)} bytes")
        return data

    def _write(self, region: Region, slot: Slot, parts: Iterable[bytes | memoryview], where: str) -> None:
        data = b"".join(parts)
        with self._open_registered(region, where) as file:
            try:
                written = os.pwrite(file, data, region.offset + slot.offset)
            except OSError as error:
                raise InvalidArgument(where, "shared memory that takes the output", error.strerror) from None
        if written < len(data):
            raise InvalidArgument(where, f"room for {len(data)} bytes in shared memory", f"{written} bytes")

    def _find(self, name: str) -> Region:
        try:
            return self._regions.current()[_key(name)]
        except KeyError:
            raise NotFound(f"no shared memory region {name[:64]!r} is registered") from None

    @contextmanager
    def _open_registered(self, region: Region, where: str) -> Iterator[int]:
        with self._open(region.key, where) as (file, found):
            if _identity(found) != region.identity:
                raise InvalidArgument(where, "the file that was registered", "another file of that name")
            if region.offset + region.size_bytes > found.st_size:
                expected = f"a file of at least {region.offset + region.size_bytes} bytes, as it was registered"
                raise InvalidArgument(where, expected, f"{found.st_size} bytes")
            yield file

    @contextmanager
    def _open(self, key: str, where: str) -> Iterator[tuple[int, os.stat_result]]:
        """Opens the file that a key names.

        Raises InvalidArgument where the client can't have been meant to name it, and QueueFull where the server has no
        file descriptor left.
        """
        name = key.removeprefix("/")
        if not 1 <= len(name) <= MAX_NAME_LENGTH or "/" in name or "\0" in name or name in (".", ".."):
            raise InvalidArgument(where, "/NAME, the name of a file in /dev/shm", repr(key[:64]))
        try:
            file = os.open(self._folder / name, _FLAGS)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise QueueFull("shared memory: the server has no file descriptor left") from None
            expected = "a regular file in /dev/shm that the server may read and write"
            raise InvalidArgument(where, expected, f"{key[:64]!r}, {error.strerror}") from None
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise InvalidArgument(where, "a regular file", repr(key[:64]))
            # The server may be allowed more than its clients are, and they would reach others' memory through it.
            if found.st_uid != os.geteuid() and found.st_mode & _OPEN_TO_ALL != _OPEN_TO_ALL:
                expected = "a file of the user that runs the server, or one that everybody may read and write"
                raise InvalidArgument(where, expected, repr(key[:64]))
            yield file, found
        finally:
            os.close(file)

    def _forget_lost(self, regions: dict[str, Region]) -> None:
        """Forgets regions whose files are gone, or are others by now: their clients ended without a word."""
        for name, region in [*regions.items()]:
            try:  # not by opening it, which can fail for a lack of descriptors
                found = (self._folder / region.key.removeprefix("/")).lstat()
            except FileNotFoundError:
                del regions[name]
            except OSError:  # nothing is known of it
                continue
            else:
                if _identity(found) != region.identity or found.st_size < region.offset + region.size_bytes:
                    del regions[name]


def slot_of(parameters: Iterable[tuple[str, Any]], where: str) -> Slot | None:
    """Returns where a tensor with these parameters lies; None where not in shared memory. Raises InvalidArgument."""
    named = {key: value for key, value in bounded(parameters, f"{where}.parameters") if key in SHARED_MEMORY}
    if not named:
        return None
    region = named.get(_REGION)
    if not isinstance(region, str):
        raise InvalidArgument(f"{where}.{_REGION}", "the name of a registered region", repr(region)[:64])
    size_bytes, offset = _number(named.get(_SIZE), 1, f"{where}.{_SIZE}"), named.get(_OFFSET, 0)
    return Slot(region, _number(offset, 0, f"{where}.{_OFFSET}"), size_bytes)


def is_local(peer: str) -> bool:
    """Whether a peer, named as gRPC does, is on this machine."""
    scheme, _, address = unquote(peer).partition(":")
    if scheme not in ("ipv4", "ipv6"):
        return scheme in ("unix", "unix-abstract")
    try:
        host = ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return (mapped or host).is_loopback


def _number(value: object, least: int, field: str) -> int:
    if type(value) is not int or not least <= value < _INT64_END:
        raise InvalidArgument(field, f"an int64 of at least {least}", repr(value)[:64])
    return value


def _key(name: str) -> str:
    """Returns what a region of the current caller is called among those of all."""
    return f"{CURRENT.get().identity}\0{name}"


def _is_own(key: str) -> bool:
    return key.startswith(_key(""))


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
