"""The device that models run on: which one, how many lanes, how many threads."""

from __future__ import annotations

import logging
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from xlaserve.config import PerformanceHint, Settings
from xlaserve.engine import control_groups
from xlaserve.errors import ConfigError
from xlaserve.programs.tf import flags

log = logging.getLogger(__name__)

CLUSTER_FLAG = "--tf_xla_cpu_global_jit"
VECTORS_FLAG = "--xla_cpu_prefer_vector_width"
PRODUCTS_FLAG = "--xla_cpu_experimental_ynn_fusion_type"
UNUSED = ("jax", "sklearn")
"""Packages that TensorFlow Lite and Keras import where installed, and no server uses; 70 and 60 MiB of memory."""
GPU_LANES = 2
"""One batch is copied to the GPU while another computes."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device that runs the models: a CPU, or one or several GPUs."""

    kind: Literal["cpu", "gpu"]
    name: str
    lanes: int
    """Lanes of all GPUs together."""
    threads_per_lane: int
    """TensorFlow's threads for one lane's operations on the CPU."""
    gpus: tuple[int, ...] = ()
    """The GPUs in use, as TensorFlow numbers those of the machine."""
    tf32: bool = False
    """Whether float32 is multiplied in TensorFloat-32."""

    @property
    def count(self) -> int:
        """Number of GPUs; 1 for a CPU."""
        return max(1, len(self.gpus))

    @property
    def replicas(self) -> tuple[str, ...]:
        """TensorFlow's names of the devices that have a replica of every model each; empty where one device has all."""
        return tuple(f"/GPU:{index}" for index in range(len(self.gpus))) if len(self.gpus) > 1 else ()

    def __str__(self) -> str:
        count = f"{len(self.gpus)} x " if len(self.gpus) > 1 else ""
        threads = "" if self.kind == "gpu" else f", threads per lane: {self.threads_per_lane}"
        return f"{self.kind} ({count}{self.name}), lanes: {self.lanes}{threads}"


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the machine that one of several engines uses."""

    cores: frozenset[int] = frozenset()
    """The cores that it runs on; empty for all."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings that replace the configured ones."""


