"""Calls with bytes as they are, through grpcio alone: what is sent need not be a message."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Final, Self

import grpc

PATIENCE_S: Final = 40.0
"""A call that has not settled by then is lost: no attack keeps a server that busy."""
RETRY_S: Final = 0.05
LOST: Final = "LOST"
INFERENCE: Final = "/inference.GRPCInferenceService/"
VISION: Final = "/xlaserve.v1.Vision/"
PREDICTION: Final = "/tensorflow.serving.PredictionService/"
SERVING_MODELS: Final = "/tensorflow.serving.ModelService/"
HEALTH: Final = "/grpc.health.v1.Health/"
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
_INSIDE: Final = re.compile(r"/(home|root|usr|tmp|work|opt)/|\.py\b|0x[0-9a-f]{6}|Traceback|<class|object at")
"""What no message to a client may tell."""


class Call:
    """A call under way."""

    def __init__(self, future: Any, timeout_s: float) -> None:
        self._future = future
        self._timeout_s = timeout_s
        self._ended_at = self._began_at = time.monotonic()
        future.add_done_callback(self._note_end)

    def cancel(self) -> None:
        """Hangs up."""
        self._future.cancel()

    def outcome(self) -> tuple[str, bytes, str]:
        """Waits for it; returns its status or LOST, its answer, and the message of its status.

        LOST is also what ran into a deadline of PATIENCE_S or more: nobody meant it to.
        """
        try:
            error = self._future.exception(timeout=max(PATIENCE_S, self._timeout_s) + 20)
        except grpc.FutureTimeoutError:
            self._future.cancel()
            return LOST, b"", ""
        except grpc.FutureCancelledError:
            return "CANCELLED", b"", ""
        if error is None:
            return "OK", self._future.result(), ""
        status, details = error.code().name, error.details() or ""
        ran_out = self._timeout_s >= PATIENCE_S and self._ended_at - self._began_at > self._timeout_s - 1
        return (LOST if status == "DEADLINE_EXCEEDED" and ran_out else status), b"", details

    def _note_end(self, future: object) -> None:
        self._ended_at = time.monotonic()


class Client:
    """A connection of its own, without retries."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, _OPTIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is under way."""
        self._channel.close()

    def send(
        self, method: str, data: bytes, timeout_s: float = PATIENCE_S, metadata: tuple[tuple[str, str], ...] = ()
    ) -> Call:
        """Sends a message and returns the call, to be settled."""
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(method)
        return Call(ask.future(data, timeout=timeout_s, metadata=metadata), timeout_s)

    def send_until_answered(self, method: str, data: bytes, outage_s: float) -> Call:
        """Sends a message, and again while it is not answered for up to `outage_s`; returns the last call."""
        give_up_at = time.monotonic() + outage_s
        while True:
            call = self.send(method, data)
            if time.monotonic() >= give_up_at or call.outcome()[0] == "OK":
                return call
            time.sleep(RETRY_S)

    def stream(self, method: str, messages: Iterable[bytes], timeout_s: float = PATIENCE_S) -> Any:
        """Sends messages as a stream and returns the call, to be iterated."""
        ask: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(method)
        return ask(iter(messages), timeout=timeout_s)


def leak(details: str) -> str | None:
    """Returns what a status' message tells of the inside."""
    found = _INSIDE.search(details)
    return f"it tells of the inside: {details[:300]!r}" if found else None
