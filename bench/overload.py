"""What a server answers in time when more is asked of it than it can do.

Requests come at random times at multiples of the measured capacity, each with a deadline. Generator and server share
the machine: to send and to refuse takes processor time that a model on the CPU lacks. So the target is for the timed
model, which sleeps, as if it ran on a device of its own.
"""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Final, NamedTuple

import grpc
import numpy as np

from bench import processes
from bench.figures import Figure, at_most, ratio
from bench.generator import RAMP, Answered, closed_loop, open_loop, pixels_request
from bench.trials import interleaved
from xlaserve_proto import open_inference_pb2 as pb

SIDE: Final = 224
DEADLINE_S: Final = 0.5
TIMES: Final = (0.5, 0.9, 1.0, 2.0, 5.0)
MIN_GOODPUT: Final = 0.95
MAX_BLOCKS: Final = 3
MAX_REFUSAL_MS: Final = 5.0
CONCURRENCY: Final = 32
_REFUSALS: Final = re.compile(r'xlaserve_refusal_seconds_bucket\{le="([^"]+)",.*reason="deadline".*\} (\S+)')


def overload(blocks: int, block_s: float) -> list[Figure]:
    """Requests/s answered in time at five times the capacity over the most at any load, refusals' and answers' times,
    and shares of priorities."""
    buckets = (1, 4, 8)
    timed = {"models": [{"name": "model", "source": "builtin:noop", "buckets": buckets}]}
    mobile = {"models": [processes.application("MobileNetV2", modes=("xla",), buckets=buckets)]}
    blocks = min(blocks, MAX_BLOCKS)
    figures = _of("timed model", timed, blocks, block_s, "bench.timed_model", least=MIN_GOODPUT)
    return figures + _of("MobileNetV2", mobile, blocks, block_s, "xlaserve", least=None)


class Block(NamedTuple):
    """What came of the requests of one load."""

    good_per_s: float
    """Answered within the deadline, since they were due."""
    late: float
    """Requests that were accepted and not answered in time, over the accepted."""
    slowest_s: float
    """99th percentile of what accepted requests took until they were answered or given up."""
    refused: float
    """Requests that were refused, over all."""
    refusals_ms: tuple[float, float]
    """Median and 99th percentile of what refusals took, as the client saw them; 0 without any."""
    server_cpu: float
    """Processors that the server used."""
    client_cpu: float


def _of(
    name: str, config: Mapping[str, object], blocks: int, block_s: float, module: str, *, least: float | None
) -> list[Figure]:
    payload = pixels_request("model", SIDE)
    figures = []
    with processes.xlaserve(config, module=module) as server:
        closed_loop(server.address, payload, CONCURRENCY, seconds=block_s)
        capacity = closed_loop(server.address, payload, CONCURRENCY, seconds=block_s).per_s
        print(f"  {name}: {capacity:.1f} images/s at saturation", flush=True)
        loads: dict[str, Callable[[], Block]] = {
            f"{times:g}": partial(_block, server, payload, times * capacity, block_s) for times in TIMES
        }
        found = interleaved(loads, blocks)
        for times, arm in found.items():
            _say(f"{name} at {times} times", arm)
        most = [max(arm[block].good_per_s for arm in found.values()) for block in range(blocks)]
        at_five = found["5"]
        good = [block.good_per_s for block in at_five]
        figures.append(ratio(f"goodput at 5 times the capacity / most, {name}", good, most, least))
        slowest = [block.slowest_s / DEADLINE_S for block in at_five]
        figures.append(at_most(f"p99 of accepted requests / deadline, {name}", slowest, 1.0))
        for column, percentile in enumerate(("p50", "p99")):
            seen = [block.refusals_ms[column] for block in at_five]
            figures.append(at_most(f"{percentile} of refusals at the client, ms, {name}", seen, None))
        slow = [_slow_refusals(server)]
        figures.append(at_most(f"refusals of more than {MAX_REFUSAL_MS:g} ms at the server, {name}", slow, 0.01))
        figures += _priorities(name, server.address, capacity, blocks, block_s)
    return figures


