"""How a coordinator and a generator on another machine make sure of each other before any call is exchanged.

Each proves that it has the key, by an HMAC of both sides' random numbers, and then they compare versions. Until then
all messages are of limited length, and none is a pickle. Sockets are non-blocking; the caller bounds the time.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import json
import os
import platform
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

TIMEOUT_S: Final = 5.0
SILENCE_S: Final = 10.0
"""How long the other side may be silent in the middle of a message, or leave data unacknowledged."""
KEY_VARIABLE: Final = "LOADTEST_GENERATOR_KEY"
MIN_KEY_BYTES: Final = 16

_MAGIC: Final = b"loadtest generate 1\n"
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_MAX_MESSAGE_BYTES: Final = 4096
_LENGTH: Final = struct.Struct("!I")
_KEEPALIVE_S: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 5}


class HandshakeError(Exception):
    """The other side is not one to work with; the message says what it does: "refuses the key"."""


@functools.cache
def own_version() -> str:
    """Names the code of this side: both sides must have the same, since they exchange its objects."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent.parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    python = ".".join(platform.python_version_tuple()[:2])
    return f"xlaserve {version('xlaserve')} (code {digest.hexdigest()[:8]}), Python {python}, NumPy {version('numpy')}"


def read_key(file: Path | None) -> bytes:
    """Returns the key, from `file` or the environment. Raises ValueError."""
    if file is not None:
        try:
            key, where = file.read_bytes().strip(), str(file)
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from None
    else:
        key, where = os.environ.get(KEY_VARIABLE, "").strip().encode(), KEY_VARIABLE
        if not key:
            raise ValueError(f"expected the key that coordinator and generators share, in {KEY_VARIABLE} or a key file")
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"{where}: expected a key of {MIN_KEY_BYTES} bytes or more, got {len(key)}")
    return key


async def greet_generator(sock: socket.socket, key: bytes, session: str) -> None:
    """Does the coordinator's part. Raises HandshakeError, and OSError where the connection ends."""
    own, theirs = await _exchange_nonces(sock)
    await _send(sock, _proof(key, b"coordinator", own, theirs))
    try:
        proof = await _receive(sock, _PROOF_BYTES)
    except ConnectionError:
        raise HandshakeError("refuses the key: it has another") from None
    if not hmac.compare_digest(proof, _proof(key, b"generator", own, theirs)):
        raise HandshakeError("has another key")
    await _send_message(sock, {"version": own_version(), "session": session})
    answer = await _receive_message(sock)
    _check_version(answer)
    if refusal := answer.get("refusal"):
        raise HandshakeError(refusal)


async def greet_coordinator(sock: socket.socket, key: bytes, admit: Callable[[str], Awaitable[str]]) -> None:
    """Does the generator's part. `admit` gets the coordinator's session, and returns why it is refused, or "".

    Raises HandshakeError, and OSError where the connection ends.
    """
    own, theirs = await _exchange_nonces(sock)
    if not hmac.compare_digest(await _receive(sock, _PROOF_BYTES), _proof(key, b"coordinator", theirs, own)):
        raise HandshakeError("has another key")
    await _send(sock, _proof(key, b"generator", theirs, own))
    asked = await _receive_message(sock)
    if asked.get("version") != own_version():
        await _send_message(sock, {"version": own_version()})
        _check_version(asked)
    refusal = await admit(asked.get("session", ""))
    await _send_message(sock, {"version": own_version(), "refusal": refusal})
    if refusal:
        raise HandshakeError("was refused: another is at work")


def bound_silence(sock: socket.socket) -> None:
    """Has reads and writes fail once the other machine has gone, or stands still in the middle of a message.

    Reads and writes then block.
    """
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(SILENCE_S), 0))
    # Not every system has these.
    for name, value in {**_KEEPALIVE_S, "TCP_USER_TIMEOUT": int(2 * SILENCE_S * 1000)}.items():
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


async def _exchange_nonces(sock: socket.socket) -> tuple[bytes, bytes]:
    own = secrets.token_bytes(_NONCE_BYTES)
    await _send(sock, _MAGIC + own)
    greeting = await _receive(sock, len(_MAGIC))
    if greeting != _MAGIC:
        raise HandshakeError("speaks another protocol")
    return own, await _receive(sock, _NONCE_BYTES)


def _proof(key: bytes, role: bytes, of_coordinator: bytes, of_generator: bytes) -> bytes:
    # The role is part of it, so that no side can be made to give the other's proof.
    return hmac.digest(key, role + of_coordinator + of_generator, "sha256")


def _check_version(message: Mapping[str, str]) -> None:
    if message.get("version") != own_version():
        raise HandshakeError(
            f"runs {message.get('version')}, and this side {own_version()}; both sides need the same code"
        )


async def _send_message(sock: socket.socket, message: Mapping[str, str]) -> None:
    data = json.dumps(message).encode()
    await _send(sock, _LENGTH.pack(len(data)) + data)


async def _receive_message(sock: socket.socket) -> dict[str, str]:
    (length,) = _LENGTH.unpack(await _receive(sock, _LENGTH.size))
    if length > _MAX_MESSAGE_BYTES:
        raise HandshakeError("speaks another protocol")
    data = await _receive(sock, length)
    try:
        return dict(json.loads(data))
    except (TypeError, ValueError, RecursionError):
        raise HandshakeError("speaks another protocol") from None


async def _send(sock: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def _receive(sock: socket.socket, length: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < length:
        part = await loop.sock_recv(sock, length - len(data))
        if not part:
            raise ConnectionResetError("the connection ended")
        data += part
    return data
