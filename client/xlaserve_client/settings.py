"""The arguments of a client, checked, which the synchronous and the asyncio client share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import grpc
from numpy.typing import ArrayLike

from xlaserve_client import calls, examples
from xlaserve_client.call import Call
from xlaserve_client.connection import (
    DEFAULT_DEADLINE_S,
    DEFAULT_TARGET,
    Metadata,
    call_metadata,
    checked_deadline,
    checked_hedge,
    checked_priority,
)
from xlaserve_client.errors import DeadlineExceeded, InvalidRequest, ModelNotFound
from xlaserve_client.images import Images
from xlaserve_client.inputs import Inputs, ModelInputs
from xlaserve_client.name_service import NameService, is_fleet
from xlaserve_client.retries import Attempts, Retries


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The settings of a client."""

    target: str
    service: NameService | None
    """The name service of a fleet; None for the target of a server."""
    deadline_s: float
    """Default of the seconds for a call, retries included."""
    retries: Retries
    hedge_after_s: float | None
    priority: int
    """Priority of inference, 1 (the highest) to 3; 0 where the server chooses."""
    credentials: grpc.ChannelCredentials | None
    metadata: Metadata
    """Metadata of each call, the token included."""

    def not_ready(self, timeout_s: float) -> DeadlineExceeded:
        """Returns the error for a server that was not ready within `timeout_s`."""
        return DeadlineExceeded(self.target, grpc.StatusCode.DEADLINE_EXCEEDED, f"not ready after {timeout_s:g} s")

    def attempts(self, call: Call[Any], deadline_s: float | None) -> Attempts:
        """Sets the priority of a call, and begins its attempts. Raises ValueError for a wrong `deadline_s`."""
        attempts = Attempts(self.retries, call, self.deadline_s if deadline_s is None else checked_deadline(deadline_s))
        if self.priority:
            calls.set_priority(call.request, self.priority)
        return attempts


class BaseClient:
    """A client, as far as no call waits: `VisionClient` documents its arguments. Raises ValueError for wrong ones."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        retry_overload: bool = False,
        hedge_after_s: float | None = None,
        priority: int = 0,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._settings = ClientSettings(
            target=target,
            service=NameService.parse(target) if is_fleet(target) else None,
            deadline_s=checked_deadline(deadline_s),
            retries=Retries(overload=retry_overload, unavailable=is_fleet(target)),
            hedge_after_s=checked_hedge(hedge_after_s, is_fleet=is_fleet(target)),
            priority=checked_priority(priority),
            credentials=credentials,
            metadata=call_metadata(token, metadata),
        )
        self._inputs: dict[str, ModelInputs] = {}
        """The inputs of models, as their metadata have declared them."""
        self._begin()

    @staticmethod
    def save_examples(
        folder: str | PathLike[str],
        images: Sequence[str | PathLike[str] | bytes],
        outputs: ArrayLike | Mapping[str, ArrayLike],
    ) -> Path:
        """Writes the folder for the setting `examples` of a model, in the notebook that made it; asks no server.

        `images` are paths, or the bytes of JPEG, PNG or WebP files. `outputs` are what the notebook's model gave for
        them: the rows of its only output, `[n, ...]`, or of each output by its name. Returns the path of the file of
        the outputs. Raises ValueError, TypeError and OSError.

            VisionClient.save_examples("photos", paths, model.predict(batch))
        """
        return examples.save(folder, images, outputs)

    def _begin(self) -> None:
        """Begins what need not wait for the first call."""

    @staticmethod
    def _check_given(images: Images | None, inputs: Inputs | None) -> None:
        """Raises TypeError unless one of both is given."""
        if (images is None) == (inputs is None):
            raise TypeError(
                'infer: expected images, or inputs by their names, as in infer(inputs={"left": ..., "right": ...}, ...)'
            )

    @contextmanager
    def _using_inputs(self, model: str) -> Iterator[None]:
        """Forgets a model's inputs when a request with them fails: the model may have been loaded with others."""
        try:
            yield
        except (InvalidRequest, ModelNotFound, TypeError, ValueError):
            self._inputs.pop(model, None)
            raise
