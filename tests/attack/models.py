"""Operators that can't decide."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tests.attack import samples
from tests.attack.client import INFERENCE, Client
from tests.attack.registry import BUSY, LOADS_S, OK, Round, attack

from xlaserve_proto import open_inference_pb2 as oip

SETTLES_S: Final = 60.0
GIVES_UP_S: Final = 30.0
SUCCEEDS_S: Final = 400.0
"""With fronts all models are loaded in another engine, beside all this: operators give up, and the last load waits."""
UNLOADED: Final = frozenset({"UNAVAILABLE", "NOT_FOUND"})


@attack(
    allowed={OK, "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "RESOURCE_EXHAUSTED", "NOT_FOUND", "ABORTED"},
    weight=2,
    is_short=False,
    most_mib=1500,
)
def reload_and_unload_storm(round: Round) -> None:
    """Loads and unloads of one model from eight operators, hung up on; its neighbours serve on as if nothing were."""
    stop = threading.Event()
    patience_s = GIVES_UP_S if round.fronts else LOADS_S
    digits, others = samples.classify([1, 2, 3]), [samples.noop([9])]

    if round.has_shapes:
        others.append(samples.shapes("Detect"))

    def operate(rng: random.Random) -> list[tuple[str, str]]:
        ended = []
        with Client(round.server.grpc) as client:
            while round.has_time:
                unloads = rng.random() < 0.3
                kind = "RepositoryModelUnload" if unloads else "RepositoryModelLoad"
                message = (oip.RepositoryModelUnloadRequest if unloads else oip.RepositoryModelLoadRequest)(
                    model_name="digits"
                )
                timeout_s = rng.choice((0.05, 0.3, patience_s))
                call = client.send(f"{INFERENCE}{kind}", message.SerializeToString(), timeout_s)
                outcome, _, details = call.outcome()
                ended.append((outcome, f"{kind} in {timeout_s} s ({details[:100]})"))
                time.sleep(rng.choice((0.0, 0.05, 0.3)))
        return ended

    def use(valid: samples.Valid) -> list[tuple[str, str | None]]:
        ended = []
        with Client(round.server.grpc) as client:
            while not stop.is_set():
                outcome, data, _ = client.send(valid.method, valid.message.SerializeToString()).outcome()
                ended.append((outcome, valid.check(data) if outcome == OK else None))
        return ended

    with ThreadPoolExecutor(16) as pool:
        operators = [pool.submit(operate, random.Random(round.random.random())) for _ in range(8)]
        neighbours = [pool.submit(use, valid) for valid in others]
        users = [pool.submit(use, digits) for _ in range(2)]
        for operator in operators:
            for outcome, what in operator.result():
                round.count(outcome, what)
        stop.set()
        for each in neighbours:
            for outcome, wrong in each.result():
                round.count(outcome, "a neighbour", BUSY, wrong)
        for each in users:
            for outcome, wrong in each.result():
                round.count(outcome, "the model itself", BUSY | UNLOADED, wrong)

    _load_again(round)


def _load_again(round: Round) -> None:
    """Has the model serve again: the last load wins over any that was under way."""
    message = oip.RepositoryModelLoadRequest(model_name="digits").SerializeToString()
    patience_s = SUCCEEDS_S if round.fronts else LOADS_S
    with Client(round.server.grpc) as client:
        give_up_at = time.monotonic() + SETTLES_S
        while True:
            outcome, _, details = client.send(f"{INFERENCE}RepositoryModelLoad", message, patience_s).outcome()
            if outcome == OK or time.monotonic() > give_up_at:
                round.count(outcome, f"the last load ({details[:100]})", frozenset({OK}))
                return
            time.sleep(0.5)
