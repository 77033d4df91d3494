"""What the page at `/` shows, read from versions of models that are not there."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.fakes import Clock

from xlaserve.admission.caller import CURRENT, Caller, Role
from xlaserve.config import Bucket, Decoding, Mode, ModelSettings
from xlaserve.engine.batching.costs import Turn
from xlaserve.engine.batching.model_queues import Live
from xlaserve.engine.batching.observed import Observed
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.inputs import RGB_IMAGE
from xlaserve.engine.program import Compilation
from xlaserve.engine.timings import Timings
from xlaserve.engine.warmup.difference import Difference
from xlaserve.engine.warmup.ledger import Ledger
from xlaserve.engine.warmup.verify import Verified
from xlaserve.errors import PermissionDenied
from xlaserve.images.image_input import RGB
from xlaserve.models.version import State, Version
from xlaserve.programs.tf.device import Device
from xlaserve.telemetry.failures import Failures
from xlaserve.telemetry.gpus import Gpus
from xlaserve.telemetry.metrics import SECONDS, Metrics
from xlaserve.telemetry.tally import Counted
from xlaserve.telemetry.version_metrics import ModelTelemetry
from xlaserve.wire.http.message import HttpAnswer, HttpRequest, Json
from xlaserve.wire.http.status_pages import READ_S, Status
from xlaserve.wire.shared.models import Models
from xlaserve.wire.shared.overview import Overview

BUCKETS = (Bucket(1, 8, 8), Bucket(4, 8, 8))
NONE = memoryview(b"")


class House:
    """A server of versions that tests make."""

    def __init__(self, gpus: Any = None) -> None:
        self.metrics = Metrics()
        self.failures = Failures()
        self.clock = Clock(100.0)
        self.versions: list[Version] = []
        self.reads = self.counts = 0
        directory: Any = SimpleNamespace(versions=self._versions, find=self._find)
        backend: Any = SimpleNamespace(
            directory=directory,
            device=Device("cpu", "A processor", lanes=2, threads_per_lane=1),
            unexpected=[1],
            is_watched=True,
            lane_busy_s=1.5,
            counted=Counted.here(self.metrics),
            in_flight_elsewhere=2,
            failures=iter,
            statistics=lambda version: version.telemetry.statistics,
            count=self._count,
        )
        calls: Any = SimpleNamespace(directory=directory, metrics=self.metrics, failures=self.failures, in_flight=3)
        self.status = Status(
            Overview(
                calls,
                backend,
                is_ready=lambda: True,
                addresses=lambda: {"grpc": "localhost:1", "http": "localhost:2", "metrics": None},
            ),
            Models(backend, has_model_control=False, max_message_bytes=4096),
            gpus or Gpus(None),
            self.clock,
        )

    async def _count(self) -> None:
        self.counts += 1

    def _versions(self, name: str = "") -> list[Version]:
        self.reads += not name
        return [version for version in self.versions if name in ("", version.name)]

    def _find(self, name: str, number: str) -> Version:
        return next(one for one in self.versions if (one.name, one.settings.version) == (name, number))

    def add(self, name: str, state: State = State.READY, **settings: Any) -> Version:
        configured = ModelSettings(
            name=name, source="builtin:noop", buckets=[*BUCKETS], **{"modes": ["xla"], **settings}
        )
        telemetry = ModelTelemetry(self.metrics, name, configured.version)
        version = Version(configured, telemetry, Ledger(name, configured.version), lambda version: None, state)
        version.model = cast(
            Any,
            SimpleNamespace(
                task=SimpleNamespace(name="classification"),
                buckets=BUCKETS,
                weights="random",
                calibrated="",
                pixels="[n, 4, 6, 3] rgb",
                fit="resize",
                resize="tensorflow bilinear",
                decode=Decoding.EXACT,
                reason="",
                is_narrow=False,
            ),
        )
        self.versions.append(version)
        return version

    def serve(self, version: Version, *modes: Mode) -> None:
        turns = tuple((mode, bucket, Turn(Cost(0.25, 0.5), Observed())) for mode in modes for bucket in BUCKETS)
        live = Live(waiting_images=5, queued_work_s=0.75, in_flight_images=7, in_flight_images_limit=64, turns=turns)
        version.served = cast(
            Any,
            SimpleNamespace(
                engine=SimpleNamespace(live=lambda: live),
                model=SimpleNamespace(inputs=RGB_IMAGE, image=RGB, others=(), is_of_one_image=True, names=["pixels"]),
                settings=version.settings,
                takes_unmatched=False,
                sizes={(4, 6)},
            ),
        )

    async def look(self) -> Json:
        return shown(await self.status.status(HttpRequest({}, {}, {}, NONE)))

    async def model(self, name: str, version: str = "1") -> Json:
        return shown(await self.status.model(HttpRequest({"model": name, "version": version}, {}, {}, NONE)))


def shown(answer: HttpAnswer) -> Json:
    assert ("cache-control", "no-store") in answer.headers
    found: Json = json.loads(b"".join(map(bytes, answer.parts)))
    return found


async def test_a_look_shows_the_server_its_models_and_what_failed() -> None:
    house = House()
    cats = house.add("cats")
    house.serve(cats, Mode.XLA)
    cats.telemetry.request_answered("classify", Mode.XLA, 3, Timings(total_s=0.002))
    cats.telemetry.request_failed("classify", "xla", "INTERNAL", 5.0)
    house.failures.note("classify", "INTERNAL", "<b>no</b>", model="cats")
    look = await house.look()
    assert (look["is_ready"], look["in_flight_requests"], look["compiled_while_serving"]) == (True, 5, 1)
    assert look["lanes"] == {"count": 2, "threads": 1, "busy_s": 1.5}
    assert look["addresses"] == {"grpc": "localhost:1", "http": "localhost:2", "metrics": None}
    (model,) = look["models"]
    assert (model["name"], model["version"], model["state"], model["task"]) == ("cats", "1", "READY", "classification")
    assert (model["images"], model["requests"], model["failed"]) == (3, 1, 1)
    assert (model["waiting_images"], model["queued_work_s"], model["in_flight_images_limit"]) == (5, 0.75, 64)
    # The failure's five seconds are none of an answer's.
    counts = model["total"]["counts"]
    assert (sum(counts), counts[-1], look["bounds_s"][len(counts) - 1]) == (1, 1, 0.0025)
    (failure,) = look["failures"]
    assert (failure["reason"], failure["model"], failure["status"]) == ("<b>no</b>", "cats", "INTERNAL")


async def test_however_many_ask_the_state_is_read_once_a_second() -> None:
    house = House()
    house.add("cats")
    for _ in range(10):
        await house.look()
    assert house.reads == 1
    house.clock.now += READ_S
    await house.look()
    assert house.reads == 2


async def test_progress_shows_while_a_model_compiles() -> None:
    house = House()
    version = house.add("cats", State.COMPILING)
    made = Compilation(cast(Any, None), trace_s=1.0, compile_s=2.0)
    version.ledger.record(Mode.XLA, BUCKETS[0], made, Cost(0.5, 0.75), Verified(Difference(0.25, None, 8)))
    (model,) = (await house.look())["models"]
    assert (model["state"], model["programs"], model["programs_total"]) == ("COMPILING", 1, 2)
    assert "waiting_images" not in model
    (entry,) = (await house.model("cats"))["ledger"]
    at_s = entry.pop("at_s")
    assert abs(at_s - datetime.now(UTC).timestamp()) < 60
    assert entry == {
        "mode": "xla",
        "bucket": "1x8x8",
        "trace_s": 1.0,
        "compile_s": 2.0,
        "run": {"alone_s": 0.5, "loaded_s": 0.75},
        "from_cache": False,
        "in_background": False,
        "difference": 0.25,
        "fault": "",
    }


async def test_a_models_buckets_have_what_was_measured_and_what_ran_in_them() -> None:
    house = House()
    version = house.add("cats", modes=["auto"])
    version.auto = {BUCKETS[0]: Mode.GRAPH, BUCKETS[1]: Mode.XLA}
    for mode in (Mode.XLA, Mode.GRAPH):
        for bucket in BUCKETS:
            made = Compilation(cast(Any, None), trace_s=0.0, compile_s=0.0)
            version.ledger.record(mode, bucket, made, Cost(len(mode), bucket.batch))
    house.serve(version, Mode.AUTO)
    run: Any = SimpleNamespace(gather_s=0.001, execute_s=0.01, is_finite=True)
    for _ in range(3):
        version.telemetry.batch_ran(Mode.AUTO, BUCKETS[1], 2, run)
    version.telemetry.request_answered("classify", Mode.AUTO, 2, Timings(queue_s=0.1, encode_s=0.2, total_s=0.3))
    other = house.add("dogs")
    other.telemetry.batch_ran(Mode.XLA, BUCKETS[1], 1, run)
    model = await house.model("cats")
    assert [(one["bucket"], one["mode"], one["runs_in"], one["batches"]) for one in model["buckets"]] == [
        ("1x8x8", "auto", "graph", 0),
        ("4x8x8", "auto", "xla", 3),
    ]
    assert [one["run"]["alone_s"] for one in model["buckets"]] == [len("graph"), len("xla")]
    assert model["inputs"] == [{"name": "pixels", "datatype": "UINT8", "shape": [-1, 4, 6, 3], "is_image": True}]
    assert model["buckets"][0]["turn"] == {"alone_s": 0.25, "loaded_s": 0.5}
    assert model["padded_rows"] == 6
    assert {stage: sum(found["counts"]) for stage, found in model["stages"].items()} == {
        "decode": 0,
        "queue": 1,
        "gather": 3,
        "execute": 3,
        "encode": 1,
    }
    assert model["stages"]["execute"]["total_s"] == pytest.approx(0.03)
    assert len(model["stages"]["execute"]["counts"]) <= len(SECONDS) + 1


async def test_callers_see_what_is_about_their_models_alone() -> None:
    house = House()
    for name in ("cats", "dogs"):
        house.add(name)
        house.failures.note("classify", "INTERNAL", "why", model=name)
    house.failures.note("unknown", "NOT_FOUND", "path")
    CURRENT.set(Caller("shop", frozenset({Role.OBSERVE}), ("cat*",)))
    look = await house.look()
    assert [model["name"] for model in look["models"]] == ["cats"]
    assert [failure["model"] for failure in look["failures"]] == ["cats"]
    await house.model("cats")
    with pytest.raises(PermissionDenied):
        await house.model("dogs")
    CURRENT.set(Caller("root", frozenset({Role.OBSERVE})))
    look = await house.look()
    assert [model["name"] for model in look["models"]] == ["cats", "dogs"]
    assert len(look["failures"]) == 3


async def test_the_details_of_a_model_are_read_once_a_second() -> None:
    house = House()
    version = house.add("cats")
    assert (await house.model("cats"))["warnings"] == []
    version.warnings.append("slow")
    assert (await house.model("cats"))["warnings"] == []
    house.clock.now += READ_S
    assert (await house.model("cats"))["warnings"] == ["slow"]


async def test_gpus_are_listed_with_what_they_tell() -> None:
    class FakeGpus(Gpus):
        def __init__(self) -> None:
            super().__init__(None)

        def __len__(self) -> int:
            return 1

        def levels(self) -> list[dict[str, float | str]]:
            return [{"name": "H200", "utilization_ratio": 0.5}]

    assert (await House(FakeGpus()).look())["gpus"] == [{"name": "H200", "utilization_ratio": 0.5}]
    assert (await House().look())["gpus"] == []
