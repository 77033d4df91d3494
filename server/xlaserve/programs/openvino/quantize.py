"""Graphs in int8, by NNCF: after training, with ranges that it finds on images. Only `xlaserve calibrate` needs it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from typing import Any, Final

from xlaserve.engine.causes import cause
from xlaserve.engine.inputs import Images
from xlaserve.errors import ModelFailed
from xlaserve.programs.openvino import openvino_program
from xlaserve.programs.openvino.openvino_program import ConvertedGraph

NOT_INSTALLED: Final = "calibrating needs nncf; install xlaserve[calibrate]"


def quantize(graph: ConvertedGraph, batches: Iterable[Images], count: int) -> ConvertedGraph:
    """Returns `graph` with its convolutions and matrix products in int8; blocks.

    The ranges are those on the `count` `batches`, which are gone through more than once. Raises ModelFailed where NNCF
    is not installed or can't do it, and any error of iterating `batches`.
    """
    nncf = _nncf()
    given = _Given(batches)
    with redirect_stdout(sys.stderr):  # a bar that shows its progress
        try:
            quantized = nncf.quantize(
                graph.model, nncf.Dataset(given), preset=nncf.QuantizationPreset.MIXED, subset_size=count
            )
        except Exception as error:  # its kinds of error are many
            if given.error is not None:
                raise given.error from None
            raise ModelFailed(f"NNCF can't make it int8: {cause(error)}") from error
    return ConvertedGraph(quantized, is_int8=True)


class _Given:
    """Batches, and the error that going through them ended with: it is the user's, not NNCF's."""

    def __init__(self, batches: Iterable[Images]) -> None:
        self._batches = batches
        self.error: Exception | None = None

    def __iter__(self) -> Any:
        try:
            yield from self._batches
        except Exception as error:
            self.error = error
            raise


def version() -> str:
    """Returns NNCF's version. Raises ModelFailed."""
    return str(_nncf().__version__)


def _nncf() -> Any:
    openvino_program.load()  # keeps NNCF too from importing the telemetry
    try:
        import nncf  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise ModelFailed(NOT_INSTALLED) from error
    nncf.set_log_level(logging.ERROR)
    return nncf
