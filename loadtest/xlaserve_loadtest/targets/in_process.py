"""The ceiling: compiled functions that are called without a server, in the worker's own process.

The only module of the load tester that runs the server's code.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import Bucket, Mode, ModelSettings, Settings
from xlaserve.engine.inputs import Inputs, layout
from xlaserve.engine.program import Warmed, run_batch
from xlaserve.engine.warmup.compiler import fastest, measure, warm_up
from xlaserve.engine.warmup.ledger import Entry, Ledger
from xlaserve.models import catalog
from xlaserve.programs.tf.device import configure
from xlaserve.telemetry.logs import quiet_tensorflow
from xlaserve_loadtest.record.lines import LedgerEntry
from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.schedule.tensors import ANY, DTYPES, Tensor
from xlaserve_loadtest.targets.answers import numbers_fault
from xlaserve_loadtest.targets.references import NONE, References
from xlaserve_loadtest.targets.target import Array, ModelInfo, Reply, TargetError, widened
from xlaserve_proto import open_inference_pb2 as oip

_NAN = float("nan")
_DATATYPES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Described:
    """The loaded models and their ledger."""

    models: dict[str, ModelInfo]
    ledger: tuple[LedgerEntry, ...]
    ready_s: float


class InProcessTarget:
    """Compiles the models of a configuration (JSON), then runs requests of pixels and tensors on the device's lanes."""

    def __init__(self, config: str) -> None:
        began_s = time.monotonic()
        settings = Settings.model_validate(json.loads(config))
        quiet_tensorflow()
        device = configure(settings, uses_tensorflow=any(map(catalog.uses_tensorflow, settings.models)))
        entries: list[Entry] = []
        self._lanes = ThreadPoolExecutor(device.lanes, thread_name_prefix="lane")
        self._warmed: dict[str, dict[tuple[Mode, Bucket], Warmed]] = {}
        self._inputs: dict[str, Inputs] = {}
        models = {}
        for model_settings in settings.models:
            model, self._warmed[model_settings.name] = warm(model_settings, device.lanes, entries.append)
            models[model_settings.name] = _describe(model_settings, model)
            self._inputs[model_settings.name] = model.inputs
        self.described = Described(
            models,
            tuple(
                LedgerEntry(
                    mode=str(entry.mode),
                    bucket=(entry.bucket.batch, entry.bucket.height, entry.bucket.width),
                    trace_s=entry.trace_s,
                    compile_s=entry.compile_s,
                    run_s=entry.cost.alone_s,
                    run_loaded_s=entry.cost.loaded_s,
                    at=entry.at.isoformat(),
                    model=entry.model,
                )
                for entry in entries
            ),
            time.monotonic() - began_s,
        )

    @asynccontextmanager
    async def connect(
        self, models: Sequence[ModelInfo], addresses: Sequence[str], references: References = NONE
    ) -> AsyncIterator[_InProcess]:
        """There is nothing to connect to."""
        runnable = [(self._inputs[model.name], self._warmed[model.name]) for model in models]
        yield _InProcess(models, runnable, self._lanes, references)


def warm(
    settings: ModelSettings, lanes: int, on_record: Callable[[Entry], None] = lambda entry: None
) -> tuple[catalog.Model, dict[tuple[Mode, Bucket], Warmed]]:
    """Loads a model, and compiles and times its programs as the server does."""

    def leave_out(mode: Mode, error: Exception) -> None:
        if settings.needs(mode):
            raise error

    model = catalog.load(settings)
    warmed = warm_up(
        program=model.program,
        modes=settings.compiled_modes,
        buckets=model.buckets,
        timer=partial(measure, lanes=lanes, inputs=model.inputs),
        ledger=Ledger(settings.name, settings.version, on_record),
        stop=threading.Event(),
        leave_out=leave_out,
    )
    if Mode.AUTO in settings.modes:
        warmed |= {(Mode.AUTO, bucket): warmed[mode, bucket] for bucket, mode in fastest(warmed).items()}
    return model, warmed


