"""The interface of a target."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from xlaserve_loadtest.record.requests import NO_STAGES, Status, in_words
from xlaserve_loadtest.schedule.payload import Layout, Request
from xlaserve_loadtest.schedule.tensors import Tensor
from xlaserve_loadtest.targets.channel import PLAIN, Transport

if TYPE_CHECKING:
    from xlaserve_loadtest.targets.references import References  # which compares Arrays

Array = NDArray[np.float64 | np.int64]
"""Integers are names, such as a map's classes or fingerprints of strings: they are compared for equality only."""


class TargetError(Exception):
    """The target can't be measured; the message says why."""


class RequestError(TargetError):
    """A request was not answered as it should be."""

    def __init__(self, status: Status, detail: str) -> None:
        super().__init__(status, detail)
        self.status = status

    def __str__(self) -> str:
        return f"{in_words(self.status.name)}: {self.args[1]}"


@dataclass(frozen=True)
class ModelInfo:
    """The target's description of the model under test."""

    name: str
    size: tuple[int, int] | None
    """Height and width; None when the model takes several."""
    outputs: tuple[Tensor, ...]
    properties: dict[str, str]
    server: str
    """Name and version of the server."""
    inputs: tuple[Tensor, ...] = ()
    optional: tuple[str, ...] = ()
    """Names of the inputs that may be left out."""
    transport: Transport = PLAIN
    own_name: str = ""
    """The server's name for the model, where `name` is another one."""
    extensions: tuple[str, ...] = ()
    """Extensions of the Open Inference Protocol that the server names, where its protocol depends on them."""

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that the server names; empty where it names none, as those of others."""
        return tuple(filter(None, self.properties.get("modes", "").split(",")))

    @property
    def takes_images(self) -> bool:
        """Whether it has the inputs of xlaserve's models: `pixels`, or `image` for files."""
        known = {(own.name, own.datatype, len(own.shape)) for own in self.inputs}
        return self.layout is not None or bool(known & {("image", "BYTES", 1), ("image", "BYTES", 2)})

    @property
    def layout(self) -> Layout | None:
        """The layout of `pixels` that are images; None for an input of another kind, or without such an input."""
        pixels = (own for own in self.inputs if (own.name, own.datatype) == ("pixels", "UINT8"))
        return next((Layout.of(own.shape) for own in pixels), None)


class Reply(NamedTuple):
    """How one request ended."""

    status: Status
    stages: tuple[float, ...] = NO_STAGES
    """Seconds by stage, in the order of `record.STAGES`."""
    detail: str = ""
    """Why it failed."""
    target: int = 0
    """Index of the address that it went to."""
    arrived_ns: int = 0
    """When the answer had arrived, by `time.monotonic_ns`: to check it takes the generator's time, not the target's.
    0: just now."""


class Connection(Protocol):
    """A way to send requests, several at the same time."""

    async def send(self, request: Request) -> Reply:
        """Sends one request and waits for its end. Failures of the target are replies, not exceptions."""

    async def outputs(self, request: Request) -> list[Array]:
        """Sends one request and returns the model's outputs, the images first. Raises RequestError."""


class Target(Protocol):
    """Something to measure."""

    def connect(
        self, models: Sequence[ModelInfo], addresses: Sequence[str], references: References
    ) -> AbstractAsyncContextManager[Connection]:
        """Opens a fresh connection for requests to `models`.

        Replies are checked against the descriptions of these, and in a sample against `references`.
        """


def widened(output: NDArray[Any]) -> Array:
    """Returns an output in the type that it is compared in."""
    return output.astype(np.float64 if output.dtype.kind == "f" else np.int64)
