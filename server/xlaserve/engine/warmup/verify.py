"""Verification of programs at warm-up: whether each computes what its model means, before it serves.

Each program runs a few images, noise, patches and single colours, in full batches. Every output must have a row for
each of them. An image's answer is compared with that of a reference without XLA, which as a rule runs the image alone,
and with its own answer at another place of a batch among other images. Where they differ, the reference runs the very
same batches. That tells which of two it is: a program that computes something other than its model, or a model whose
rows depend on each other.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xlaserve.config import Bucket, Mode
from xlaserve.engine.inputs import RGB_IMAGE, Inputs, Rows, selected
from xlaserve.engine.program import Compilation, Executable, Outputs, WrongRowsError, run_batch
from xlaserve.engine.warmup.difference import Comparing, Difference, by_row, compare, overall
from xlaserve.engine.warmup.sample import RowIndices, Sample, compared_rows, joined, other_batch, rows_of
from xlaserve.errors import ModelFailed

log = logging.getLogger(__name__)

EXACT: Final = 1e-3
"""How far off float32 is with sums in another order, as a share of the largest number; more gets a warning."""
GROSS: Final = 1e-2
"""More than that is refused. Between the two lie very deep networks: ResNet152 with random weights is at the first."""
NONSENSE: Final = 0.7
"""More than that of `overall` is refused where programs are narrow: no rounding makes it."""
AS_MADE: Final = 0.1
"""How much further or less far off a kept program may be than when it was made, as a share of the greater."""
SAMPLE_IMAGES: Final = 12
NARROW_SAMPLE_IMAGES: Final = 20
"""Images that are compared where programs are narrow: more, since the agreement is shown as well."""


_RANDOM: Final = (
    "perhaps augmentation or dropout is active in the file, which model.export(...) keeps so; model.save(...), and a"
    " function that calls the model with training=False, do not"
)


class Fault(NamedTuple):
    """A defect of a program."""

    text: str
    difference: float
    """The largest difference of its answers, as a share of the largest number, or of the pixels; infinite for a defect
    that is no difference."""
    is_gross: bool
    """Whether the difference is more than rounding could ever make."""
    is_of_rows: bool = False
    """Whether an output has not one row for each image: clients would get each other's answers, whatever is set."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Verified:
    """The findings about a program."""

    difference: Difference | None
    """The difference from the reference; None where there is none."""
    dependence: float = 0.0
    """The largest difference of an image's answer from its answer at another place of a batch among other images, as a
    share of the largest number."""
    not_finite: int = 0
    """Images that were answered with NaN or infinity."""
    fault: Fault | None = None
    is_dependent: bool = False
    """Whether the model's rows depend on each other."""
    fastest_s: float = field(default=math.inf, compare=False)
    """Seconds of the program's fastest run."""
    row_bytes: tuple[int, ...] = field(default=(), compare=False)
    """For each output, the bytes of one image's row; empty where it did not run."""


