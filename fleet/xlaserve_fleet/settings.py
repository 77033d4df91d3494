"""Settings of a fleet, in a file of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, ValidationError, model_validator

from xlaserve import config
from xlaserve.config import PerformanceHint, Settings
from xlaserve.config.base import Frozen
from xlaserve.config.errors_in_words import reasons
from xlaserve.config.files import lines_of, read_mapping, resolved
from xlaserve.errors import ConfigError
from xlaserve_fleet import folders

LOCAL: Final = "local"
"""In place of a cluster's address: one that is started on this machine, and reached from here alone."""
SHUTDOWN_DELAY_S: Final = 2.0
"""How long a server that leaves still serves, where its configuration does not say: clients learn of it meanwhile."""
RECOVER_S: Final = 60.0
"""How long a server whose engine has ended may take until another one serves."""


class FleetSettings(Frozen):
    """The settings of a fleet."""

    name: str = Field("xlaserve", pattern="^[a-z][a-z0-9-]{0,62}$")
    """The fleet's name in Ray, where there may be several."""
    ray: str = Field("auto", min_length=1)
    """Ray's head as HOST:PORT; `auto` for the cluster that this machine is part of. `local` starts one on this machine,
    which ends with `xlaserve-fleet up` and is reached from here alone."""
    port: int = Field(8100, ge=1, le=65_535)
    """Port of the name service on Ray's head, where clients find the servers."""
    server: dict[str, Any]
    """The servers' own configuration, or the path of its file. Each server takes free ports, and listens on the address
    of its node unless `host` is set. Files that it names have to be on every node."""
    cores: int = Field(1, ge=1)
    """Cores that Ray keeps free for a server, and that it uses: lanes and threads follow, unless they are set."""
    gpus: int = Field(0, ge=0)
    """GPUs of a server."""
    min_servers: int = Field(1, ge=1)
    """There are never fewer servers than this, as far as Ray has room."""
    max_servers: int | None = Field(None, ge=1)
    """Nor more than this; `min_servers` by default."""
    target_wait_s: float = Field(0.05, gt=0, le=3600)
    """How long a request should have to wait for a lane: there are as many servers as that takes. `xlaserve plan` says
    what to expect."""
    scale_up_after_s: float = Field(5.0, ge=0, le=3600)
    """How long more servers have to be needed before they are started."""
    scale_down_after_s: float = Field(60.0, ge=0, le=86_400)
    """How long fewer servers have to be enough before some are stopped."""
    update: Literal["start_first", "stop_first"] = "start_first"
    """How servers are replaced: `start_first` starts new ones before it stops old ones, a quarter of them at a time,
    for which Ray needs room. `stop_first` stops a fifth of them at a time, at least one."""

    @property
    def most_servers(self) -> int:
        """The setting, or what follows where there is none."""
        return self.max_servers or self.min_servers

    @property
    def stop_s(self) -> float:
        """How long a server may take to stop: it still serves for a while, and then drains. Raises ConfigError."""
        given = self.server_settings()
        is_set = "shutdown_delay_s" in given.model_fields_set
        return (given.shutdown_delay_s if is_set else SHUTDOWN_DELAY_S) + given.drain_timeout_s

    @property
    def recover_s(self) -> float:
        """How long a server may take to serve again before it is replaced. Raises ConfigError."""
        fronts = self.server_settings().fronts
        is_one_process = self.gpus == 0 if fronts == "auto" else fronts == 0
        return 0.0 if is_one_process else RECOVER_S

    @property
    def local_address(self) -> Path:
        """The file that says where the cluster of a `local` fleet is found. Raises ConfigError."""
        return folders.private() / f"{self.name}-{self.port}.address"

    @property
    def revision(self) -> str:
        """Names what servers are started with: two that differ in it have to be replaced."""
        parts = {"server": self.server, "cores": self.cores, "gpus": self.gpus}
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]

    def server_settings(self) -> Settings:
        """Returns the servers' settings. Raises ConfigError."""
        try:
            return config.load(flags=self.server, environ={})
        except ConfigError as error:
            raise ConfigError(f"server: {error}") from None

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.most_servers < self.min_servers:
            raise ValueError(f"max_servers: expected at least min_servers, {self.min_servers}, got {self.max_servers}")
        return self


def load(file: Path) -> FleetSettings:
    """Reads a fleet's file. Relative paths are taken from the folder of the file that they stand in.

    Raises ConfigError, which names each wrong field, its value and what was expected.
    """
    values = read_mapping(file)
    server = values.get("server")
    folder = file.parent.absolute()
    if isinstance(server, str):
        values["server"] = _of_server(read_mapping(folder / server), (folder / server).parent)
    elif isinstance(server, Mapping):
        values["server"] = _of_server(server, folder)
    try:
        settings = FleetSettings.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"fleet {file}: {reasons(error, FleetSettings, values, lines_of(file))}") from None
    given = settings.server_settings()
    if settings.ray != LOCAL and given.is_loopback and "host" in given.model_fields_set:
        expected = "expected an address that other machines reach, or none for that of the node"
        raise ConfigError(f"fleet {file}: server: host: {expected}, got {given.host}")
    return settings


def _of_server(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    return dict(resolved(dict(values), [Settings], folder))


def flags(fleet: FleetSettings, node_address: str) -> dict[str, object]:
    """Returns the settings of a server on the node with `node_address` that are the fleet's business, by name.

    Where its configuration does not say otherwise, it uses the cores that it was given, serves for a moment after it
    was asked to stop, and listens on the node's address.
    """
    given = fleet.server_settings()
    found: dict[str, object] = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "upgrades": False}
    if "host" not in given.model_fields_set:
        found["host"] = node_address
    if "shutdown_delay_s" not in given.model_fields_set:
        found["shutdown_delay_s"] = SHUTDOWN_DELAY_S
    if given.decode_threads is None:
        found["decode_threads"] = fleet.cores
    if fleet.gpus:
        if given.device == "auto":
            found["device"] = "gpu:all"
        return found
    if given.device == "auto":
        found["device"] = "cpu"
    is_latency = given.performance_hint is PerformanceHint.LATENCY
    lanes = given.lanes or (1 if is_latency else fleet.cores)
    found["lanes"] = lanes
    found["threads_per_lane"] = given.threads_per_lane or max(1, fleet.cores // lanes)
    return found
