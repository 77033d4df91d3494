"""A model of PyTorch as docs/jax-and-pytorch.md imports it: a server answers as PyTorch does.

Needs PyTorch and torchvision, which are not among the development packages.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.docs.blocks import blocks
from tests.integration.conftest import StartServer

from xlaserve_client import VisionClient

PAGE = "docs/jax-and-pytorch.md"
PIXELS = np.random.default_rng(0).integers(0, 256, (5, 224, 224, 3), np.uint8)
ASK_TORCH = """
import numpy as np

pixels = np.load("pixels.npy").astype(np.float32) / 255
images = ((pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]).transpose(0, 3, 1, 2).astype(np.float32)
with torch.no_grad():
    np.save("scores.npy", model(torch.from_numpy(images.copy())).numpy())
"""
EXPORT_CONSTANT = """
import numpy as np
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 3)
        self.norm = torch.nn.BatchNorm2d(8)
        self.norm.running_mean.normal_()

    def forward(self, images):
        weights = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])  # which is lifted out of the code
        return self.norm(self.convolution(images)).mean((2, 3)) * weights


model = Net().eval()
images = torch.randn(2, 3, 16, 16)
program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
torch.export.save(program, "net.pt2")
np.savez("asked.npz", images=images.numpy(), wanted=model(images).detach().numpy())
"""
ASK_IMPORTED = """
import numpy as np
import tensorflow as tf

asked = np.load("asked.npz")
serve = tf.saved_model.load("net").signatures["serving_default"]
(got,) = serve(tf.constant(asked["images"].transpose(0, 2, 3, 1))).values()
np.testing.assert_allclose(got, asked["wanted"], atol=1e-4)
"""
missing = [name for name in ("torch", "torchax", "torchvision") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")
def test_a_server_answers_as_torch_does(tmp_path: Path, start_server: StartServer) -> None:
    (export,) = (block for language, block in blocks(PAGE) if language == "py")
    np.save(tmp_path / "pixels.npy", PIXELS)
    # Beside TensorFlow, PyTorch crashes.
    code = export.replace('weights="DEFAULT"', "weights=None") + ASK_TORCH
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=200, check=True)
    command = [sys.executable, "-m", "xlaserve", "import", "resnet18.pt2"]
    imported = subprocess.run(command, cwd=tmp_path, timeout=200, check=True, capture_output=True, text=True)
    assert "StableHLO" not in imported.stderr  # it is translated, and lowered where it is served
    wanted = np.load(tmp_path / "scores.npy")

    model = {"name": "resnet18", "source": str(tmp_path / "resnet18"), "preprocess": "torch", "buckets": [1, 4]}
    server = start_server({"models": [{**model, "modes": ["xla", "graph"]}]})
    with VisionClient(server.grpc, deadline_s=60) as client:
        for mode in ("xla", "graph"):
            for count in (1, 3, 5):
                scores = client.infer(PIXELS[:count], model="resnet18", mode=mode).scores
                np.testing.assert_allclose(scores, wanted[:count], atol=1e-4)


@pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")
def test_constants_lifted_by_torch_are_not_taken_for_weights(tmp_path: Path) -> None:
    for command in (
        ["-c", EXPORT_CONSTANT],
        ["-m", "xlaserve", "import", "net.pt2"],
        ["-c", ASK_IMPORTED],
    ):
        subprocess.run([sys.executable, *command], cwd=tmp_path, timeout=200, check=True)
