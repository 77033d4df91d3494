"""Settings of the process: addresses, limits, device, caches. Settings of models are in `model_settings`."""

from __future__ import annotations

import ipaddress
import math
import re
from enum import StrEnum
from itertools import combinations
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from xlaserve.config import versions
from xlaserve.config.base import Frozen
from xlaserve.config.built_in_models import BUILTIN_MODELS
from xlaserve.config.model_settings import ModelSettings

MIB: Final = 1024 * 1024
ORIGIN: Final = re.compile(r"\*|https?://[^/\s*?#@]+")
HOST: Final = re.compile(r"\*|[^/\s*?#@:\[\],]+")
ENDPOINT: Final = re.compile(r"https?://[^/\s?#@]+/?")
EXPAND: Final = object()
"""Context of a validation that takes folders of versions for those versions."""
CONNECTION_AGE_S: Final = 60.0
DEVICE: Final = re.compile(r"auto|cpu|gpu(:(all|[0-9]{1,3}(,[0-9]{1,3})*))?")


class PerformanceHint(StrEnum):
    """The aim by which lanes and threads are set."""

    THROUGHPUT = "throughput"
    """Most images a second: on a CPU a lane per core with one thread each, on a GPU two overlapping lanes."""
    LATENCY = "latency"
    """Shortest time for one image: one lane with all threads."""


