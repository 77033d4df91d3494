"""A flood of one model, mode or caller holds up the others by their share of the time: in one process and in several.

Nothing here is compared with a clock, but with how much of the flood is answered meanwhile, however slow the machine.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from grpc import StatusCode as Status
from tests.integration.conftest import Brake, NoopClient, Server, StartServer

from xlaserve.programs.tf.device import usable_cores

PATIENCE_S = 60.0
FLOOD = 300
"""Batches of one image and 10 ms each: some 3 s on one lane."""
ASKED = 8
BATCH_S = "0.01"
MOST_OF_GREEDY = 8
KEYS = {"greedy": "the key of one who floods", "modest": "the key of another one"}
NOOP = {"source": "builtin:noop", "modes": ["graph", "xla"], "default_mode": "graph", "buckets": [1]}
SHAPES: dict[str, dict[str, Any]] = {
    "one process": {"fronts": 0},
    "fronts": {"fronts": 2},
    "several engines": {"fronts": 2, "engines": 2},
}


@pytest.fixture(scope="module", params=SHAPES)
def braked(
    request: pytest.FixtureRequest, start_module_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Brake]]:
    if request.param == "several engines" and usable_cores() < 2:
        pytest.skip("each engine has a core of its own")
    brake = Brake(tmp_path_factory.mktemp("brake"))
    access = tmp_path_factory.mktemp("access") / "access.yaml"
    callers: list[dict[str, Any]] = [
        {"name": name, "key_sha256": hashlib.sha256(key.encode()).hexdigest()} for name, key in KEYS.items()
    ]
    callers[0]["limits"] = [{"max_images": MOST_OF_GREEDY}]
    access.write_text(json.dumps({"callers": callers, "anybody": {}}))
    models = [{**NOOP, "name": "noop"}, {**NOOP, "name": "other"}]
    config = {"models": models, "lanes": 1, "access": str(access), **SHAPES[request.param]}
    server = start_module_server(config, env={**brake.env, "BATCH_S": BATCH_S})
    server.wait_for(lambda: server.metric("xlaserve_lanes") == config.get("engines", 1), "an engine is not ready")
    yield server, brake
    brake.release()


def ask(client: NoopClient, model: str = "noop", mode: str = "graph", caller: str | None = None) -> Any:
    """Returns a call for one image, under way."""
    request = client.request(7)
    request.model_name = model
    request.parameters["mode"].string_param = mode
    metadata = (("authorization", f"Bearer {KEYS[caller]}"),) if caller else ()
    return client.stub.ModelInfer.future(request, timeout=PATIENCE_S, metadata=metadata)


@pytest.mark.parametrize("asked", [{"model": "other"}, {"mode": "xla"}], ids=["model", "mode"])
def test_a_flood_of_one_model_or_mode_leaves_another_its_share(
    braked: tuple[Server, Brake], asked: Mapping[str, str]
) -> None:
    server, brake = braked
    flooding = [NoopClient(server.grpc) for _ in range(8)]
    brake.pull()
    flood = [ask(flooding[number % len(flooding)]) for number in range(FLOOD)]
    server.wait_for(lambda: server.metric("xlaserve_in_flight_images", model="noop") == FLOOD, "the flood has not come")
    others = [NoopClient(server.grpc) for _ in range(ASKED)]  # at both fronts
    brake.release()
    for other in others:
        assert NoopClient.outcome(ask(other, **asked), 7) is Status.OK
    answered = sum(call.done() for call in flood)
    # With its share it waits for some three batches each time, and without for the whole flood.
    assert answered < FLOOD / 2, f"{answered} of {FLOOD} were answered before {ASKED} of another one"
    assert {NoopClient.outcome(call, 7) for call in flood} == {Status.OK}


def test_a_caller_who_floods_holds_up_another_by_what_its_limit_lets_in(braked: tuple[Server, Brake]) -> None:
    server, _ = braked
    stopping, lock = threading.Event(), threading.Lock()
    counts = {Status.OK: 0, Status.RESOURCE_EXHAUSTED: 0}

    def flood(client: NoopClient) -> None:
        while not stopping.is_set():
            outcome = NoopClient.outcome(ask(client, caller="greedy"), 7)
            with lock:
                counts[outcome] += 1
            if outcome is Status.RESOURCE_EXHAUSTED:
                stopping.wait(0.02)

    flooding = [threading.Thread(target=flood, args=(NoopClient(server.grpc),)) for _ in range(6 * MOST_OF_GREEDY)]
    for thread in flooding:
        thread.start()
    waited = []
    try:
        server.wait_for(lambda: min(counts.values()) > MOST_OF_GREEDY, "the flood was not bounded")
        for _ in range(3 * ASKED):
            before = counts[Status.OK]
            assert NoopClient.outcome(ask(NoopClient(server.grpc), caller="modest"), 7) is Status.OK
            waited.append(counts[Status.OK] - before)
    finally:
        stopping.set()
        for thread in flooding:
            thread.join(PATIENCE_S)
    waited.sort()
    assert waited[len(waited) // 2] <= 3 * MOST_OF_GREEDY, waited
