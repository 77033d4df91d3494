"""What is configured of the process: addresses, limits, device, caches; its models are in `config.model`."""

from __future__ import annotations

import ipaddress
import re
from enum import StrEnum
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from xlaserve.config.frozen import Frozen
from xlaserve.config.model import BUILTIN_MODELS, ModelSettings

MIB: Final = 1024 * 1024
DEVICE: Final = re.compile(r"auto|cpu|gpu(:(all|[0-9]{1,3}(,[0-9]{1,3})*))?")


class PerformanceHint(StrEnum):
    """What lanes and threads are set for."""

    THROUGHPUT = "throughput"
    """Most images a second: on a CPU a lane per core with one thread each, on a GPU two overlapping lanes."""
    LATENCY = "latency"
    """Shortest time for one image: one lane with all threads."""


class Settings(Frozen):
    """The server's settings."""

    # Where it listens.
    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on, for gRPC and HTTP. `0.0.0.0` serves other machines too; there is no authentication."""
    grpc_port: int = Field(8001, ge=0, le=65_535)
    """gRPC port; 0 takes a free one."""
    http_port: int = Field(8002, ge=0, le=65_535)
    """Port of /metrics, /healthz and /readyz; 0 takes a free one."""
    ready_file: Path | None = None
    """Once ready, write here a JSON object with `grpc`, `http` (HOST:PORT) and `pid`; removed at the end."""
    reflection: bool = True
    """Serve gRPC reflection, for tools such as grpcurl."""
    channelz: bool = False
    """Serve grpc.channelz.v1, for debugging connections."""
    model_control: bool | None = None
    """Let clients load and unload models; by default only where it listens on loopback."""
    admin: bool = False
    """Serve xlaserve.v1.Admin, which records profiles. Only where nobody but operators reaches the port: it is not
    authenticated, and a recording slows requests down and fills `profile_dir`."""
    profile_dir: Path | None = None
    """Where profiles are recorded, a folder for each; `xlaserve-profiles` where the server was started by default.
    Nothing is ever removed from it."""

    # What runs the models.
    device: str = "auto"
    """`cpu`, `gpu` (the first), `gpu:1`, several as `gpu:0,1` or `gpu:all`, or `auto`: the first GPU where TensorFlow
    sees one, else the CPU. Each of several GPUs has a replica of every model, behind the same queues."""
    gpu_memory_mib: int | None = Field(None, ge=64, le=4_194_304)
    """MiB that are taken of each GPU at the start, and never more; by default memory is taken as it is needed."""
    performance_hint: PerformanceHint = PerformanceHint.THROUGHPUT
    """Sets lanes and threads: `throughput` or `latency`."""
    lanes: int | None = Field(None, ge=1, le=256)
    """Batches that run at the same time, on each of several GPUs; overrides the hint."""
    threads_per_lane: int | None = Field(None, ge=1, le=256)
    """TensorFlow's threads for one lane on a CPU; overrides the hint."""
    tf32: bool = True
    """On a GPU, multiply float32 in TensorFloat-32, which keeps 10 bits of the 23 of each factor, wherever it can:
    several times as fast. Warm-up measures the difference. No effect on a CPU."""
    compile_cache: Path | None = None
    """A folder for what was traced, compiled and timed, so that a later start need not do it again; `xlaserve warm`
    fills it. What is in it runs as machine code: only those who may change the server should be able to write there."""
    compile_cache_read_only: bool = False
    """Write nothing into `compile_cache`; what is not there is compiled as usual."""
    ready_when: Literal["all", "first_bucket"] = "all"
    """What a model is ready with: all its buckets, or the smallest of each resolution, in every mode. The others then
    compile beside the traffic, and serve from when they are there. With `buckets: auto` it is always all."""
    compile_threads: int | None = Field(None, ge=1, le=64)
    """Programs of a model that compile at the same time; half as many as there are cores by default, since one
    compilation keeps more than one core busy."""
    load_process: bool = True
    """Compile a model that is loaded while others serve in a process of its own, so that their requests don't wait for
    it; on a CPU, for models that serve in the mode `xla` alone. It takes some 600 MB and seconds to start."""
    exit_on_model_failure: bool = True
    """Exit when a model fails to load at start-up. Otherwise the server serves the others and shows it as failed."""

    # Bounds.
    max_queue_images: int = Field(2048, ge=1)
    """Images that may wait in one model's queue, those being decoded or run included. More get RESOURCE_EXHAUSTED. No
    less than the largest bucket, which could never be filled."""
    max_queue_bytes: int = Field(512 * MIB, ge=1)
    """Bytes, encoded and decoded, that may wait in one model's queue."""
    max_message_bytes: int = Field(64 * MIB, ge=1024, le=2**31 - 1)
    """Largest gRPC message."""
    max_inflight_bytes: int = Field(1024 * MIB, ge=1024)
    """Bytes of messages that the server holds at a time for all clients and models, from when one has arrived until it
    is answered. More get RESOURCE_EXHAUSTED."""
    max_resident_bytes: int | None = Field(None, ge=1)
    """Memory that the process should stay within; by default four fifths of the container's or the machine's. Once no
    more than `max_inflight_bytes` are left of it, only as many messages may arrive at a time as fit there at
    `max_message_bytes` each, and those that take longest get RESOURCE_EXHAUSTED."""
    max_concurrent_calls: int = Field(4096, ge=1, le=1_000_000)
    """Calls at a time, those whose answers are not yet read by their clients included. More get RESOURCE_EXHAUSTED.
    Health's Check, ServerLive and ServerReady are counted by themselves, up to 256."""
    max_transfer_s: float = Field(300.0, gt=0, le=86_400)
    """How long a call's first message may take to arrive, from the start of the call until all of it is here, and an
    answer until its client has taken it; the call then ends. 64 MiB in 300 s are 1.8 Mbit/s. Later messages of a stream
    have no limit, nor have the updates of a Watch. Where there is no place for a new call, those that have waited for
    their clients for 5 s are ended: messages and answers, or else the stream that has been silent for longest."""
    max_connections: int = Field(1000, ge=1, le=1_000_000)
    """Clients that may be connected at a time. Each can have sent 256 KiB before anybody asks for them."""
    max_connection_idle_s: float = Field(600.0, gt=0, le=86_400)
    """A connection without calls is closed after this time; clients connect again with their next call."""
    max_image_bytes: int = Field(32 * MIB, ge=1)
    """Largest encoded image."""
    max_image_pixels: int = Field(64_000_000, ge=1)
    """Most pixels of a decoded image: a small file can unpack to gigabytes."""
    decode_threads: int | None = Field(None, ge=1, le=256)
    """Threads that decode images, for all models in turns; one per core by default."""
    max_decode_bytes: int = Field(512 * MIB, ge=1)
    """Bytes that images in flight on those threads may take, as their headers tell: 8 for a pixel, up to 20 for some
    kinds. An image that does not fit waits for the others; one that takes more by itself is decoded alone."""
    shutdown_delay_s: float = Field(0.0, ge=0, le=3600)
    """How long it still serves after SIGTERM, its health already NOT_SERVING, before it refuses: load balancers and
    Kubernetes learn of its end some seconds later. A second signal ends the wait."""
    drain_timeout_s: float = Field(30.0, ge=0, le=3600)
    """How long accepted work may take to finish after SIGTERM or an unload."""

    # What it says.
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """`debug` adds a line per request."""
    log_format: Literal["human", "json"] = "human"
    """Log lines for people or for machines."""

    watch_compilations: bool = True
    """Count what XLA itself says it compiles, and log what it compiles while serving as an error. What libraries write
    to stderr then goes through a small process next to the server; all but XLA's events comes out unchanged."""

    models: tuple[ModelSettings, ...] = BUILTIN_MODELS
    """The models to serve; `builtin:digits` by default."""

    @property
    def has_model_control(self) -> bool:
        """Whether clients may load and unload models."""
        return _is_loopback(self.host) if self.model_control is None else self.model_control

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        if not DEVICE.fullmatch(value):
            raise ValueError("one of auto, cpu, gpu, gpu:1, gpu:0,1 and gpu:all")
        return value

    @field_validator("models")
    @classmethod
    def _check_models(cls, value: tuple[ModelSettings, ...]) -> tuple[ModelSettings, ...]:
        if not value:
            raise ValueError("expected at least one model")
        names = [model.name for model in value]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"each model's name is its own; given more than once: {', '.join(repeated)}")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.grpc_port == self.http_port != 0:
            raise ValueError(f"grpc_port and http_port: expected two ports, got {self.grpc_port} for both")
        for model in self.models:
            if model.max_queue_images is None:
                model.check_queue(self.max_queue_images)
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
