"""A model that answers fewer rows than it was given images, for images that its warm-up does not have."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from tests.attack import saved_models
from tests.attack.client import INFERENCE, Client
from tests.attack.registry import OK, Round, attack

from xlaserve_proto import open_inference_pb2 as oip

MODES: Final = ("xla", "graph", "eager")
CLIENTS: Final = 4
SIDE: Final = 16
MARK: Final = 77
"""The level of the images that the model leaves out."""
MARKED: Final = 0.75
"""The share of the rounds that have one for certain."""
TOLD: Final = "model rows"
"""How the log names the batches and requests that were not answered; no traceback has it."""


@attack(allowed={OK, "INTERNAL"}, site="own", is_short=False, most_mib=1500, expects=TOLD)
def images_that_a_model_leaves_out(round: Round) -> None:
    """Four clients share batches with images that the model has no row for: each gets its own answer, or an error."""
    saved_models.write("leaving_out", round.folder / "model", SIDE, MARK)
    server = round.start({"models": [_model(round.folder / "model")]}).wait_until_ready()
    with Client(server.grpc) as client:
        while round.has_time:
            mode = round.random.choice(MODES)
            levels = [round.random.choice((MARK, 10, 100, 200)) for _ in range(CLIENTS)]
            if round.random.random() < MARKED:
                levels[round.random.randrange(CLIENTS)] = MARK
            asked = [client.send(f"{INFERENCE}ModelInfer", _message(level, mode)) for level in levels]
            for level, call in zip(levels, asked, strict=True):
                allowed = frozenset({OK, "INTERNAL"} if MARK in levels else {OK})
                what = f"an image of {level} among {levels} in {mode}"
                outcome = round.settle(call, what, allowed=allowed, check=partial(_wrong, level))
                if level == MARK and outcome == OK:
                    round.tally.fault(f"{what}: it was answered, and the model has no row for it")


def _model(folder: Path) -> dict[str, Any]:
    buckets = [1, 2, CLIENTS]
    return {"name": "rows", "source": str(folder), "modes": MODES, "buckets": buckets, "max_queue_delay_ms": 20}


def _message(level: int, mode: str) -> bytes:
    message = oip.ModelInferRequest(model_name="rows")
    message.parameters["mode"].string_param = mode
    message.inputs.add(name="pixels", datatype="UINT8", shape=(1, SIDE, SIDE, 3))
    message.raw_input_contents.append(bytes([level]) * math.prod((SIDE, SIDE, 3)))
    return message.SerializeToString()


def _wrong(level: int, data: bytes) -> str | None:
    """Returns what is wrong with an answer, which is the level of each colour."""
    scores = np.frombuffer(oip.ModelInferResponse.FromString(data).raw_output_contents[0], np.float32)
    return None if np.allclose(scores, [level] * 3, atol=1e-3) else f"expected {level}, got {scores.tolist()}"
