"""Servers of several processes whose processes say what a test wants."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from xlaserve.admission.shared_counts import SharedCounts
from xlaserve.config import ModelSettings, Settings
from xlaserve.processes import fronts as fronts_module
from xlaserve.processes.capacity import TYPICAL, US_PER_S
from xlaserve.processes.engines import ENGINE
from xlaserve.processes.front_process import FrontOrders
from xlaserve.processes.fronts import FRONT, Fronts
from xlaserve.processes.handover import ClientOverrides
from xlaserve.processes.several_processes import Server
from xlaserve.processes.supervision.process import Process
from xlaserve.processes.supervision.role import Role
from xlaserve.processes.supervision.supervisor import Supervisor
from xlaserve.processes.upgrades import Upgrades

PATIENCE_S = 30.0
PROCESS = cast(Process, None)
READY, NOT_READY = {"serving": "ready: m", "is_ready": True}, {"serving": "ready: no model", "is_ready": False}


FRONT_ADDRESSES: Mapping[str, str | None] = {"grpc": "127.0.0.1:1", "http": "127.0.0.1:2", "metrics": None}


class World:
    """A server of one front, or more, whose processes say what the test wants."""

    def __init__(self, *, fronts: int = 1, grows: bool = False, **settings: Any) -> None:
        models = (ModelSettings(name="m", source="fake"),)
        values = {"grpc_port": 0, "http_port": 0, "metrics_port": None, **settings}
        self.settings = Settings(models=models, fronts=fronts, **values)
        self.server = Server(self.settings, lambda: self.settings, grows=grows)
        self.about: dict[str, Mapping[str, Any]] = {}
        self.failures: list[str] = []
        self.server._supervisor = cast(Supervisor, SimpleNamespace(about=self.about, fail=self.failures.append))
        self.server._usage = SharedCounts(fronts=fronts)
        self.server._fronts = Fronts(
            self.settings,
            1 if grows else fronts,
            ports={},
            engines=(),
            successor=Path("successor"),
            metrics=None,
            descriptors={},
            waits=lambda: False,
        )
        server = self.server
        server._upgrades = Upgrades(server._usage, server._start_successor, server._leave, server._grow)

    def say(self, name: str, about: Mapping[str, Any]) -> None:
        self.about[name] = about
        self.server.became_ready(Role(name=name, target=""), PROCESS)

    def start(self, engine: Mapping[str, Any]) -> None:
        self.say(ENGINE, engine)
        self.say(FRONT.format(1), FRONT_ADDRESSES)


class GrowingWorld(World):
    """A server of one front, which may have five, on a machine of 16 cores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engines: int = 1) -> None:
        super().__init__(fronts=5, grows=True)
        monkeypatch.setattr(fronts_module, "usable_cores", lambda: 16)
        self.added: list[Role] = []
        self.server._supervisor = cast(Supervisor, SimpleNamespace(about=self.about, add=self.added.extend))
        self.server._ports = {}
        self.server._successor_address = Path("successor")
        roles = [Role(name=f"{ENGINE} {number}", target="") for number in range(engines)]
        self.server._engines = cast(Any, SimpleNamespace(roles=roles, addresses=(), changes=ClientOverrides()))

    def orders_of(self, front: int) -> Settings:
        (role,) = (role for role in self.added if role.name == FRONT.format(front))
        assert callable(role.payload)
        orders: FrontOrders = pickle.loads(role.payload())
        assert orders.number == front
        return orders.settings


FAST = {**READY, "images_per_s": 3.5 * US_PER_S / TYPICAL.front_us}
