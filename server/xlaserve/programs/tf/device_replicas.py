"""Several devices behind one queue: a replica of a model on each, and whose turn it is.

The queue, the planner and the lanes see one device. There are as many lanes as all devices have together, and a
batch that has a lane runs on the device that runs the fewest: of D devices with L lanes each at most D * L - 1 others
are busy, so one device runs fewer than L batches.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf
from numpy.typing import NDArray

from xlaserve.config import Bucket, Mode
from xlaserve.engine.program import AnySize, Compilation, Executable, Outputs, Program, Sealed


class Replicas:
    """Grants devices, given by TensorFlow's names for them. Safe to use from several threads."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.devices = tuple(devices)
        self._running = [0] * len(self.devices)
        self._lock = threading.Lock()

    @contextmanager
    def take(self) -> Iterator[int]:
        """Takes the device that runs the fewest batches; yields its number."""
        with self._lock:
            index = min(range(len(self._running)), key=self._running.__getitem__)
            self._running[index] += 1
        try:
            with self.on(index):
                yield index
        finally:
            with self._lock:
                self._running[index] -= 1

    def on(self, index: int) -> AbstractContextManager[object]:
        """Has TensorFlow place the operations and variables of this thread on one of the devices meanwhile."""
        device: AbstractContextManager[object] = tf.device(self.devices[index])
        return device


class ReplicatedProgram:
    """A `Program` of `programs` that compute the same, each with its variables on its own one of the devices."""

    def __init__(self, programs: Sequence[Program], replicas: Replicas) -> None:
        self.platform = programs[0].platform
        self._programs = tuple(programs)
        self._replicas = replicas

    def compile(self, mode: Mode, bucket: Bucket) -> Compilation:
        """Compiles for one device after the other; the seconds are those of all."""
        compilations = []
        for index, program in enumerate(self._programs):
            with self._replicas.on(index):
                compilations.append(program.compile(mode, bucket))
        return replace(
            compilations[0],
            executable=_Executable([compilation.executable for compilation in compilations], self._replicas),
            trace_s=sum(compilation.trace_s for compilation in compilations),
            compile_s=sum(compilation.compile_s for compilation in compilations),
        )

    def seal(self) -> None:
        """Seals each program."""
        for program in self._programs:
            if isinstance(program, Sealed):
                program.seal()

    def any_size(self) -> Executable:
        """Makes an executable for any number of images of any size, on any device; its programs must be `AnySize`."""
        executables = []
        for index, program in enumerate(self._programs):
            assert isinstance(program, AnySize)
            with self._replicas.on(index):
                executables.append(program.any_size())
        return _Executable(executables, self._replicas)


@dataclass(frozen=True, slots=True)
class _Executable:
    executables: Sequence[Executable]
    replicas: Replicas

    def __call__(self, *rows: NDArray[Any]) -> Outputs:
        with self.replicas.take() as index:
            return self.executables[index](*rows)
