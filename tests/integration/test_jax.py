"""Models of JAX as docs/jax-and-pytorch.md makes them: a server answers as JAX does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from jax import export
from numpy.typing import NDArray
from tests.docs.blocks import blocks
from tests.docs.reader import ACTIVATION
from tests.integration.conftest import Server, StartServer

from xlaserve_client import VisionClient

PAGE = "docs/jax-and-pytorch.md"
NAMES = ("net", "keras")
PIXELS = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's files are made."""
    folder = tmp_path_factory.mktemp("jax")
    typed = [block for language, block in blocks(PAGE) if language == "python"]
    for block in typed:
        subprocess.run([sys.executable, "-c", block], cwd=folder, timeout=120, check=True)
    shown = next(block for language, block in blocks(PAGE) if language == "sh" and "import" in block)
    command = shown.replace(ACTIVATION, "")
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-e", "-c", command], cwd=folder, env={**os.environ, "PATH": bin_first}, timeout=120, check=True
    )
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, start_module_server: StartServer) -> Server:
    (shown,) = (block for language, block in blocks(PAGE) if language == "yaml")
    models = yaml.safe_load(shown)["models"]
    return start_module_server(
        {"models": [{**model, "source": str(folder / model["source"]), "modes": ["xla", "graph"]} for model in models]}
    )


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[VisionClient]:
    with VisionClient(server.grpc, deadline_s=60) as client:
        yield client


def by_jax(folder: Path, name: str) -> NDArray[Any]:
    """Returns JAX's own answers to PIXELS, as `preprocess: unit` scales them."""
    exported = export.deserialize(bytearray((folder / f"{name}.jax").read_bytes()))
    return np.asarray(exported.call(PIXELS.astype(np.float32) / 255))


@pytest.mark.parametrize("mode", ["xla", "graph"])
@pytest.mark.parametrize("name", NAMES)
def test_a_server_answers_as_jax_does(folder: Path, client: VisionClient, name: str, mode: str) -> None:
    wanted = by_jax(folder, name)
    assert wanted.std(axis=0).min() > 0
    for count in (1, 3, 4):  # alone, padded, and a bucket's number
        scores = client.infer(PIXELS[:count], model=name, mode=mode).outputs["scores"]
        np.testing.assert_allclose(scores, wanted[:count], atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_what_shares_a_batch_with_an_image_does_not_change_its_answer(client: VisionClient, name: str) -> None:
    alone = client.infer(PIXELS[:1], model=name).outputs["scores"]
    for garbage in (np.zeros_like(PIXELS[1:]), np.full_like(PIXELS[1:], 255), PIXELS[1:]):
        together = client.infer(np.concatenate([PIXELS[:1], garbage]), model=name).outputs["scores"]
        np.testing.assert_allclose(together[:1], alone, atol=1e-6)
