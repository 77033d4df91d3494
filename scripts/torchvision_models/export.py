"""Exports a model of torchvision with random weights, and saves what PyTorch answers: `... .export NAME SIDE FOLDER`.

A program of its own, as PyTorch and TensorFlow crash in one process.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from scripts.torchvision_models import record
from scripts.torchvision_models.record import BATCH, DETECTION, EXPORT, FACTS, PIXELS, WANTED
from torchvision.models.detection import FCOS, RetinaNet
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.ssd import SSD

MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
TINY = 1e-3
"""The largest weight of layers that do nothing before they are trained."""


class Candidates(torch.nn.Module):  # type: ignore[misc] # PyTorch has no types here
    """A detector of one stage up to its boxes: non-maximum suppression, whose result has any number of rows, is the
    server's.

    Images `[n, 3, side, side]`, scaled as for classifiers, in; `boxes` `[n, k, 4]` in pixels and `scores`
    `[n, k, classes]` out.
    """

    def __init__(self, detector: Any, side: int) -> None:
        super().__init__()
        self.detector = detector
        image = torch.zeros(1, 3, side, side)
        with torch.no_grad():
            features = list(detector.backbone(image).values())
            (anchors,) = detector.anchor_generator(ImageList(image, [(side, side)]), features)
        self.register_buffer("anchors", anchors)

    def forward(self, images: Any) -> dict[str, Any]:
        """Returns boxes and scores."""
        features = list(self.detector.backbone(images).values())
        found = self.detector.head(features)
        codes, logits = found["bbox_regression"], found["cls_logits"]
        anchors = self.anchors.expand(codes.shape[0], -1, -1)
        if isinstance(self.detector, FCOS):
            boxes = self.detector.box_coder.decode(codes, anchors)
            scores = torch.sqrt(torch.sigmoid(logits) * torch.sigmoid(found["bbox_ctrness"]))
        else:
            flat = self.detector.box_coder.decode_single(codes.reshape(-1, 4), anchors.reshape(-1, 4))
            boxes = flat.reshape(codes.shape)
            is_ssd = isinstance(self.detector, SSD)  # whose first class is the background
            scores = torch.softmax(logits, -1)[..., 1:] if is_ssd else torch.sigmoid(logits)
        return {"boxes": boxes, "scores": scores}


class WholeDetector(torch.nn.Module):  # type: ignore[misc]
    """A detector as torchvision has it, of one image."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Any) -> Any:
        """Returns the objects in an image."""
        return self.detector([images[0]])[0]


def build(name: str, side: int) -> Any:
    """Returns a model of one tensor of images, for inference."""
    torch.manual_seed(0)
    options: dict[str, object] = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    module = getattr(torchvision.models, "detection" if name in DETECTION else "segmentation", None)
    options |= {"weights_backbone": None} if hasattr(module, name) else {}
    model = torchvision.models.get_model(name, weights=None, **options).eval()
    if name not in DETECTION:
        return model
    return Candidates(model, side).eval() if isinstance(model, FCOS | SSD | RetinaNet) else WholeDetector(model).eval()


def calibrate(model: Any, images: Any) -> None:
    """Has numbers in a network of random weights neither vanish nor explode, which any program would compute alike.

    Batch normalization takes its mean and variance from `images`; weights that begin at almost zero become random.
    """
    with torch.no_grad():
        for weights in model.parameters():
            if weights.abs().max() < TINY:
                weights.normal_(std=0.1)
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d)]
    for layer in layers:
        layer.momentum = None  # the mean of all batches, of which there is one
        layer.reset_running_stats()
        layer.train()
    with torch.no_grad():
        model(images)
    for layer in layers:
        layer.eval()


def main(name: str, side: int, folder: Path) -> None:
    """Writes the export, the pixels, PyTorch's answers and facts about the model."""
    torch.set_num_threads(2)
    started = time.monotonic()
    model = build(name, side)
    pixels = np.random.default_rng(0).integers(0, 256, (BATCH, side, side, 3), np.uint8)
    scaled = ((pixels.astype(np.float32) / 255 - MEAN) / DEVIATION).astype(np.float32)
    images = torch.from_numpy(scaled.transpose(0, 3, 1, 2).copy())
    calibrate(model, images)
    with torch.no_grad():
        wanted = model(images)
        program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, folder / EXPORT)
    named = dict(wanted) if isinstance(wanted, dict) else {"output": wanted}
    np.savez(folder / WANTED, **{key: value.numpy() for key, value in named.items()})
    np.save(folder / PIXELS, pixels)
    spread = [abs(value[0] - value[1]).max() / abs(value).max() for value in named.values()]
    with torch.no_grad():
        exact = model.double()(images.double())
    exact = exact if isinstance(exact, dict) else {"output": exact}
    rounding = [abs(exact[key] - value).max() / abs(exact[key]).max() for key, value in named.items()]
    facts = {
        "spread": float(min(spread)),
        "rounding": float(max(rounding)),
        "parameters": sum(one.numel() for one in model.parameters()),
        "versions": {"torch": torch.__version__, "torchvision": torchvision.__version__},
        "exported_s": time.monotonic() - started,
    }
    (folder / FACTS).write_text(json.dumps(facts))


if __name__ == "__main__":
    with record.telling():
        main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