def _block(server: processes.Server, payload: bytes, rate: float, seconds: float) -> Block:
    sending_s = (1 + RAMP) * seconds
    before_s = server.cpu_s(), time.process_time()
    answered = open_loop(server.address, [payload], rate, sending_s, DEADLINE_S)
    used = (server.cpu_s() - before_s[0]) / sending_s, (time.process_time() - before_s[1]) / sending_s
    return _summary([one for one in answered if one.due_s >= RAMP * seconds], seconds, *used)


def _summary(answered: Sequence[Answered], seconds: float, server_cpu: float, client_cpu: float) -> Block:
    """Returns what came of requests that were due in a window of `seconds`. Failures but refusals count as late."""
    refused_ms = [one.seconds * 1000 for one in answered if one.status is grpc.StatusCode.RESOURCE_EXHAUSTED]
    accepted = [one for one in answered if one.status is not grpc.StatusCode.RESOURCE_EXHAUSTED]
    if not accepted:
        raise RuntimeError("all requests were refused")
    good = sum(one.status is grpc.StatusCode.OK and one.seconds <= DEADLINE_S for one in accepted)
    return Block(
        good / seconds,
        1 - good / len(accepted),
        float(np.percentile([one.seconds for one in accepted], 99)),
        len(refused_ms) / len(answered),
        (float(np.percentile(refused_ms, 50)), float(np.percentile(refused_ms, 99))) if refused_ms else (0.0, 0.0),
        server_cpu,
        client_cpu,
    )


def _say(name: str, blocks: Sequence[Block]) -> None:
    def middle(of: Callable[[Block], float]) -> float:
        return median(map(of, blocks))

    print(
        f"  {name}: {middle(lambda block: block.good_per_s):.1f} answered in time a second,"
        f" {middle(lambda block: block.refused):.1%} refused, p50 {middle(lambda block: block.refusals_ms[0]):.1f} ms;"
        f" of the accepted {middle(lambda block: block.late):.1%} late,"
        f" p99 {middle(lambda block: block.slowest_s) * 1000:.0f} ms;"
        f" processors: server {middle(lambda block: block.server_cpu):.2f},"
        f" client {middle(lambda block: block.client_cpu):.2f}",
        flush=True,
    )


def _slow_refusals(server: processes.Server) -> float:
    """Returns the share of the refusals that took the server longer than MAX_REFUSAL_MS, of those on arrival."""
    with urllib.request.urlopen(f"http://{server.http}/metrics", timeout=10) as answer:
        counts = {float(bound): float(count) for bound, count in _REFUSALS.findall(answer.read().decode())}
    return 1 - counts[MAX_REFUSAL_MS / 1000] / counts[float("inf")]


def _priorities(name: str, address: str, capacity: float, blocks: int, block_s: float) -> list[Figure]:
    """Returns how much more of the highest priority is answered than of the lowest, at five times the capacity."""
    payloads = [_with_priority(priority) for priority in (1, 3)]
    highest, lowest = [], []
    for _ in range(blocks):
        answered = open_loop(address, payloads, 5 * capacity, (1 + RAMP) * block_s, DEADLINE_S)
        counted = [one for one in answered if one.due_s >= RAMP * block_s and one.status is grpc.StatusCode.OK]
        highest.append(sum(one.payload == 0 for one in counted))
        lowest.append(sum(one.payload == 1 for one in counted))
    return [ratio(f"goodput of priority 1 / 3 at 5 times the capacity, {name}", highest, lowest, 3.0)]


def _with_priority(priority: int) -> bytes:
    request = pb.ModelInferRequest.FromString(pixels_request("model", SIDE))
    request.parameters["priority"].int64_param = priority
    return request.SerializeToString()
