"""Which of the sockets that listen on a shared port (SO_REUSEPORT) is given the connections that come.

The kernel spreads connections over all of them. A socket that closes resets those that it was given and that nobody has
accepted yet, so it has to be given none before that.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from contextlib import suppress
from typing import Final

# Of Linux's asm-generic/socket.h; Python has no names for them.
SO_ATTACH_REUSEPORT_CBPF: Final = 51
SO_DETACH_REUSEPORT_BPF: Final = 68
RETURN: Final = 0x06
"""The instruction BPF_RET | BPF_K of linux/bpf_common.h: ends with a constant."""
ACCEPT_QUEUE: Final = 24
"""Where `struct tcp_info` has, of a socket that listens, how many connections wait to be accepted (tcpi_unacked)."""
_INSTRUCTION: Final = struct.Struct("=HBBI")
_PROGRAM: Final = struct.Struct("@HP")
_WORD: Final = struct.Struct("=I")


def steer(listener: socket.socket, place: int) -> None:
    """Has the socket at `place`, from 0, in the order in which they began to listen, be given all new connections.

    When one closes, the last takes its place. Where nothing is at `place`, connections are spread as before. Raises
    OSError where the kernel can't do that.
    """
    instruction = ctypes.create_string_buffer(_INSTRUCTION.pack(RETURN, 0, 0, place))
    program = _PROGRAM.pack(1, ctypes.addressof(instruction))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, program)


def spread(listener: socket.socket) -> None:
    """Ends what `steer` did, if anybody called it for the port."""
    with suppress(OSError):  # nobody did
        listener.setsockopt(socket.SOL_SOCKET, SO_DETACH_REUSEPORT_BPF, 0)


def waiting(listener: socket.socket) -> int:
    """Returns how many connections wait to be accepted. Raises OSError."""
    (found,) = _WORD.unpack_from(listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), ACCEPT_QUEUE)
    return int(found)
