from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.fakes import FakeProgram

from xlaserve.config import Bucket, Mode
from xlaserve.engine.batching.lanes import Lanes
from xlaserve.engine.batching.worker import Worker
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Compilation, Executable, Outputs, Warmed
from xlaserve.engine.warmup.beside_traffic import BesideTraffic
from xlaserve.engine.warmup.ledger import Ledger
from xlaserve.engine.warmup.verify import Verifier
from xlaserve.models.task import Classification

SMALL, LARGE = Bucket(1, 2, 2), Bucket(4, 2, 2)
AT_REST = Cost(0.001, 0.002)


def taking(seconds: float) -> Executable:
    def executable(images: Images) -> Outputs:
        time.sleep(seconds)
        return (np.zeros((len(images), 1), np.float32),)

    return executable


async def make(
    compilation: Compilation, known: tuple[Bucket, Warmed] | None, verifier: Verifier | None = None
) -> tuple[Warmed, Ledger]:
    ledger, worker = Ledger("a", "1"), Worker(1)
    with ThreadPoolExecutor(1) as compiling:
        beside = BesideTraffic(
            program=FakeProgram(lambda mode, bucket: compilation),
            lanes=Lanes(1),
            worker=worker,
            ledger=ledger,
            compiling=compiling,
            verifier=verifier,
        )
        warmed = await beside.make(Mode.XLA, LARGE, known)
    worker.stop()
    return warmed, ledger


async def test_a_cost_measured_beside_traffic_is_scaled_by_a_known_program() -> None:
    # Both take twenty times as long as at rest: the machine is busy.
    warmed, ledger = await make(
        Compilation(taking(0.06), trace_s=0.0, compile_s=0.0), (SMALL, Warmed(taking(0.02), AT_REST))
    )
    assert warmed.cost.alone_s == pytest.approx(3 * AT_REST.alone_s, rel=0.5)
    assert warmed.cost.loaded_s == pytest.approx(2 * warmed.cost.alone_s)
    (entry,) = ledger
    assert (entry.cost, entry.in_background, entry.bucket) == (warmed.cost, True, LARGE)


async def test_without_a_known_program_a_cost_is_what_was_measured() -> None:
    warmed, _ = await make(Compilation(taking(0.02), trace_s=0.0, compile_s=0.0), None)
    assert 0.02 <= warmed.cost.alone_s == warmed.cost.loaded_s


async def test_a_cost_that_the_cache_knows_is_not_measured() -> None:
    ran: list[Images] = []

    def executable(images: Images) -> Outputs:
        ran.append(images)
        return ()

    compilation = Compilation(executable, 0.0, 0.0, from_cache=True, cost=AT_REST)
    warmed, ledger = await make(compilation, (SMALL, Warmed(taking(0.0), AT_REST)))
    assert warmed.cost == AT_REST
    assert [entry.from_cache for entry in ledger] == [True]
    assert not ran


@pytest.mark.parametrize(("kept_s", "is_wrong"), [(0.6, True), (0.001, False)])
async def test_a_kept_cost_that_a_run_proves_wrong_is_measured_beside_traffic(
    kept_s: float, is_wrong: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    verifier = Verifier(task=Classification(1), reference=None, buckets=[SMALL, LARGE])
    compilation = Compilation(taking(0.02), 0.0, 0.0, from_cache=True, cost=Cost(kept_s, kept_s))
    warmed, _ = await make(compilation, None, verifier)
    assert ("the compile cache's cost of xla 4x2x2 is" in caplog.text) == is_wrong
    if is_wrong:
        assert 0.02 <= warmed.cost.alone_s < kept_s
    else:
        assert warmed.cost == compilation.cost
