"""The client, its command and loadtest with models of two images, of an image and numbers, and of numbers alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.browser import CHROMIUM, chromium
from tests.integration.conftest import Server, StartServer
from tests.integration.test_loadtest_protocols import addresses, load
from tests.integration.test_several_inputs import World, rows, world
from tests.loadtest.conftest import given_ceiling

from xlaserve_client import AsyncVisionClient, InvalidRequest, VisionClient
from xlaserve_client.cli import main

__all__ = ["given_ceiling", "world"]  # fixtures


@pytest.fixture(scope="module")
def server(start_module_server: StartServer, world: World) -> Server:
    common = {"buckets": [1, 4], "modes": ["xla", "graph"], "task": "tensors", "preprocess": "none"}
    models = [{"name": name, "source": str(world.folder / f"{name}.keras"), **common} for name in world.models]
    return start_module_server({"models": models})


def only(outputs: Any) -> Any:
    (values,) = outputs.values()
    return values


@pytest.mark.parametrize("name", ["siamese", "with-numbers", "alone"])
def test_the_client_infers_from_arrays(server: Server, world: World, name: str) -> None:
    inputs = rows(name, 3)
    expected = world.expected(name, inputs)
    with VisionClient(server.grpc, deadline_s=60) as client:
        np.testing.assert_allclose(only(client.infer(inputs=inputs, model=name).outputs), expected, atol=1e-4)
        one = {key: values[0] for key, values in inputs.items()}
        np.testing.assert_allclose(only(client.infer(inputs=one, model=name).outputs), expected[:1], atol=1e-4)

    async def ask() -> Any:
        async with AsyncVisionClient(server.grpc, deadline_s=60) as client:
            return only((await client.infer(inputs=inputs, model=name, mode="graph")).outputs)

    np.testing.assert_allclose(asyncio.run(ask()), expected, atol=1e-4)


def test_the_client_infers_from_files(server: Server, world: World, tmp_path: Path) -> None:
    inputs = rows("siamese", 2)
    files = {name: [tmp_path / f"{name}{row}.png" for row in range(2)] for name in inputs}
    for name, paths in files.items():
        for pixels, path in zip(inputs[name], paths, strict=True):
            Image.fromarray(pixels).save(path)
    with VisionClient(server.grpc, deadline_s=60) as client:
        got = only(client.infer(inputs={**inputs, "left": files["left"]}, model="siamese").outputs)
        np.testing.assert_allclose(got, world.expected("siamese", inputs), atol=1e-4)
        with pytest.raises(InvalidRequest, match="features"):
            client.infer(inputs={"features": files["left"]}, model="alone")


def test_the_command_infers_from_named_inputs(
    server: Server,
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    inputs = rows("with-numbers", 1)
    Image.fromarray(inputs["photo"][0]).save(tmp_path / "photo.png")
    np.save(tmp_path / "numbers.npy", inputs["numbers"])
    given = [f"photo={tmp_path}/photo.png", f"numbers={tmp_path}/numbers.npy", f"place={inputs['place'][0]}"]
    options = [part for one in given for part in ("--input", one)]
    assert main(["infer", "with-numbers", *options, "--json", "--target", server.grpc]) == 0
    got = only(json.loads(capsys.readouterr().out)["outputs"])
    np.testing.assert_allclose(got, world.expected("with-numbers", inputs), atol=1e-4)
    assert main(["models", "--target", server.grpc]) == 0
    assert "photo [n, 12, 10, 3] UINT8 image" in capsys.readouterr().out


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium; scripts/install_chromium.sh installs it")
def test_the_page_sends_each_field(server: Server, world: World, tmp_path: Path) -> None:
    inputs = rows("with-numbers", 1)
    Image.fromarray(inputs["photo"][0]).save(tmp_path / "photo.png")
    with chromium(tmp_path / "profile") as page:
        page.look(1280)
        page.open(f"http://{server.http}/#with-numbers/1")
        page.wait_for("document.querySelectorAll('#inputs:not([hidden]) input').length === 3")
        page.drop(tmp_path / "photo.png", "#inputs")
        for name in ("numbers", "place"):
            place = page.evaluate(
                f"[...document.querySelectorAll('#inputs strong')].findIndex((one) => one.innerText === '{name}')"
            )
            page.click(f"#inputs-fields label:nth-child({place + 1}) input")
            page.type(json.dumps(inputs[name][0].tolist()))
        page.click("#inputs-end button")
        page.wait_for("document.querySelector('#found').textContent === '1 output'")
        got = [float(one) for one in page.text("#findings li > :last-child").split(",")]
        assert page.said == []
    np.testing.assert_allclose(got, world.expected("with-numbers", inputs)[0], atol=0.01)


@pytest.mark.usefixtures("given_ceiling")
@pytest.mark.parametrize(
    ("name", "protocol"),
    [
        ("siamese", "grpc"),
        ("siamese", "tfs-rest"),
        ("with-numbers", "rest"),
        pytest.param("with-numbers", "tfs", marks=pytest.mark.slow),
        pytest.param("alone", "grpc", marks=pytest.mark.slow),
        pytest.param("alone", "tfs-rest", marks=pytest.mark.slow),
    ],
)
def test_loadtest_sends_what_metadata_declare(server: Server, tmp_path: Path, name: str, protocol: str) -> None:
    own = ["--input", "place=zeros"] if name == "with-numbers" else []  # it knows seven places
    target = addresses(server)[protocol]
    run = load(tmp_path, "--target", target, "--model", name, "--concurrency", "2", "--duration", "0.3", *own)
    assert not run.failures
    assert len(run.requests)
    assert (run.requests["status"] == 0).all()


@pytest.mark.slow
@pytest.mark.usefixtures("given_ceiling")
def test_loadtest_runs_pairs_without_a_server(world: World, tmp_path: Path) -> None:
    model = str(world.folder / "siamese.keras")
    run = load(tmp_path, "--in-process", "--model", model, "--mode", "xla,graph", "--duration", "0.3")
    assert not run.failures
    assert (run.requests["status"] == 0).all()
    assert run.equalities[0].is_equal
