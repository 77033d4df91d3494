"""Images of ever new sizes, for a model that takes them all."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from tests.attack.client import INFERENCE, Client
from tests.attack.registry import BUSY, OK, Round, attack

from xlaserve_proto import open_inference_pb2 as oip

RESOLUTIONS: Final = [[24, 24], [24, 32]]
MAX_NEW: Final = 6
OTHERS: Final = [[20, 20], [28, 20], [20, 28], [36, 36], [40, 24], [24, 40]]
TOLERANCE: Final = 1e-3
SAVE: Final = """
import sys
import warnings

from xlaserve.models.networks.keras_runtime import keras

warnings.simplefilter("ignore")
keras.utils.set_random_seed(3)
pixels = keras.Input((None, None, 3))
x = keras.layers.Rescaling(1 / 255)(pixels)
for filters in (8, 16):
    x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
keras.Model(pixels, keras.layers.Dense(5)(keras.layers.GlobalAveragePooling2D()(x))).save(sys.argv[1])
"""


def request(images: np.ndarray) -> bytes:
    """Returns the message that asks for `images`."""
    message = oip.ModelInferRequest(model_name="any")
    message.inputs.add(name="pixels", datatype="UINT8", shape=images.shape)
    message.raw_input_contents.append(images.tobytes())
    return message.SerializeToString()


def answer(data: bytes) -> np.ndarray:
    """Returns the scores of a response, `[n, classes]`."""
    response = oip.ModelInferResponse.FromString(data)
    return np.frombuffer(response.raw_output_contents[0], np.float32).reshape(response.outputs[0].shape)


@attack(allowed=BUSY, site="sizes", weight=2, is_short=False, most_mib=1000)
def new_sizes_at_once(round: Round) -> None:
    """Sizes that nobody asked for before, several at once, hung up on and asked for again; answers stay the same."""
    noise = np.random.default_rng(round.random.randrange(2**32))
    images = {tuple(size): noise.integers(0, 256, (3, *size, 3), dtype=np.uint8) for size in (*RESOLUTIONS, *OTHERS)}
    first: dict[tuple[int, ...], np.ndarray] = {}

    def ask(number: int, rng: random.Random) -> list[tuple[str, str, frozenset[str], str | None]]:
        ended = []
        with Client(round.server.grpc) as client:
            while round.has_time:
                size = rng.choice(list(images))
                count = rng.randint(1, 3)
                call = client.send(f"{INFERENCE}ModelInfer", request(images[size][:count]))
                is_cancelled = rng.random() < 0.2
                if is_cancelled:
                    call.cancel()
                outcome, data, details = call.outcome()
                wrong = None
                if outcome == OK:
                    scores = answer(data)
                    known = first.setdefault((*size, count), scores)
                    wrong = None if np.allclose(scores, known, atol=TOLERANCE) else f"{scores} and before {known}"
                allowed = BUSY | {"CANCELLED"} if is_cancelled else BUSY
                ended.append((outcome, f"{count} images of {size} ({details[:100]})", allowed, wrong))
        return ended

    with ThreadPoolExecutor(12) as pool:
        asking = [pool.submit(ask, number, random.Random(round.random.random())) for number in range(12)]
        for each in asking:
            for outcome, what, allowed, wrong in each.result():
                round.count(outcome, what, allowed, wrong)


@attack(allowed={OK, "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}, site="sizes", is_short=False, most_mib=1000)
def more_sizes_than_there_may_be(round: Round) -> None:
    """Each request of another size, far more sizes than are compiled: served or refused, never waited for."""
    with Client(round.server.grpc) as client:
        number = 0
        while round.has_time:
            number += 1
            height, width = (round.random.randint(1, 200) for _ in range(2))
            images: Any = np.zeros((1, height, width, 3), np.uint8)
            call = client.send(f"{INFERENCE}ModelInfer", request(images))
            round.settle(call, f"size {number}: {height} x {width}")
