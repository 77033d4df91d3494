"""Disks that are full, read-only or lie."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.attack import samples
from tests.attack.client import Client
from tests.attack.registry import OK, Round, attack
from tests.attack.server import Server, ServerError

DIGITS: Final[dict[str, Any]] = {"name": "digits", "source": "builtin:digits", "modes": ["xla"], "buckets": [1, 4]}
NOOP: Final[dict[str, Any]] = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1]}
SMALL_BYTES: Final = 300_000
"""Less than what the compile cache wants to write of a model, more than a log."""


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[bool]:
    """Mounts a file system in memory, where the system lets us, and gives whether it did."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    is_mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


def check_digits(round: Round, server: Server, what: str) -> None:
    """Accounts for all ten digits."""
    valid = samples.classify(list(range(10)))
    with Client(server.grpc) as client:
        call = client.send(valid.method, valid.message.SerializeToString())
        round.settle(call, what, allowed=frozenset({OK}), check=valid.check)


def serve_and_stop(round: Round, config: dict[str, Any], what: str, **options: Any) -> str:
    """Starts a server, asks it for all digits, stops it, and returns its log."""
    server = round.start(config, **options)
    try:
        server.wait_until_ready()
    except ServerError as error:
        round.count("did not start", f"{what}: {error}")
        return server.log
    check_digits(round, server, what)
    status = server.stop()
    round.count(OK if status == 0 else f"status {status}", f"{what}: the end")
    return server.log


def is_refused(round: Round, config: dict[str, Any], what: str, **options: Any) -> None:
    """Accounts for a server that may serve or end with a sentence, and with nothing else."""
    server = round.start(config, **options)
    try:
        server.wait_for(lambda: "ready: " in server.log, "serve", 90)
        # Even then, what is written last may end it.
        round.count(OK if server.stop() == 0 or server.has_refused else "bad status", f"{what}: the end")
    except ServerError as error:
        round.count(OK if server.has_refused else "died", f"{what}: {error}")


@attack(allowed={OK}, site="own", weight=2, is_short=False)
def full_disk_for_the_cache(round: Round) -> None:
    """A compile cache on a disk that is full, or files that may not grow: it serves as without a cache."""
    with tmpfs(round.folder / "full", "size=64k") as is_mounted:
        if is_mounted:
            cache = round.folder / "full" / "cache"
            serve_and_stop(round, {"models": [DIGITS], "compile_cache": str(cache)}, "a full disk")
            serve_and_stop(round, {"models": [DIGITS], "compile_cache": str(cache)}, "a full disk, again")
        else:
            round.tally.notes.append("no tmpfs could be mounted")
    cache = round.folder / "limited"
    config = {"models": [DIGITS], "compile_cache": str(cache)}
    # What processes share is a file too, if one in memory.
    limited = is_refused if round.fronts else serve_and_stop
    limited(round, config, "a limit of each file", max_file_bytes=SMALL_BYTES)
    serve_and_stop(round, config, "what was written under a limit")


@attack(allowed={OK}, site="own", is_short=False)
def read_only_cache(round: Round) -> None:
    """A compile cache where nothing can be written or read: a sentence where the settings want that, else it serves."""
    with tmpfs(round.folder / "read-only", "ro,size=64k") as is_mounted:
        if is_mounted:
            cache = round.folder / "read-only" / "cache"
            is_refused(round, {"models": [DIGITS], "compile_cache": str(cache)}, "a read-only disk")
        else:
            round.tally.notes.append("no tmpfs could be mounted")
    missing = {"models": [DIGITS], "compile_cache": str(round.folder / "none"), "compile_cache_read_only": True}
    is_refused(round, missing, "a read-only cache that is not there")
    filled, config = round.folder / "filled", {"models": [DIGITS]}
    serve_and_stop(round, {**config, "compile_cache": str(filled)}, "an empty cache")
    serve_and_stop(
        round, {**config, "compile_cache": str(filled), "compile_cache_read_only": True}, "a read-only cache"
    )


@attack(allowed={OK}, site="own")
def ready_files_that_can_not_be(round: Round) -> None:
    """Ready files in a full or read-only place, in no folder, or where a folder is: a sentence, or a server."""
    folder = round.folder / "a folder"
    folder.mkdir(exist_ok=True)
    (folder / "file").touch()
    places = {
        "in no folder": round.folder / "missing" / "ready",
        "a folder": folder,
        "in a file": folder / "file" / "x",
    }
    with tmpfs(round.folder / "ro", "ro,size=4k") as is_ro, tmpfs(round.folder / "full", "size=4k") as is_full:
        if is_ro:
            places["on a read-only disk"] = round.folder / "ro" / "ready"
        if is_full:
            (round.folder / "full" / "filler").write_bytes(bytes(4096))
            places["on a full disk"] = round.folder / "full" / "ready"
        for what, path in places.items():
            is_refused(round, {"models": [NOOP], "ready_file": str(path)}, f"a ready file {what}")


@attack(allowed={OK}, site="own", weight=4, is_short=False)
def damaged_cache(round: Round) -> None:
    """A compile cache with flipped bits, cut, emptied, swapped or foreign files: the same answers, always."""
    source = round.folder / "source"
    config = {"models": [DIGITS]}
    serve_and_stop(round, {**config, "compile_cache": str(source)}, "an empty cache")
    files = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
    if not files:
        round.count("nothing was kept", "the cache")
        return
    number = 0
    while True:
        number += 1
        cache = round.folder / f"damaged{number}"
        shutil.copytree(source, cache)
        damage = "; ".join(damage_one(round, cache, files) for _ in range(round.random.choice((1, 1, 3))))
        server_config = {**config, "compile_cache": str(cache), "compile_cache_read_only": round.random.random() < 0.3}
        serve_and_stop(round, server_config, f"damage {number}: {damage}")
        shutil.rmtree(cache)
        if not round.has_time:
            return


def damage_one(round: Round, cache: Path, files: list[Path]) -> str:  # noqa: PLR0911 - one way each
    """Damages a file of a cache and says how."""
    rng = round.random
    name = rng.choice(files)
    file, other = cache / name, cache / rng.choice(files)
    if not file.is_file() or not other.is_file():
        return "nothing more"
    data = bytearray(file.read_bytes())
    match rng.randrange(7):
        case 0 if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            file.write_bytes(data)
            return f"a bit of {name}"
        case 1:
            file.write_bytes(data[: rng.randrange(len(data) + 1)])
            return f"{name} cut"
        case 2:
            file.write_bytes(b"")
            return f"{name} emptied"
        case 3:
            swapped = other.read_bytes()
            other.write_bytes(data)
            file.write_bytes(swapped)
            return f"{name} and {other.relative_to(cache)} swapped"
        case 4:
            file.unlink()
            return f"{name} removed"
        case 5:
            file.unlink()
            file.mkdir()
            return f"{name} a folder"
        case _:
            file.write_bytes(rng.randbytes(1000))
            return f"{name} noise"
