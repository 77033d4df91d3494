"""The protocols in which servers are asked: each is a module, and a line in PROTOCOLS."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, NamedTuple

from xlaserve_loadtest.addresses import FLEET, Address
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets import (
    open_inference,
    open_inference_rest,
    server_fleet,
    tensorflow_serving,
    tensorflow_serving_rest,
)
from xlaserve_loadtest.targets.channel import PLAIN, Transport
from xlaserve_loadtest.targets.references import NONE, References
from xlaserve_loadtest.targets.target import Connection, ModelInfo, Target


class Protocol(NamedTuple):
    """The functions that a module of a protocol offers."""

    describe: Callable[[str, str, Transport], Awaitable[ModelInfo]]
    """Asks the server at an address for the metadata of a model. Raises TargetError."""
    encode: Callable[[Request, ModelInfo], Request]
    """Rewrites a serialised ModelInferRequest as it is sent, once before the run. Raises PayloadError."""
    target: Callable[[float], Target]
    """Makes a target with a deadline in seconds, for requests as `encode` leaves them."""


_OPEN_INFERENCE: Final = Protocol(open_inference.describe, open_inference.encode, open_inference.target)
_OPEN_INFERENCE_REST: Final = Protocol(
    open_inference_rest.describe, open_inference_rest.encode, open_inference_rest.target
)
_TENSORFLOW_SERVING: Final = Protocol(tensorflow_serving.describe, tensorflow_serving.encode, tensorflow_serving.target)
_TENSORFLOW_SERVING_REST: Final = Protocol(
    tensorflow_serving_rest.describe, tensorflow_serving_rest.encode, tensorflow_serving_rest.target
)
_FLEET: Final = Protocol(server_fleet.describe, open_inference.encode, server_fleet.target)

PROTOCOLS: Final[dict[str, Protocol]] = {
    "": _OPEN_INFERENCE,
    "http": _OPEN_INFERENCE_REST,
    "https": _OPEN_INFERENCE_REST,
    "tfs": _TENSORFLOW_SERVING,
    "tfs+http": _TENSORFLOW_SERVING_REST,
    "tfs+https": _TENSORFLOW_SERVING_REST,
    FLEET: _FLEET,
}
"""By what stands before `://` in an address; nothing in HOST:PORT."""


def protocol_of(address: str) -> Protocol:
    """Returns the protocol of an address that the options allow."""
    return PROTOCOLS[Address.parse(address).protocol]


async def describe(address: str, model: str, transport: Transport = PLAIN) -> ModelInfo:
    """Asks a server for its metadata and that of a model. Raises TargetError."""
    return await protocol_of(address).describe(address, model, transport)


class ServerTarget:
    """Servers in the protocol of their addresses. `deadline_s` bounds every inference."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    def connect(
        self, models: Sequence[ModelInfo], addresses: Sequence[str], references: References = NONE
    ) -> AbstractAsyncContextManager[Connection]:
        """Opens a connection to each of `addresses`, which take requests in turn."""
        return protocol_of(addresses[0]).target(self._deadline_s).connect(models, addresses, references)
