"""loadtest against one server in each of its protocols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme
from tests.integration.conftest import DIGITS, DIGITS_SIZE, NOOP, Server
from tests.loadtest.conftest import given_ceiling

from xlaserve_loadtest import cli
from xlaserve_loadtest.record.lines import Run
from xlaserve_loadtest.record.run_file import read_run
from xlaserve_loadtest.targets.channel import Transport
from xlaserve_loadtest.targets.protocols import describe
from xlaserve_loadtest.targets.target import TargetError

__all__ = ["given_ceiling"]  # a fixture

CONFIG: Mapping[str, Any] = {"models": [{**DIGITS, "modes": ["graph"]}, NOOP]}
QUICK = ("--warmup", "0.05", "--equality-images", "4")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(CONFIG, tmp_path_factory.mktemp("server"))
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def addresses(server: Server) -> dict[str, str]:
    return {
        "grpc": server.grpc,
        "rest": f"http://{server.http}",
        "tfs": f"tfs://{server.grpc}",
        "tfs-rest": f"tfs+http://{server.http}",
    }


def load(folder: Path, *arguments: str) -> Run:
    record = folder / "one.run.jsonl.gz"
    workers = () if "--in-process" in arguments else ("--workers", "1")
    assert cli.main([*QUICK, *workers, "--record", str(record), *arguments]) == 0
    return read_run(record)


async def test_every_protocol_describes_the_same_model(server: Server) -> None:
    infos = [await describe(address, "digits") for address in addresses(server).values()]
    assert {info.size for info in infos} == {DIGITS_SIZE}
    assert len({info.inputs for info in infos}) == 1
    assert len({info.outputs for info in infos}) == 1
    assert [info.modes for info in infos] == [("graph",), ("graph",), (), ()]


@pytest.mark.parametrize("form", ["encoded", pytest.param("pixels", marks=pytest.mark.slow)])
def test_the_protocols_of_a_server_are_arms_that_answer_alike(server: Server, tmp_path: Path, form: str) -> None:
    arms = [f"--arm={name}={address}" for name, address in addresses(server).items()]
    run = load(tmp_path, *arms, "--no-control", "--concurrency", "2", "--duration", "0.8", "--payload", form)
    assert not run.failures
    assert {own.arm: own.is_equal for own in run.equalities} == {"rest": True, "tfs": True, "tfs-rest": True}
    assert all(block.generator.own_ms for block in run.blocks)
    assert all((run.requests["status"] == 0).tolist())


@pytest.mark.usefixtures("given_ceiling")
@pytest.mark.parametrize("name", ["rest", "tfs", "tfs-rest"])
@pytest.mark.parametrize(
    "loop",
    [
        ("--rate", "40", "--distinct"),
        ("--scenario", "single-stream"),
        ("--concurrency", "3", "--images-per-request", "1:0.5,2:0.5"),
    ],
    ids=lambda loop: loop[0],
)
def test_every_loop_runs_in_every_protocol(server: Server, tmp_path: Path, name: str, loop: tuple[str, ...]) -> None:
    chosen = tuple(option for option in loop if name != "tfs-rest" or option != "--distinct")  # JSON has no place
    run = load(tmp_path, "--target", addresses(server)[name], "--model", "digits", "--duration", "0.5", *chosen)
    assert not run.failures
    assert len(run.requests)


@pytest.mark.usefixtures("given_ceiling")
def test_over_rest_the_server_tells_its_stages_and_takes_a_mode(server: Server, tmp_path: Path) -> None:
    run = load(tmp_path, "--target", addresses(server)["rest"], "--mode", "graph", "--duration", "0.3")
    assert (run.requests["execute_s"] > 0).all()
    assert run.header.arms[0].mode == "graph"


def test_a_model_that_is_not_there_is_said(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, address in addresses(server).items():
        assert cli.main(["--target", address, "--model", "cats", "--out", str(tmp_path)]) == 1, name
        assert f"{address}: NOT_FOUND: " in capsys.readouterr().err


async def test_rest_is_reached_over_mutual_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = {name: tmp_path / name for name in ("authority", "certificate", "key")}
    authority.cert_pem.write_to_path(str(files["authority"]))
    issued, client = authority.issue_cert("served.test"), authority.issue_cert("me@test")
    issued.cert_chain_pems[0].write_to_path(str(files["certificate"]))
    issued.private_key_pem.write_to_path(str(files["key"]))
    tls = {"tls_certificate": files["certificate"], "tls_key": files["key"], "tls_client_ca": files["authority"]}
    config = {"models": [NOOP], **{name: str(path) for name, path in tls.items()}}
    trusting = Transport(
        authorities=authority.cert_pem.bytes(),
        certificate=client.cert_chain_pems[0].bytes(),
        key=client.private_key_pem.bytes(),
        server_name="served.test",
    )
    server = Server(config, tmp_path)
    try:
        server.wait_until_ready()
        for protocol in ("https", "tfs+https"):
            address = f"{protocol}://{server.http}"
            assert (await describe(address, "noop", trusting)).inputs[0].name == "pixels"
            for wrong in (
                Transport(),
                replace(trusting, server_name="other.test"),
                replace(trusting, certificate=None),
            ):
                with pytest.raises(TargetError, match="UNAVAILABLE"):
                    await describe(address, "noop", wrong)
    finally:
        server.stop()
