"""The memory of a server, while clients do all at once what takes the most of it."""

from __future__ import annotations

import io
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_reflection.v1alpha import reflection_pb2
from PIL import Image
from tests.control_groups import killed, limited_memory
from tests.integration.conftest import Brake, StartServer

from xlaserve.engine.memory import peak_bytes
from xlaserve_proto import open_inference_pb2 as pb

MIB = 1024 * 1024
LARGE_BYTES = 60 * MIB
LIMIT_BYTES = 1536 * MIB
"""The memory that the server may take at its peak, with the buffers that it keeps for the next large message. Peaks of
1,238 to 1,354 MiB were seen, while 2,880 MiB of messages, which are copied, and 1,000 MiB of images came."""
GROUP_BYTES = 1280 * MIB
"""Less than the messages of 36 callers take together where nothing bounds them."""
SETTINGS = {"max_resident_bytes": 640 * MIB, "max_inflight_bytes": 256 * MIB, "max_decode_bytes": 512 * MIB}
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
INFER = "/inference.GRPCInferenceService/ModelInfer"
CALLERS = 12
"""Clients of each kind, each on a connection of its own."""
PATIENCE_S = 60
SIDE = 224
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

Status = grpc.StatusCode
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]


HEADERS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": INFER,
    ":authority": "server",
    "te": "trailers",
    "content-type": "application/grpc",
}


class Sluggish:
    """A client that sends a message but for its last byte, as fast as it may, and then waits."""

    def __init__(self, address: str, size_bytes: int) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self._left = size_bytes - 1 + 5
        self._windows = {0: 65_535, 1: 65_535}
        self._initial = 65_535
        self.is_refused = False
        self._thread = threading.Thread(target=self._talk, args=(size_bytes,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_S)
        self.socket.close()

    def _talk(self, size_bytes: int) -> None:
        try:
            self._run(size_bytes)
        except (OSError, ConnectionError):
            self.is_refused = True

    def _run(self, size_bytes: int) -> None:
        block = b"".join(
            b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
            for name, value in HEADERS.items()
        )
        self.socket.sendall(PREFACE + frame(4, 0, 0, b"") + frame(1, 4, 1, block))
        prefix = b"\x00" + struct.pack(">I", size_bytes)
        while True:
            room = min(16_384, self._left, *self._windows.values())
            if room > 0:
                self.socket.sendall(frame(0, 0, 1, prefix + bytes(room - len(prefix))))
                prefix = b""
                self._left -= room
                for stream in self._windows:
                    self._windows[stream] -= room
            if room <= 0 or self._left == 0:
                self._listen()

    def _listen(self) -> None:
        """Takes in one frame of the server's."""
        head = self._receive(9)
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9], "big")
        body = self._receive(int.from_bytes(head[:3], "big"))
        if kind == 8:
            self._windows[stream] += int.from_bytes(body, "big")
        elif kind == 4 and not flags & 1:
            for number, value in struct.iter_unpack(">HI", body):
                if number == 4:
                    self._windows[1] += value - self._initial
                    self._initial = value
            self.socket.sendall(frame(4, 1, 0, b""))
        elif kind == 6 and not flags & 1:
            self.socket.sendall(frame(6, 1, 0, body))
        elif kind in (1, 3, 7):  # an answer, a reset, a farewell
            raise ConnectionError

    def _receive(self, size_bytes: int) -> bytes:
        data = b""
        while len(data) < size_bytes:
            part = self.socket.recv(size_bytes - len(data))
            if not part:
                raise ConnectionError
            data += part
        return data


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def small() -> bytes:
    """A valid request."""
    message = pb.ModelInferRequest(model_name="noop")
    message.inputs.add(name="pixels", datatype="UINT8", shape=(1, SIDE, SIDE, 3))
    message.raw_input_contents.append(bytes(SIDE * SIDE * 3))
    return message.SerializeToString()


def for_unknown_model() -> bytes:
    return pb.ModelInferRequest(model_name="nope", raw_input_contents=[bytes(LARGE_BYTES)]).SerializeToString()


def with_unknown_field() -> bytes:
    large = pb.ModelInferRequest(raw_input_contents=[bytes(LARGE_BYTES - len(small()))]).SerializeToString()
    return small() + b"\xb2\x06" + large[1:]  # in field 102 instead


def for_reflection() -> bytes:
    """A question about a symbol with a name as long as a message may be."""
    return reflection_pb2.ServerReflectionRequest(file_containing_symbol="x" * LARGE_BYTES).SerializeToString()


def with_huge_png() -> bytes:
    return with_huge("PNG", compress_level=1)


def with_huge_webp() -> bytes:
    return with_huge("WEBP", lossless=True, method=0)


