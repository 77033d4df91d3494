from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from jax import export
from jax import numpy as jnp

from xlaserve.commands import import_config
from xlaserve.commands.command import Invocation
from xlaserve.config import Bucket, Mode, ModelSettings, Settings
from xlaserve.errors import ConfigError
from xlaserve.models import catalog


def forward(params: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    return images.sum((1, 2)) @ params["dense"]


PARAMS = {"dense": np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    images = jax.ShapeDtypeStruct((*export.symbolic_shape("b"), 8, 8, 3), jnp.float32)
    shapes = {"dense": jax.ShapeDtypeStruct((3, 4), jnp.float32)}
    (file := tmp_path / "net.jax").write_bytes(export.export(jax.jit(forward))(shapes, images).serialize())
    np.savez(tmp_path / "net.npz", *jax.tree.leaves(PARAMS))
    return file


def run(**own: Any) -> int:
    given = {"out": None, "weights": None, "batching_parameters": None, **own}
    return import_config.run(Invocation(argparse.Namespace(**given), Settings(), Settings))


def test_an_imported_model_is_loaded_without_jax(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = file.parent
    command = [sys.executable, "-m", "xlaserve", "import", "net.jax", "--weights", "net.npz", "--out", "nets/1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout) == {"models": [{"name": "net", "source": "nets/1/"}]}

    monkeypatch.setitem(sys.modules, "jax", None)
    images = np.random.default_rng(1).integers(0, 256, (2, 8, 8, 3), np.uint8)
    program = catalog.load(ModelSettings(name="net", source=str(folder / "nets" / "1"))).program
    (scores,) = program.compile(Mode.XLA, Bucket(2, 8, 8)).executable(images)
    np.testing.assert_allclose(scores, images.sum((1, 2)) @ PARAMS["dense"], rtol=1e-5)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({"file": "net.jax"}, "net.jax: importing it needs jax; install xlaserve[jax]"),
        ({"file": "net.pt2"}, "net.pt2: importing it needs jax, torch, torchax; install xlaserve[torch]"),
        ({"file": "other.jax"}, "other.jax: expected a file, got nothing"),
        ({"file": "net.jax", "out": "."}, "--out: expected a folder that is to be made, got ., which exists"),
        ({"file": "net.pt2", "weights": "net.npz"}, "--weights: expected none, as net.pt2 has its own, got net.npz"),
    ],
)
def test_what_can_not_be_imported_says_why(
    own: dict[str, str], expected: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    Path("net.pt2").touch()
    for package in ("jax", "torch", "torchax"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as failure:
        run(**{name: Path(value) for name, value in own.items()})
    assert str(failure.value) == expected
