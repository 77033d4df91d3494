"""Load on a fleet: a name service and servers, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.client.fleets import NameService, name_service
from tests.loadtest.conftest import StartPuppet

from xlaserve_loadtest.cli import main
from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.record.run_file import read_run
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.protocols import ServerTarget, describe
from xlaserve_loadtest.targets.server_fleet import ready_server
from xlaserve_loadtest.targets.target import ModelInfo, TargetError
from xlaserve_proto import open_inference_pb2 as oip

MESSAGE = oip.ModelInferRequest(model_name="digits")
MESSAGE.parameters["mode"].string_param = "xla"
MESSAGE.inputs.add(name="pixels", datatype="UINT8", shape=[2, 32, 32, 3])
MESSAGE.raw_input_contents.append(bytes(2 * 32 * 32 * 3))
REQUEST = Request(MESSAGE.SerializeToString(), 2, "xla")


@pytest.fixture
def service() -> Iterator[NameService]:
    with name_service() as service:
        yield service


def answered(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def wait_for(log: Path, count: int) -> None:
    give_up_at = time.monotonic() + 20
    while answered(log) < count:
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


async def test_requests_go_to_the_server_with_the_fewest_under_way(
    service: NameService, start_puppet: StartPuppet, model_info: ModelInfo, tmp_path: Path
) -> None:
    logs = [tmp_path / "hanging", tmp_path / "well"]
    hanging = start_puppet("--hang-after", "0", "--log", str(logs[0]))
    service.publish(hanging, start_puppet("--log", str(logs[1])))
    async with ServerTarget(deadline_s=3).connect([model_info], [service.target]) as connection:
        replies = await asyncio.gather(*(connection.send(REQUEST) for _ in range(2)))
        held = asyncio.create_task(connection.send(REQUEST))
        await asyncio.to_thread(wait_for, logs[0], 2)
        replies += [await connection.send(REQUEST) for _ in range(8)]
        replies.append(await held)
    assert [reply.status for reply in replies].count(Status.OK) == 9
    assert [reply.status for reply in replies].count(Status.DEADLINE_EXCEEDED) == 2
    assert (answered(logs[0]), answered(logs[1])) == (2, 9)


async def test_servers_that_come_and_go_are_followed(
    service: NameService, start_puppet: StartPuppet, model_info: ModelInfo, tmp_path: Path
) -> None:
    logs = [tmp_path / "first", tmp_path / "second"]
    first, second = (start_puppet("--log", str(log)) for log in logs)
    service.publish(first)
    async with ServerTarget(deadline_s=5).connect([model_info], [service.target]) as connection:
        replies = [await connection.send(REQUEST) for _ in range(3)]
        service.publish(second, draining=(first,))
        await asyncio.to_thread(service.wait_until_heard)
        replies += [await connection.send(REQUEST) for _ in range(4)]
        (scores,) = await connection.outputs(REQUEST)
    assert {reply.status for reply in replies} == {Status.OK}
    assert scores.shape == (2, 10)
    assert [answered(log) for log in logs] == [3, 5]


async def test_a_request_unanswered_by_its_server_fails_and_is_not_sent_again(
    service: NameService, start_puppet: StartPuppet, model_info: ModelInfo
) -> None:
    service.publish(start_puppet("--die-after", "1"), start_puppet())
    async with ServerTarget(deadline_s=5).connect([model_info], [service.target]) as connection:
        replies = [await connection.send(REQUEST) for _ in range(10)]
    assert [reply.status for reply in replies].count(Status.UNAVAILABLE) == 1
    assert [reply.status for reply in replies].count(Status.OK) == 9


async def test_where_no_server_is_ready_requests_fail_with_what_was_asked(
    service: NameService, model_info: ModelInfo
) -> None:
    service.publish(draining=("127.0.0.1:1",))
    async with ServerTarget(deadline_s=5).connect([model_info], [service.target]) as connection:
        reply = await connection.send(REQUEST)
        with pytest.raises(TargetError, match="no server is ready"):
            await connection.outputs(REQUEST)
    assert reply.status is Status.UNAVAILABLE
    assert f"http://{service.target.removeprefix('fleet://')}/v1/servers listed 1 servers" in reply.detail


async def test_a_fleet_is_described_by_one_of_its_servers(service: NameService, start_puppet: StartPuppet) -> None:
    with pytest.raises(TargetError, match=r"fleet://.*: UNAVAILABLE: no server is ready, of 0 that are listed"):
        await describe(service.target, "digits")
    puppet = start_puppet()
    service.publish(puppet, draining=("127.0.0.1:1",))
    assert await ready_server(service.target) == puppet
    assert (await describe(service.target, "digits")).server == "puppet 1"
    service.stop()
    with pytest.raises(TargetError, match=r"fleet://.*: UNAVAILABLE: Connection refused"):
        await describe(service.target, "digits")


def test_a_run_on_a_fleet_is_recorded_as_one_target(
    service: NameService, start_puppet: StartPuppet, tmp_path: Path
) -> None:
    service.publish(start_puppet(), start_puppet())
    file = tmp_path / "run.gz"
    options = ["--mode", "xla", "--no-control", "--duration", "1", "--warmup", "0.1", "--workers", "1"]
    assert main(["--target", service.target, *options, "--record", str(file)]) == 0
    run = read_run(file)
    assert [arm.target for arm in run.header.arms] == [service.target]
    assert set(run.requests["target"].tolist()) == {0}
    assert run.requests.size > 10