def with_huge(file_format: str, **how: Any) -> bytes:
    """An image of 64 megapixels."""
    file = io.BytesIO()
    Image.new("RGBA", (8000, 8000)).save(file, file_format, **how)
    message = pb.ModelInferRequest(model_name="noop")
    message.inputs.add(name="image", datatype="BYTES", shape=(1,)).contents.bytes_contents.append(file.getvalue())
    return message.SerializeToString()


@pytest.fixture
def channels() -> Iterator[Any]:
    with ExitStack() as stack:

        def connect(address: str) -> grpc.Channel:
            return stack.enter_context(grpc.insecure_channel(address, OPTIONS))

        yield connect


def test_memory_stays_bounded_while_clients_ask_reflection_at_length(start_server: StartServer, channels: Any) -> None:
    server = start_server({"models": [{"name": "noop", "source": "builtin:noop", "buckets": [1]}], **SETTINGS})
    question = for_reflection()
    calls = [channels(server.grpc).stream_stream(REFLECT)(iter([question]), timeout=PATIENCE_S) for _ in range(CALLERS)]
    assert {call.code() for call in calls} <= {Status.INVALID_ARGUMENT, Status.RESOURCE_EXHAUSTED}
    server.wait_for(lambda: server.metric("xlaserve_in_flight_message_bytes") == 0, "messages stayed held")
    assert peak_bytes(Path(f"/proc/{server.serving.pid}")) < LIMIT_BYTES


def test_memory_stays_bounded_while_clients_do_their_worst_all_at_once(
    start_server: StartServer, brake: Brake, channels: Any
) -> None:
    model = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1, 2, 4]}
    server = start_server({"models": [model], **SETTINGS}, env=brake.env)
    host, port = server.grpc.rsplit(":", 1)
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(100)]
        for half_open in silent[50:]:
            half_open.sendall(PREFACE)
        sluggish = [Sluggish(server.grpc, LARGE_BYTES) for _ in range(2 * CALLERS)]
        for client in sluggish:
            stack.callback(client.close)
        brake.pull()  # so that what is accepted stays
        calls = [
            channels(server.grpc).unary_unary(INFER).future(message, timeout=PATIENCE_S)
            for message in (*[with_unknown_field(), for_unknown_model()] * CALLERS, *[with_huge_png()] * 4)
        ]
        streams = [
            channels(server.grpc).stream_stream(STREAM_INFER)(iter([small()] * 400), timeout=PATIENCE_S)
            for _ in range(CALLERS)
        ]
        server.wait_for(
            lambda: sum(client.is_refused for client in sluggish) >= CALLERS, "those that take longest were not refused"
        )
        brake.release()
        statuses = [error.code() if (error := call.exception(timeout=PATIENCE_S)) else Status.OK for call in calls]
        assert set(statuses) <= {Status.OK, Status.NOT_FOUND, Status.RESOURCE_EXHAUSTED}
        assert server.metric("xlaserve_requests_total", model="", status="RESOURCE_EXHAUSTED") > 0
        for connection in silent:
            connection.settimeout(PATIENCE_S)
            while connection.recv(4096):  # until the server closes it
                pass
        for stream in streams:
            stream.cancel()
    answer = channels(server.grpc).unary_unary(INFER)(small(), timeout=PATIENCE_S)
    scores = np.frombuffer(pb.ModelInferResponse.FromString(answer).raw_output_contents[0], np.float32)
    assert not scores.any()
    server.wait_for(lambda: server.metric("xlaserve_in_flight_message_bytes") == 0, "messages stayed held")
    assert peak_bytes(Path(f"/proc/{server.serving.pid}")) < LIMIT_BYTES


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group whose memory has a limit."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(limited_memory(GROUP_BYTES))
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        yield made


def test_the_limit_of_a_control_group_is_kept_to_from_when_it_holds(
    group: Path, start_server: StartServer, channels: Any
) -> None:
    server = start_server({"models": [{"name": "noop", "source": "builtin:noop", "buckets": [1]}]})
    for process in server.processes():
        (group / "cgroup.procs").write_text(str(process.pid))
    bound = "xlaserve_in_flight_message_bytes_limit"
    server.wait_for(lambda: server.metric(bound) <= GROUP_BYTES / 3, "the limit was not noticed")
    message = for_unknown_model()
    calls = [channels(server.grpc).unary_unary(INFER).future(message, timeout=PATIENCE_S) for _ in range(3 * CALLERS)]
    statuses = [error.code() if (error := call.exception(timeout=PATIENCE_S)) else Status.OK for call in calls]
    assert set(statuses) <= {Status.NOT_FOUND, Status.RESOURCE_EXHAUSTED}
    assert Status.NOT_FOUND in statuses
    assert killed(group) == 0
    answer = channels(server.grpc).unary_unary(INFER)(small(), timeout=PATIENCE_S)
    assert pb.ModelInferResponse.FromString(answer).model_name == "noop"
