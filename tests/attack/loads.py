"""Loads of models whose files change meanwhile, and of one on which the compiler crashes."""

from __future__ import annotations

import math
import shutil
import time
from functools import partial
from typing import Any, Final

import numpy as np
from tests.attack import samples, saved_models
from tests.attack.client import INFERENCE, Client
from tests.attack.registry import BUSY, LOADS_S, OK, Round, attack

from xlaserve_proto import open_inference_pb2 as pb

SIDE: Final = 16
LEVEL: Final = 9
SHIFTS: Final = (1, 2, 3)
CHANGED: Final = frozenset({OK, "UNAVAILABLE", "FAILED_PRECONDITION"})
"""The statuses with which a load may end while its files change."""
CRASHED: Final = (f"mode xla, bucket 1x{SIDE}x{SIDE}", "before it was ready; another is started")
"""How the log says what was compiled when a process ended, and of an engine that it ended."""
NOOP: Final = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1, 2]}


def _load(model: str) -> bytes:
    return pb.RepositoryModelLoadRequest(model_name=model).SerializeToString()


@attack(allowed={OK}, site="own", is_short=False, expects="were changed while it was loaded")
def weights_behind_links(round: Round) -> None:
    """Weights behind a link that leads elsewhere before and during loads: answers are of the weights that are there."""
    weights = {shift: round.folder / f"weights{shift}" for shift in SHIFTS}
    for shift, folder in weights.items():
        saved_models.write("shifted", folder, SIDE, shift)
    source, rng = round.folder / "model", round.random
    shutil.copytree(weights[SHIFTS[0]], source, ignore=shutil.ignore_patterns("variables"))

    def lead_to(shift: int) -> None:
        (link := round.folder / "link").symlink_to(weights[shift] / "variables")
        link.replace(source / "variables")

    lead_to(SHIFTS[0])
    model = {"name": "linked", "source": str(source), "modes": ["xla"], "buckets": [1]}
    # Within the server, as another process would compile for a minute on a machine that is busy.
    config = {"models": [model], "compile_cache": str(round.folder / "cache"), "load_process": False}
    server = round.start(config).wait_until_ready()
    with Client(server.grpc) as client:
        while round.has_time:
            if rng.random() < 0.5:
                load = client.send(f"{INFERENCE}RepositoryModelLoad", _load("linked"), LOADS_S)
                time.sleep(rng.uniform(0, 3))
                lead_to(rng.choice(SHIFTS))
                round.settle(load, "a load whose weights change", allowed=CHANGED)
            shift = rng.choice(SHIFTS)
            lead_to(shift)
            load = client.send(f"{INFERENCE}RepositoryModelLoad", _load("linked"), LOADS_S)
            round.settle(load, f"a load of the weights {shift}")
            call = client.send(f"{INFERENCE}ModelInfer", _message())
            round.settle(call, f"an answer of the weights {shift}", check=partial(_wrong, LEVEL + shift))


@attack(allowed=BUSY, site="own", is_short=False, expects=CRASHED)
def models_that_crash_the_compiler(round: Round) -> None:
    """A model on which XLA ends its process, at the start and by loads beside traffic: it fails alone, by its name."""
    saved_models.write("without_boxes", round.folder / "model", SIDE)
    crashing = {"name": "crashing", "source": str(round.folder / "model"), "modes": ["xla"], "buckets": [1]}
    config = {"models": [crashing, NOOP], "exit_on_model_failure": False}
    server = round.start(config).wait_until_ready()
    valid = samples.noop([LEVEL])
    with Client(server.grpc) as client:
        while round.has_time:
            load = client.send(f"{INFERENCE}RepositoryModelLoad", _load("crashing"), LOADS_S)
            calls = [client.send(valid.method, valid.message.SerializeToString()) for _ in range(16)]
            for call in calls:
                round.settle(call, "a call meanwhile", check=valid.check)
            round.settle(load, "a load of the model that crashes", allowed=frozenset({"FAILED_PRECONDITION"}))
            call = client.send(valid.method, valid.message.SerializeToString())
            round.settle(call, "a call afterwards", allowed=frozenset({OK}), check=valid.check)


def _message() -> bytes:
    message: Any = pb.ModelInferRequest(model_name="linked")
    message.inputs.add(name="pixels", datatype="UINT8", shape=(1, SIDE, SIDE, 3))
    message.raw_input_contents.append(bytes([LEVEL]) * math.prod((SIDE, SIDE, 3)))
    return bytes(message.SerializeToString())


def _wrong(expected: int, data: bytes) -> str | None:
    """Returns what is wrong with the scores of the model."""
    scores = np.frombuffer(pb.ModelInferResponse.FromString(data).raw_output_contents[0], np.float32)
    return None if np.allclose(scores, expected, atol=1e-3) else f"expected {expected}, got {scores.tolist()}"