def _describe(settings: ModelSettings, model: catalog.Model) -> ModelInfo:
    sizes = {(bucket.height, bucket.width) for bucket in model.buckets}
    size = next(iter(sizes)) if len(sizes) == 1 else None
    return ModelInfo(
        name=settings.name,
        size=size,
        outputs=tuple(Tensor(out.name, out.datatype, tuple(out.shape)) for out in model.task.outputs),
        properties={
            "source": settings.source,
            "weights": model.weights,
            "modes": ",".join(settings.modes),
            "buckets": ",".join(map(str, model.buckets)),
        },
        server="in-process",
        inputs=(Tensor("pixels", "UINT8", (ANY, ANY, ANY, model.image.channels)),)
        if model.is_of_one_image
        else tuple(
            Tensor(one.name, _DATATYPES[np.dtype(one.dtype)], (ANY, *one.row_shape(*(size or (ANY, ANY)))))
            for one in model.inputs
        ),
    )


class _InProcess:
    """Runs one request as one batch, padded to the smallest bucket that holds it."""

    def __init__(
        self,
        models: Sequence[ModelInfo],
        runnable: Sequence[tuple[Inputs, dict[tuple[Mode, Bucket], Warmed]]],
        lanes: ThreadPoolExecutor,
        references: References,
    ) -> None:
        self._models = models
        self._runnable = runnable
        self._lanes = lanes
        self._references = references

    async def send(self, request: Request) -> Reply:
        try:
            gather_s, execute_s, outputs = await self._run(request)
        except TargetError as error:
            return Reply(Status.INVALID_ARGUMENT, detail=str(error))
        except Exception as error:
            return Reply(Status.INTERNAL, detail=f"{type(error).__name__}: {error}")
        if fault := self._numbers_fault(request, outputs):
            return Reply(Status.INVALID_REPLY, detail=fault)
        if difference := self._references.fault(request, lambda: _widened(outputs, request.images)):
            return Reply(Status.DIFFERING_REPLY, detail=difference)
        return Reply(Status.OK, (_NAN, _NAN, gather_s, execute_s, _NAN, gather_s + execute_s))

    async def outputs(self, request: Request) -> list[Array]:
        _, _, outputs = await self._run(request)
        return _widened(outputs, request.images)

    def _numbers_fault(self, request: Request, outputs: Sequence[NDArray[Any]]) -> str:
        named = zip(self._models[request.model].outputs, outputs, strict=True)
        return next(filter(None, (numbers_fault(own.name, values[: request.images]) for own, values in named)), "")

    async def _run(self, request: Request) -> tuple[float, float, Any]:
        return await asyncio.get_running_loop().run_in_executor(self._lanes, self._run_here, request)

    def _run_here(self, request: Request) -> tuple[float, float, Any]:
        began_s = time.perf_counter()
        inputs, warmed = self._runnable[request.model]
        rows = _rows(request, [one.name for one in self._models[request.model].inputs])
        bucket = _bucket(request, rows, inputs, warmed)
        if padding := bucket.batch - request.images:
            rows = [np.concatenate([one, np.repeat(one[:1], padding, axis=0)]) for one in rows]
        gathered_s = time.perf_counter()
        outputs = run_batch(warmed[Mode(request.mode), bucket].executable, *rows)
        return gathered_s - began_s, time.perf_counter() - gathered_s, outputs


def _bucket(
    request: Request, rows: Sequence[NDArray[Any]], inputs: Inputs, warmed: Collection[tuple[Mode, Bucket]]
) -> Bucket:
    """Returns the smallest bucket that holds `rows`, an array for each of the inputs. Raises TargetError."""
    mode = Mode(request.mode)
    given = tuple((one.dtype, one.shape[1:]) for one in rows)
    fitting = [
        bucket
        for offered, bucket in warmed
        if offered is mode and bucket.batch >= request.images and layout(inputs, bucket.height, bucket.width) == given
    ]
    if not fitting:
        shapes = " and ".join("x".join(map(str, one.shape[1:])) or "one number" for one in rows)
        raise TargetError(f"no bucket of mode {mode} holds {request.images} rows of {shapes}")
    return min(fitting)


def _widened(outputs: Sequence[NDArray[Any]], images: int) -> list[Array]:
    return [widened(output[:images]) for output in outputs]


def _rows(request: Request, names: Sequence[str]) -> list[NDArray[Any]]:
    """Returns the arrays of a request in the order of the model's inputs. Raises TargetError."""
    message = oip.ModelInferRequest.FromString(request.data)
    given = {
        tensor.name: np.frombuffer(raw, DTYPES[tensor.datatype]).reshape(tuple(tensor.shape))
        for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True)
        if tensor.datatype in DTYPES
    }
    if given.keys() != set(names):
        raise TargetError("without a server only pixels and tensors can be run: --payload pixels")
    return [given[name] for name in names]