class _Timed:
    """Runs a program, and notes how long the fastest run took, and how large its outputs are."""

    def __init__(self, executable: Executable, clock: Callable[[], float]) -> None:
        self._executable = executable
        self._clock = clock
        self.fastest_s = math.inf
        self.row_bytes: tuple[int, ...] = ()

    def __call__(self, *rows: NDArray[Any]) -> Outputs:
        began = self._clock()
        outputs = run_batch(self._executable, *rows)
        self.fastest_s = min(self.fastest_s, self._clock() - began)
        self.row_bytes = tuple(output.nbytes // len(output) for output in outputs)
        return outputs


class Verifier:
    """Verifies one model's programs. Safe to use from several threads, which take turns.

    `reference` computes the right answers. Programs of the modes in `narrow` compute in less than float32: they may be
    off by the share of the largest number given there, and are refused only beyond NONSENSE. `buckets` are the sizes
    that the reference may be made for. `warn` is called with each warning for users.
    """

    def __init__(
        self,
        *,
        task: Comparing,
        reference: Executable | None,
        buckets: Iterable[Bucket],
        narrow: Mapping[Mode, float] = MappingProxyType({}),
        verification: Literal["refuse", "warn", "off"] = "refuse",
        batch_dependence: Literal["single", "refuse", "allow"] = "single",
        inputs: Inputs = RGB_IMAGE,
        warn: Callable[[str], object] = lambda warning: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._task = task
        self._narrow = narrow
        self._refuses = verification == "refuse"
        self._batch_dependence = batch_dependence
        self._warn = warn
        self._clock = clock
        images = NARROW_SAMPLE_IMAGES if narrow else SAMPLE_IMAGES
        self._sample = Sample(images, None if verification == "off" else reference, buckets, warn, inputs)
        self._lock = threading.Lock()
        self.is_dependent = False
        """Whether rows of any program depend on each other, where that matters."""

    def verify(
        self, mode: Mode, bucket: Bucket, compilation: Compilation, again: Callable[[], Compilation]
    ) -> tuple[Compilation, Verified]:
        """Returns the program to serve, and the findings about it; blocks while it runs.

        A wrong program from the compile cache is compiled with `again`, unless it may serve and was as far off when it
        was made: another would be no better. A program that is wrong with lowerings is made without them. Raises
        ModelFailed for a program that must not serve.
        """
        with self._lock:
            verified = self._verify(mode, bucket, compilation.executable)
            fault = verified.fault
            if fault and compilation.from_cache and not self._is_as_made(mode, fault, compilation):
                log.warning("compile cache: mode %s, bucket %s: %s; it is made again", mode, bucket, fault)
                compilation.forget()
                compilation = again()
                verified = self._verify(mode, bucket, compilation.executable)
            fault = verified.fault
            if fault and self._is_refused(mode, fault) and compilation.unlowered is not None:
                compilation = compilation.unlowered(ModelFailed(fault.text))
                verified = self._verify(mode, bucket, compilation.executable)
            for warning in compilation.warnings:
                self._warn(warning)
            self._judge(mode, bucket, verified)
            self._keep_difference(verified.fault, compilation)
        return compilation, verified

    def forget(self, height: int, width: int) -> None:
        """Drops the images of a resolution of which no more programs are made, and the reference's answers."""
        self._sample.forget(height, width)

    def _is_as_made(self, mode: Mode, fault: Fault, compilation: Compilation) -> bool:
        if self._is_refused(mode, fault) or not compilation.difference:
            return False
        return math.isclose(fault.difference, compilation.difference, rel_tol=AS_MADE)

    def _keep_difference(self, fault: Fault | None, compilation: Compilation) -> None:
        """Keeps the difference of a program that was made just now, and 0 for a right one that replaces a wrong one."""
        if compilation.from_cache:
            return
        difference = fault.difference if fault and math.isfinite(fault.difference) else 0.0
        if difference or compilation.difference:
            compilation.keep_difference(difference)

    def _is_refused(self, mode: Mode, fault: Fault) -> bool:
        if fault.is_of_rows:
            return True
        return self._refuses and fault.is_gross and mode.traits.uses_compiler

    def _judge(self, mode: Mode, bucket: Bucket, verified: Verified) -> None:
        where = f"mode {mode}, bucket {bucket}"
        if verified.fault:
            if self._is_refused(mode, verified.fault):
                way_out = "" if verified.fault.is_of_rows else " (verification: warn serves it all the same)"
                raise ModelFailed(f"{where}: {verified.fault}{way_out}")
            self._warn(f"{where}: {verified.fault}")
        if verified.not_finite:
            images = self._sample.size
            self._warn(f"{where}: NaN or infinity in the answers to {verified.not_finite} of {images} images")
        if not verified.is_dependent:
            return
        found = f"{where}: an image's answer depends on the others of its batch, by {verified.dependence:.2g}"
        if self._batch_dependence == "refuse":
            raise ModelFailed(f"{found} (batch_dependence: single serves it in batches of one)")
        if self._batch_dependence == "allow":
            self._warn(found)
        elif not self.is_dependent:
            self.is_dependent = True
            self._warn(f"{found}; it is served in batches of one")

    def _verify(self, mode: Mode, bucket: Bucket, executable: Executable) -> Verified:
        timed = _Timed(executable, self._clock)
        try:
            verified = self._compared(mode, bucket, timed)
        except WrongRowsError as error:
            verified = Verified(None, fault=self._fault_of_rows(error))
        return replace(verified, fastest_s=timed.fastest_s, row_bytes=timed.row_bytes)

    def _fault_of_rows(self, error: WrongRowsError) -> Fault:
        output = f"output {self._task.outputs[error.index].name}"
        return Fault(error.described(output), math.inf, is_gross=True, is_of_rows=True)

    def _compared(self, mode: Mode, bucket: Bucket, executable: Executable) -> Verified:
        sample, wanted = self._sampled(bucket)
        size, most = self._sample.size, self._narrow.get(mode, EXACT)
        batches = [(np.arange(bucket.batch) + start) % size for start in range(0, size, bucket.batch)]
        order = np.concatenate(batches)
        got = [executable(*selected(sample, batch)) for batch in batches]
        answers = joined(got)
        difference = None
        suspect = 0
        are_alike = True
        if wanted is not None:
            expected = rows_of(wanted, order)
            difference = self._difference(expected, answers, order)
            apart = self._apart(expected, answers, order)
            suspect = int(np.nanargmax(apart)) // bucket.batch
            are_alike = self._are_alike(apart, most)
        rows = batches[suspect]
        probes = [(rows, got[suspect])]
        dependence = 0.0
        if bucket.batch > 1 and self._batch_dependence != "allow":
            places = other_batch(rows, size)
            probes.append((rows[places], executable(*selected(sample, rows[places]))))
            apart = self._apart(rows_of(got[suspect], places), probes[1][1], rows[places])
            dependence = _largest(apart)
            are_alike &= self._are_alike(apart, most)
        not_finite = _not_finite(answers, order)
        if are_alike:
            return Verified(difference, dependence, not_finite)
        fault = self._fault(mode, bucket, executable, probes)
        if fault is None and difference is not None:
            dependence = max(dependence, difference.largest)
        return Verified(difference, dependence, not_finite, fault, is_dependent=fault is None)

    def _fault(
        self, mode: Mode, bucket: Bucket, executable: Executable, probes: list[tuple[RowIndices, Outputs]]
    ) -> Fault | None:
        """Returns the defect of a program whose answers to an image differ; None where the model itself answers so.

        `probes` are the rows of batches, as places in the sample, and the answers to them.
        """
        sample, alone = self._sampled(bucket)
        most = self._narrow.get(mode, EXACT)
        rows, got = probes[0]
        again = executable(*selected(sample, rows))
        if not self._are_alike(self._apart(got, again, rows), most):
            is_gross = self._is_gross(mode, got, again, rows)
            return Fault(f"it answers the same batch differently each time: {_RANDOM}", math.inf, is_gross)
        if not self._sample.has_reference:
            return None
        answers = [self._sample.answers(selected(sample, rows)) for rows, _ in probes]
        for wanted, (images, got) in zip(answers, probes, strict=True):
            apart = self._apart(wanted, got, images)
            if not self._are_alike(apart, most):
                # A program that divides its batches does not answer as a dependent model does; it is right for others.
                if len(probes) > 1 and self._is_dependent(bucket, rows, answers, alone, most):
                    return None
                found = self._difference(wanted, got, images)
                text = f"it computes something other than its model: {found}, and at most {most:g} is rounding"
                return Fault(text, _largest(apart), self._is_gross(mode, wanted, got, images))
        return None

    def _is_gross(self, mode: Mode, wanted: Outputs, got: Outputs, images: RowIndices) -> bool:
        """Returns whether the answers to `images` are further off than rounding could make them in a mode."""
        if mode not in self._narrow:
            return not self._are_alike(self._apart(wanted, got, images), GROSS)
        # Of objects whose scores almost tie, or are near the threshold, rounding may choose others.
        rows = compared_rows(images)
        if self._task.least_alike < 1 or not len(rows):
            return False
        comparable = self._task.comparable
        return overall(rows_of(comparable(wanted), rows), rows_of(comparable(got), rows)) > NONSENSE

    def _is_dependent(
        self, bucket: Bucket, rows: RowIndices, answers: list[Outputs], alone: Outputs | None, most: float
    ) -> bool:
        """Returns whether the model's rows depend on each other, by the reference's `answers` to a batch and to its
        images among others."""
        batch, moved = answers
        places = other_batch(rows, self._sample.size)
        apart = [self._apart(rows_of(batch, places), moved, rows[places])]
        if alone is not None:
            apart.append(self._apart(rows_of(alone, rows), batch, rows))
        return not all(self._are_alike(each, max(GROSS, most)) for each in apart)

    def _sampled(self, bucket: Bucket) -> tuple[Rows, Outputs | None]:
        """Returns the images of a resolution and the reference's answers. Raises ModelFailed for answers of other rows,
        which are the model's own fault, whatever its programs do."""
        try:
            return self._sample.at(bucket.height, bucket.width)
        except WrongRowsError as error:
            raise ModelFailed(self._fault_of_rows(error).text) from error

    def _difference(self, wanted: Outputs, got: Outputs, images: RowIndices) -> Difference:
        """Returns the difference of the answers to `images` that are compared."""
        rows = compared_rows(images)
        return compare(rows_of(wanted, rows), rows_of(got, rows), self._task)

    def _apart(self, wanted: Outputs, got: Outputs, images: RowIndices) -> NDArray[np.float64]:
        """Returns the difference of the answer to each of `images`; NaN for images that are not compared."""
        apart = np.full(len(images), np.nan)
        if len(rows := compared_rows(images)):
            comparable = self._task.comparable
            apart[rows] = by_row(rows_of(comparable(wanted), rows), rows_of(comparable(got), rows), self._task.rounding)
        return apart

    def _are_alike(self, apart: NDArray[np.float64], most: float) -> bool:
        known = apart[~np.isnan(apart)]
        return not len(known) or bool(np.mean(known <= most) >= self._task.least_alike)


def _largest(apart: NDArray[np.float64]) -> float:
    return float(np.max(apart, initial=0.0, where=~np.isnan(apart)))


def _not_finite(answers: Outputs, order: RowIndices) -> int:
    """Returns how many of the images, which stand in this `order`, were answered with NaN or infinity."""
    finite = [np.isfinite(output).reshape(len(order), -1).all(axis=1) for output in answers]
    return len(set(order[~np.logical_and.reduce(finite)]))