def shares(settings: Settings, cores: Sequence[int], usable: int, gpus: int) -> list[Share]:
    """Divides a machine with these `cores`, of which as many as `usable` may be busy, and `gpus` among engines.

    Raises ConfigError.
    """
    which = settings.device.partition(":")[2]
    named = [*range(gpus)] if which == "all" else [*dict.fromkeys(map(int, which.split(",")))] if which else []
    count = max(1, len(named)) if settings.engines == "per_device" else settings.engines
    if count == 1:
        return [Share()]
    if named:  # as many for each, or several engines on each
        of_each = (named[index::count] or [named[index % len(named)]] for index in range(count))
        return [Share(settings={"device": f"gpu:{','.join(map(str, each))}"}) for each in of_each]
    if settings.device.startswith("gpu"):
        return [Share() for _ in range(count)]
    if count > usable:
        raise ConfigError(f"engines: expected at most {usable}, one for each core, got {count}")
    if usable < len(cores):  # a quota: any of the cores may be used, for some of the time
        own = choose(settings.model_copy(update={"device": "cpu"}), usable // count, ())
        return [Share(settings={"lanes": own.lanes, "threads_per_lane": own.threads_per_lane}) for _ in range(count)]
    ends = [len(cores) * index // count for index in range(count + 1)]
    return [Share(frozenset(cores[first:end])) for first, end in pairwise(ends)]


def unlike(shares: Sequence[Share]) -> list[Share]:
    """Returns one share of each kind: programs for one serve all shares with as many cores, or with such a GPU."""
    return [*{(len(share.cores), share.settings.get("lanes")): share for share in shares}.values()]


def choose(settings: Settings, cores: int, gpus: Sequence[str]) -> Device:
    """Returns the device that `settings` ask for on a machine with `cores` and perhaps `gpus`, given by their names.

    Raises ConfigError where they ask for a GPU that is not there.
    """
    is_latency = settings.performance_hint is PerformanceHint.LATENCY
    if chosen := _chosen_gpus(settings.device, len(gpus)):
        lanes = (settings.lanes or (1 if is_latency else GPU_LANES)) * len(chosen)
        threads = settings.threads_per_lane or max(1, cores // lanes)
        return Device("gpu", gpus[chosen[0]], lanes, threads, chosen, settings.tf32)
    lanes = settings.lanes or (1 if is_latency else cores)
    return Device("cpu", cpu_name(), lanes, settings.threads_per_lane or max(1, cores // lanes))


def _chosen_gpus(wanted: str, count: int) -> tuple[int, ...]:
    if wanted == "cpu" or (wanted == "auto" and not count):
        return ()
    if not count:
        raise ConfigError("device: expected a GPU that TensorFlow can use, found none; set device: auto or cpu")
    which = wanted.partition(":")[2] or "0"
    chosen = tuple(range(count)) if which == "all" else tuple(dict.fromkeys(map(int, which.split(","))))
    if max(chosen) >= count:
        raise ConfigError(f"device: expected GPUs from 0 to {count - 1}, which TensorFlow can use, got {wanted}")
    return chosen


def configure(settings: Settings, uses_tensorflow: bool) -> Device:
    """Looks for the hardware, chooses the device and sets TensorFlow up for it.

    Must come before TensorFlow is first used: its threads and devices are fixed then. Without `uses_tensorflow` it is
    not imported. Raises ConfigError.
    """
    if not uses_tensorflow:
        return choose(settings, usable_cores(), ())
    os.environ["KERAS_BACKEND"] = "tensorflow"
    check_temporary_folder()
    _set_flags()
    with _stderr_to_log(), _without_unused():
        try:
            import tensorflow as tf  # noqa: PLC0415 - a server without TensorFlow models never loads it
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"models: expected {error.name} to serve anything but builtin:noop, which is not installed;"
                " install xlaserve[cpu] or xlaserve[gpu]"
            ) from error
        gpus = [] if settings.device == "cpu" else tf.config.list_physical_devices("GPU")
    names = [str(tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")) for gpu in gpus]
    device = choose(settings, usable_cores(), names)
    visible = [gpus[index] for index in device.gpus]
    tf.config.set_visible_devices(visible, "GPU")
    for gpu in visible:
        if settings.gpu_memory_mib is None:
            tf.config.experimental.set_memory_growth(gpu, True)
        else:
            limit = tf.config.LogicalDeviceConfiguration(memory_limit=settings.gpu_memory_mib)
            tf.config.set_logical_device_configuration(gpu, [limit])
    if visible:
        tf.config.experimental.enable_tensor_float_32_execution(device.tf32)
    tf.config.threading.set_intra_op_parallelism_threads(_pool_threads(device))
    tf.config.threading.set_inter_op_parallelism_threads(device.lanes)
    return device


@contextmanager
def _without_unused() -> Iterator[None]:
    """Hides the packages of UNUSED, as if they were not installed, but for those that are imported already."""
    hidden = [name for name in UNUSED if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def check_temporary_folder() -> None:
    """Raises ConfigError where there is none: TensorFlow can't even be imported then."""
    try:
        tempfile.gettempdir()
    except OSError:
        raise ConfigError(
            "TMPDIR: expected a folder for temporary files that can be written, or /tmp, for TensorFlow, got none"
        ) from None


def _set_flags() -> None:
    """Sets the flags of TensorFlow and XLA for a CPU, where the environment does not set them.

    Only graphs that ask for it form clusters. Programs use vectors as wide as the processor has, and YNN
    for matrix products, which is faster than Eigen, XLA's default (docs/lowering.md). Raises ConfigError where the
    environment would have all graphs form clusters.
    """
    if "tf_xla_auto_jit" in os.environ.get(flags.TF_XLA, ""):
        raise ConfigError(
            "TF_XLA_FLAGS: expected no --tf_xla_auto_jit, which turns graph mode into autocluster; that is a mode of"
            " a model"
        )
    flags.add(flags.TF_XLA, CLUSTER_FLAG, unless=CLUSTER_FLAG)
    flags.add(flags.XLA, f"{VECTORS_FLAG}=512", unless=VECTORS_FLAG)
    flags.add(flags.XLA, f"{PRODUCTS_FLAG}=LIBRARY_FUSION_TYPE_DOT", unless=PRODUCTS_FLAG)


def _pool_threads(device: Device) -> int:
    """Returns how many threads the pool has that all lanes share.

    With one in it, graph mode and XLA both run a batch on the lane's own thread, from end to end, which beats splitting
    each operation. Only where more than eight parts of an XLA program could run side by side does it go on in the pool.
    """
    return 1 if device.threads_per_lane == 1 else device.threads_per_lane * device.lanes


@contextmanager
def _stderr_to_log() -> Iterator[None]:
    """Logs the output of TensorFlow's libraries while they are loaded, which no setting silences, as debug lines.

    Must surround everything up to the first look for devices. Lines come out as they are when that raises.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        except BaseException:
            captured.seek(0)
            os.write(stderr, captured.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        captured.seek(0)
        for line in captured.read().decode(errors="replace").splitlines():
            log.debug("tensorflow: %s", line)


def cores() -> int:
    """Returns how many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores(root: Path = control_groups.ROOT) -> int:
    """Returns how many cores this process may use: its affinity, and the quotas of its control groups."""
    return max(1, int(min(cores(), control_groups.processors(root))))


def cpu_name(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's name as Linux gives it, or what kind of machine it is."""
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
