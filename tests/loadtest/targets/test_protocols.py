from __future__ import annotations

import gc
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from xlaserve_loadtest.addresses import DEFAULT_PORTS, FLEET
from xlaserve_loadtest.record.lines import Arm
from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.run import running_targets
from xlaserve_loadtest.run.worker import Setup, Worker
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.channel import PLAIN, Transport
from xlaserve_loadtest.targets.protocols import PROTOCOLS, Protocol, describe
from xlaserve_loadtest.targets.references import References
from xlaserve_loadtest.targets.target import Array, Connection, ModelInfo, Reply, TargetError


class Pigeons:
    """A target in another protocol."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s

    @asynccontextmanager
    async def connect(
        self, models: Sequence[ModelInfo], addresses: Sequence[str], references: References
    ) -> AsyncIterator[Connection]:
        assert (self.deadline_s, list(addresses)) == (5.0, ["pigeon://loft:1"])
        yield self

    async def send(self, request: Request) -> Reply:
        return Reply(Status.OK)

    async def outputs(self, request: Request) -> list[Array]:
        return [np.zeros((request.images, 10))]


async def test_another_protocol_is_a_module_and_a_line(monkeypatch: pytest.MonkeyPatch, model_info: ModelInfo) -> None:
    async def describe_loft(address: str, model: str, transport: Transport) -> ModelInfo:
        return model_info

    def encode(request: Request, model: ModelInfo) -> Request:
        return request

    monkeypatch.setitem(DEFAULT_PORTS, "pigeon", None)
    monkeypatch.setitem(PROTOCOLS, "pigeon", Protocol(describe_loft, encode, Pigeons))
    address, arm = "pigeon://loft:1", Arm("a", "", "digits", "pigeon://loft:1")
    found = await running_targets.of_targets(0, [arm], [address], ["digits"], http_address=None, transport=PLAIN)
    assert found.models == {"digits": model_info}
    worker = Worker()
    await worker.setup(Setup({"a": [model_info]}, {"a": [Request(b"", 2, "")]}, deadline_s=5.0))
    gc.unfreeze()  # what a worker's process keeps, this one need not
    ((output,),) = await worker.outputs("a", [address], 1)
    assert output.shape == (2, 10)


@pytest.mark.parametrize("protocol", ["", *(f"{name}://" for name in PROTOCOLS if name not in ("", FLEET))])
@pytest.mark.parametrize(
    ("modes", "message"),
    [("xla,graph", "b:2 does not offer the mode openvino of digits: it has xla, graph"), ("", "b:2 names no modes of")],
)
async def test_every_server_of_an_arm_is_asked_for_its_modes_in_any_protocol(
    monkeypatch: pytest.MonkeyPatch, model_info: ModelInfo, protocol: str, modes: str, message: str
) -> None:
    offered = {"a:1": "xla,openvino", "b:2": modes}

    async def describe(address: str, model: str, transport: Transport) -> ModelInfo:
        return replace(model_info, properties={"modes": offered[address.removeprefix(protocol)]})

    name = protocol.removesuffix("://")
    monkeypatch.setitem(PROTOCOLS, name, PROTOCOLS[name]._replace(describe=describe))
    addresses = [f"{protocol}{address}" for address in offered]
    with pytest.raises(TargetError, match=f"^{re.escape(protocol + message)}"):
        await running_targets.of_targets(
            0,
            [Arm("a", "openvino", "digits", ",".join(addresses))],
            addresses,
            ["digits"],
            http_address=None,
            transport=PLAIN,
        )


async def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected HOST:PORT, .* got 'ftp://host:1'"):
        await describe("ftp://host:1", "digits")
