"""Traces of TensorFlow's profiler: recorded for TensorBoard, and read for the time that each instruction took."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import tensorflow as tf

from xlaserve.errors import ProfilerBusy

_TASK_BEGINS: Final = "ThreadpoolListener::StartRegion"


def start(folder: Path) -> None:
    """Begins to record what happens, under `folder`, as TensorBoard reads it. Raises ProfilerBusy: one at a time."""
    try:
        tf.profiler.experimental.start(str(folder))
    except tf.errors.AlreadyExistsError:
        raise ProfilerBusy("the profiler is already recording; try again later") from None


def stop() -> None:
    """Ends the recording and writes it."""
    tf.profiler.experimental.stop()


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Records what happens meanwhile; see `start`."""
    start(folder)
    try:
        yield
    finally:
        stop()


def instruction_s(folder: Path) -> dict[str, float]:
    """Returns for each XLA instruction, by its name, the seconds that all its runs in a recording took together.

    On a CPU, an instruction that goes on after its call returns ends with an event of its own. The thread that finishes
    it may first begin the instructions after it: it ends where they begin.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2  # noqa: PLC0415 - only reading needs it

    seconds: defaultdict[str, float] = defaultdict(float)
    for file in folder.glob("plugins/profile/*/*.xplane.pb"):
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
        for plane in space.planes:
            for name, duration_s in _instructions(plane):
                seconds[name] += duration_s
    return dict(seconds)


class _Thread(NamedTuple):
    """When a thread began the instructions that it called, and the tasks that instructions gave to its pool."""

    instructions_s: list[float]
    tasks_s: list[float]

    def finished_s(self, begin_s: float, end_s: float) -> float:
        """Returns when the thread finished an instruction that began at `begin_s` and whose last task ended at `end_s`.

        In that task it began, once the instruction was finished, those that waited for it.
        """
        task = bisect_right(self.tasks_s, end_s) - 1
        since_s = max(begin_s, self.tasks_s[task]) if task >= 0 else begin_s
        following = bisect_right(self.instructions_s, since_s)
        return min([end_s, *self.instructions_s[following : following + 1]])


def _instructions(plane: Any) -> Iterator[tuple[str, float]]:
    names = {key: stat.name for key, stat in plane.stat_metadata.items()}
    begun: dict[int, tuple[str, float]] = {}
    ended: dict[int, tuple[float, _Thread]] = {}
    for line in plane.lines:
        thread = _Thread([], [])
        for event in line.events:
            begin_s = line.timestamp_ns / 1e9 + event.offset_ps / 1e12
            end_s = begin_s + event.duration_ps / 1e12
            stats = {names[stat.metadata_id]: stat for stat in event.stats}
            kind = plane.event_metadata[event.metadata_id].name
            if "hlo_op" in stats:
                name = _text(plane, stats["hlo_op"])
                thread.instructions_s.append(begin_s)
                if "_p" in stats:
                    begun[_number(stats["_p"])] = (name, begin_s)
                else:
                    yield name, end_s - begin_s
            elif kind == _TASK_BEGINS:
                thread.tasks_s.append(begin_s)
            elif "_c" in stats and kind.startswith("end: "):
                ended[_number(stats["_c"])] = end_s, thread
        thread.instructions_s.sort()
        thread.tasks_s.sort()
    for flow, (name, begin_s) in begun.items():
        if flow in ended:
            end_s, thread = ended[flow]
            yield name, thread.finished_s(begin_s, end_s) - begin_s


def _text(plane: Any, stat: Any) -> str:
    return str(stat.str_value or plane.stat_metadata[stat.ref_value].name)


def _number(stat: Any) -> int:
    return int(stat.uint64_value or stat.int64_value)