class Settings(Frozen):
    """The server's settings."""

    # Where it listens.
    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on, for gRPC and HTTP. `0.0.0.0` serves other machines too: anybody who reaches it, unless
    `access` is set."""
    grpc_port: int = Field(8001, ge=0, le=65_535)
    """gRPC port; 0 takes a free one."""
    http_port: int = Field(8000, ge=0, le=65_535)
    """HTTP port of the REST API; 0 takes a free one."""
    metrics_port: int | None = Field(8002, ge=0, le=65_535)
    """HTTP port of /metrics, /healthz and /readyz, in the clear and for everybody who reaches it; 0 takes a free one,
    `off` none. /metrics is on `http_port` as well, where `access` says who may see it."""
    tls_certificate: Path | None = None
    """The server's certificate in PEM, followed by those that lead to its authority: gRPC and HTTP then speak TLS, 1.2
    at least. It is read again when it changes. The metrics' port stays in the clear."""
    tls_key: Path | None = None
    """The private key of `tls_certificate` in PEM, without a password."""
    tls_client_ca: Path | None = None
    """Authorities in PEM, one of which must have signed the certificate of each client (mutual TLS)."""
    access: Path | None = None
    """A file that says who may call, and what each may do: by API keys, certificates and tokens. It is read again when
    it changes. Without it anybody may call."""
    cors_origins: tuple[str, ...] = Field((), examples=[["https://example.org"]])
    """Origins whose web pages may call over HTTP, such as `https://example.org`; `*` for all, which still can't change
    models. Pages of others may send requests, and browsers keep the answers from them."""
    allowed_hosts: tuple[str, ...] = Field((), examples=[["xlaserve.default.svc"]])
    """Names by which clients and proxies call over HTTP, such as `xlaserve.default.svc`, or `*` for any. Requests for
    other names, as the header `host` has them, are refused: by them, web pages of others would reach this machine (DNS
    rebinding). Addresses, `localhost` and `host` always pass. Without it names are checked only where `host` is
    loopback and `access` is not set."""
    ready_file: Path | None = None
    """Once ready, write here a JSON object with `grpc`, `http`, `metrics` (HOST:PORT) and `pid`; removed at the end.
    The file of another server that runs is left alone. A start ends where it can't be written."""
    reflection: bool = True
    """Serve gRPC reflection, for tools such as grpcurl."""
    model_control: bool = True
    """Let clients load and unload models: those with the role `admin`, or on loopback without `access` all."""
    shared_memory: bool = False
    """Let clients on the same machine pass tensors in files of /dev/shm, as Triton's system shared memory extension has
    it; with `access`, those with the role `admin`. They can have the server read and write any such file of its user. A
    region belongs to the caller that registered it, and without `access` to all; a proxy on this machine makes all its
    clients local."""
    admin: bool = False
    """Serve xlaserve.v1.Admin, which records profiles, for callers as `model_control` has them. A recording slows
    requests down and fills `profile_dir`."""
    profile_dir: Path | None = None
    """Where profiles are recorded, a folder for each; `xlaserve-profiles` where the server was started by default.
    Nothing is ever removed from it."""

    # Its processes.
    fronts: Literal["auto"] | Annotated[int, Field(ge=0, le=64)] = "auto"
    """Processes that speak to clients, beside one that runs the models: they share the ports, decode images and check
    who calls. 0 does all in one process. `auto` does so on a CPU; on a GPU it begins with one and adds as many as bring
    the GPU what it computes by warm-up's measurement, one image a request, and leaves one core. A client's connection
    meets one of them. Limits hold for all of them together, but `max_connections` for each by itself; `decode_threads`
    and `max_resident_bytes` are divided among those that there are at the time."""

    engines: Literal["per_device"] | Annotated[int, Field(ge=1, le=64)] = "per_device"
    """With `fronts`, processes that run the models; each has all of them. `per_device` is one for each GPU that
    `device` names, and one on a CPU. Several on a CPU share out its cores, and their lanes and threads follow from
    those. What bounds queues holds for each by itself."""
    swap: Literal["engine", "in_place"] = "engine"
    """With `fronts`, how what serves is replaced or unloaded, on SIGHUP, at a poll or as a client asks: `engine` starts
    another process that loads all models beside the one that serves, and moves the traffic once it is ready; the old
    process ends, with all that TensorFlow never frees. `in_place` changes the process that serves, where memory does
    not hold two. What is only added is always loaded in place."""
    upgrades: bool = True
    """With `fronts`, whether SIGUSR2 (`xlaserve upgrade`) has another server take this one's place, in a process of its
    own. The images and fleets turn it off: a container ends with the process that it was started with, and a fleet
    takes the end of a server's process for the end of the server."""

    # What runs the models.
    device: str = "auto"
    """`cpu`, `gpu` (the first), `gpu:1`, several as `gpu:0,1` or `gpu:all`, or `auto`: the first GPU where TensorFlow
    sees one, else the CPU. With `fronts`, each of several GPUs has a process of its own (`engines`). Where one process
    has them all, each has a replica of every model, behind the same queues."""
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
    """The buckets that a model is ready with: all, or the smallest of each resolution, in every mode. The others then
    compile beside the traffic, and serve as soon as they are compiled. With `buckets: auto` it is always all."""
    compile_threads: int | None = Field(None, ge=1, le=64)
    """Programs of a model that compile at the same time; half as many as there are cores by default, since one
    compilation keeps more than one core busy."""
    load_process: bool = True
    """Compile a model that is loaded while others serve in a process of its own, so that their requests don't wait for
    it; on a CPU, for models whose modes are all among `xla`, `graph`, `openvino` and `auto`. It takes some 600 MB and
    seconds to start."""
    version_order: Literal["load_first", "unload_first"] = "load_first"
    """How a version is replaced: `load_first` loads and warms the new one while the old one serves. `unload_first`
    unloads the old one before, where memory does not hold both; nothing answers in its place meanwhile, unless another
    version does."""
    poll_versions_s: float | None = Field(None, ge=0.1, le=86_400)
    """How often folders of versions are looked at for new ones; never by default: SIGHUP and loading a model look, too.
    A version is loaded once its files were the same twice."""
    exit_on_model_failure: bool = True
    """Exit when a model fails to load at start-up. Otherwise the server serves the others and shows it as failed."""

    # Bounds.
    max_queue_images: int = Field(2048, ge=1)
    """Images that may wait in one model's queue, those being decoded or run included. More get RESOURCE_EXHAUSTED. No
    less than the largest bucket, which could never be filled."""
    max_queue_bytes: int = Field(512 * MIB, ge=1)
    """Bytes, encoded and decoded, that may wait in one model's queue."""
    max_message_bytes: int = Field(64 * MIB, ge=1024, le=2**31 - 1)
    """Largest message: of gRPC, or the body of an HTTP request. For a larger one a client of gRPC gets
    RESOURCE_EXHAUSTED and "Received message larger than max (its bytes vs. this setting)". It is among the properties
    of each model's metadata."""
    max_inflight_bytes: int = Field(1024 * MIB, ge=1024)
    """Bytes of messages that the server holds at a time for all clients and models, from when one has arrived until it
    is answered. More get RESOURCE_EXHAUSTED. Less where the limit of a control group leaves no room for them."""
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
    max_calls_per_address: int | None = Field(None, ge=1, le=1_000_000)
    """Calls at a time of one address, or of one network of IPv6 (/64); by default as many as of all addresses together.
    More get RESOURCE_EXHAUSTED. For servers that strangers reach without a proxy."""
    max_connections: int = Field(1000, ge=1, le=1_000_000)
    """Clients that may be connected at a time. Each can have sent 256 KiB before anybody asks for them."""
    max_connections_per_address: int | None = Field(None, ge=1, le=1_000_000)
    """Connections of one address, or of one network of IPv6 (/64); half of `max_connections` by default. Set it to
    `max_connections` where a proxy brings all clients. gRPC's connections are counted once a second, HTTP's at once."""
    max_connection_idle_s: float = Field(600.0, gt=0, le=86_400)
    """A connection without calls is closed after this time; clients connect again with their next call."""
    max_connection_age_s: float | None = Field(None, gt=0, le=86_400)
    """A gRPC connection is told to end once it is about that old: calls on it are answered, and the client makes its
    next ones on a new connection, which may meet another front. By default 60 with `fronts`, else never."""
    max_image_bytes: int = Field(32 * MIB, ge=1)
    """Largest encoded image."""
    max_image_pixels: int = Field(64_000_000, ge=1)
    """Most pixels of a decoded image: a small file can unpack to gigabytes."""
    decode_threads: int | None = Field(None, ge=1, le=256)
    """Threads that decode images, for all models in turns; one per core by default."""
    max_decode_bytes: int = Field(512 * MIB, ge=1)
    """Bytes that images in flight on those threads may take, as their headers tell: 8 for a pixel, up to 20 for some
    kinds. An image that does not fit waits for the others; one that takes more by itself is decoded alone. Less where
    the limit of a control group leaves no room for them."""
    shutdown_delay_s: float = Field(0.0, ge=0, le=3600)
    """How long it still serves after SIGTERM, its health already NOT_SERVING, before it refuses: load balancers and
    Kubernetes learn of its end some seconds later. A second signal ends the wait."""
    drain_timeout_s: float = Field(30.0, ge=0, le=3600)
    """How long work may take to finish after SIGTERM or an unload: what was accepted, and after SIGTERM also requests
    that had begun to arrive."""

    # What it says.
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level of lines that are written. Those of the audit always are."""
    log_format: Literal["human", "json"] = "human"
    """Log lines for people or for machines."""
    access_log: Literal["off", "errors", "all"] = "errors"
    """Which requests have a line in the log, with their id, caller, model, status, reason and time: those that fail, or
    all, with their stages. `off` leaves those that fail by the server's fault. Failures that come in floods are
    counted."""

    triton_metrics: bool = False
    """Also show metrics of models by Triton's names (`nv_inference_request_success` and others), for its dashboards."""
    tracing: bool = False
    """Record spans of calls and batches, and send them to an OpenTelemetry collector by OTLP over gRPC; needs the extra
    `otel`. The standard variables count: `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_EXPORTER_OTLP_*`,
    `OTEL_BSP_*`."""
    trace_endpoint: str | None = None
    """The collector, such as `http://localhost:4317`, or `https://` for TLS; by default `OTEL_EXPORTER_OTLP_ENDPOINT`,
    or port 4317 of this machine."""
    trace_sample_ratio: float = Field(1.0, ge=0, le=1)
    """Share of the calls without a `traceparent` that are recorded. The others are where their client records them."""

    watch_compilations: bool = True
    """Count what XLA itself says it compiles, and log what it compiles while serving as an error. What libraries write
    to stderr then goes through a small process next to the server; all but XLA's events comes out unchanged."""

    models: tuple[ModelSettings, ...] = Field(
        BUILTIN_MODELS, examples=[[{"name": "digits", "source": "builtin:digits"}]]
    )
    """The models to serve; `builtin:digits` by default."""

    @property
    def effective_max_connections_per_address(self) -> int:
        """The setting, or what follows where there is none."""
        return self.max_connections_per_address or math.ceil(self.max_connections / 2)

    @property
    def front_processes(self) -> int:
        """Number of fronts: 0 where one process does all, and for `auto` until `resolve_fronts` has replaced it."""
        return 0 if self.fronts == "auto" else self.fronts

    @property
    def has_several_engines(self) -> bool:
        """Whether they are asked for by their number."""
        return self.engines not in ("per_device", 1)

    @property
    def effective_max_connection_age_s(self) -> float | None:
        """`max_connection_age_s`, or what it is by default; None for connections that never end for their age."""
        return self.max_connection_age_s or (CONNECTION_AGE_S if self.front_processes else None)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the ports."""
        return _is_loopback(self.host)

    @property
    def has_model_control(self) -> bool:
        """Whether clients may load and unload models."""
        return self._trusts_callers and self.model_control

    @property
    def has_admin(self) -> bool:
        """Whether profiles may be recorded."""
        return self._trusts_callers and self.admin

    @property
    def _trusts_callers(self) -> bool:
        """Whether callers are of this machine, or recognised."""
        return self.is_loopback or self.access is not None

    @field_validator("device")
    @classmethod
    def _check_device(cls, value: str) -> str:
        if not DEVICE.fullmatch(value):
            raise ValueError("expected one of auto, cpu, gpu, gpu:1, gpu:0,1 and gpu:all")
        return value

    @field_validator("metrics_port", mode="before")
    @classmethod
    def _take_off_for_none(cls, value: object) -> object:
        return None if value == "off" else value

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not ORIGIN.fullmatch(origin):
                raise ValueError(f"expected origins such as https://example.org or http://localhost:3000, got {origin}")
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            if not HOST.fullmatch(host):
                raise ValueError(f"expected names without a port, such as xlaserve.default.svc, or *, got {host}")
        return value

    @field_validator("trace_endpoint")
    @classmethod
    def _check_endpoint(cls, value: str | None) -> str | None:
        if value is not None and not ENDPOINT.fullmatch(value):
            raise ValueError("expected an address such as http://localhost:4317")
        return value

    @field_validator("models")
    @classmethod
    def _check_models(cls, value: tuple[ModelSettings, ...], info: ValidationInfo) -> tuple[ModelSettings, ...]:
        if not value:
            raise ValueError("expected at least one model")
        if info.context is EXPAND:
            value = versions.expanded(value)
        versions.grouped(value)
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        ports = {name: getattr(self, name) for name in ("grpc_port", "http_port", "metrics_port")}
        for first, second in combinations(ports, 2):
            if ports[first] == ports[second] and ports[first]:
                raise ValueError(f"{first} and {second}: expected two ports, got {ports[first]} for both")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key: expected both or neither")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca: expected tls_certificate as well")
        if self.fronts == 0 and self.has_several_engines:
            raise ValueError(f"engines: expected fronts: 1 or more as well, got engines: {self.engines} alone")
        for model in self.models:
            if model.max_queue_images is None:
                model.check_queue(self.max_queue_images)
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
