"""Decoding of a request's images into the arrays in which they run, row by row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlaserve.admission.image_memory import ImageMemory
from xlaserve.engine.buckets.demand import Resolution
from xlaserve.engine.inputs import Images, Rows
from xlaserve.errors import RequestError
from xlaserve.images.decoder import Encoded, ImageLimits
from xlaserve.images.frame import Frame, whole
from xlaserve.images.image_file import Place
from xlaserve.images.image_input import ImageInput
from xlaserve.models.encoded_images import decode_for
from xlaserve.models.version import Served
from xlaserve.pipeline.request_inputs import size_of


class RowDecoder:
    """Writes rows of what a request has `given` for the inputs of a model into `buffers`, which are by resolution.

    Several threads may call `decode`, each for other rows.
    """

    def __init__(
        self,
        served: Served,
        given: Sequence[NDArray[Any] | Sequence[Encoded]],
        buffers: Mapping[Resolution, Rows],
        limits: ImageLimits,
        memory: ImageMemory,
    ) -> None:
        self._served = served
        self._first, *self._others = given
        model = served.model
        self._names = [""] if len(model.inputs) == 1 else model.names
        """The inputs' names for messages, empty for an only one."""
        self._buffers = buffers
        self._limits = limits
        self._memory = memory
        self.place: Place = served.place
        """Places the images of the first input, and so chooses the resolution of a row."""
        self.warned: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        """Names of inputs and warnings for the client, and the rows that each is about."""

    def decode(self, row: int) -> Frame:
        """Writes a row, and returns the frame of the image of the first input. Raises RequestError."""
        first, model = self._first, self._served.model
        if isinstance(first, np.ndarray):
            values, frame = first[row], whole(*size_of(model, first))
        else:
            values, frame = self._decoded(first, row, self.place, model.image, self._names[0])
        to_first, *to_others = self._buffers[frame.input_height, frame.input_width]
        to_first[row] = values
        for to, one, image, name in zip(to_others, self._others, model.others, self._names[1:], strict=True):
            if isinstance(one, np.ndarray):
                to[row] = one[row]
            else:
                into = partial(self._served.place_into, to.shape[1:3])
                to[row], _ = self._decoded(one, row, into, image, name)
        return frame

    def _decoded(
        self, encoded: Sequence[Encoded], row: int, place: Place, image: ImageInput | None, name: str
    ) -> tuple[Images, Frame]:
        assert image is not None  # see `check_colors`
        try:
            pixels, frame, warning = decode_for(
                self._served.model, encoded[row], place, self._limits, self._memory.hold, image=image
            )
        except RequestError as error:
            if len(encoded) > 1:
                error.name_image(f"{name or 'images'}[{row}]")
            elif name:
                error.name_image(name)
            raise
        if warning:
            self.warned[name, warning].append(row)
        return pixels, frame
