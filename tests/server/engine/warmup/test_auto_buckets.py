from __future__ import annotations

import logging
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from xlaserve.config import MIB, AutoBuckets, Bucket, Mode, ModelSettings
from xlaserve.engine import memory
from xlaserve.engine.buckets.demand import Demand, Resolution, read, write
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Outputs, Warmed
from xlaserve.engine.warmup.auto_buckets import Programs, warm_up_auto
from xlaserve.errors import ModelFailed

SQUARE, WIDE = (8, 8), (8, 16)


class Executable:
    def __call__(self, images: Images) -> Outputs:
        raise AssertionError("nothing is run but by the warm-up")


class WarmUp:
    """Compiles in `compile_s` of its own clock; what batch 6 runs costs twice what it should."""

    def __init__(self, compile_s: float = 1.0) -> None:
        self.now = 0.0
        self.compiled: list[tuple[Mode, Bucket]] = []
        self.made: list[weakref.ref[Executable]] = []
        self._compile_s = compile_s

    def __call__(self, modes: Iterable[Mode], buckets: Iterable[Bucket]) -> Programs:
        buckets = list(buckets)
        return {(mode, bucket): self._compile(mode, bucket) for mode in modes for bucket in buckets}

    def _compile(self, mode: Mode, bucket: Bucket) -> Warmed:
        self.now += self._compile_s
        self.compiled.append((mode, bucket))
        executable = Executable()
        self.made.append(weakref.ref(executable))
        cost_s = (1.0 + 0.5 * bucket.batch) * (2.0 if bucket.batch == 6 else 1.0)
        # Graph mode is better at single images.
        cost_s *= 0.5 if mode is Mode.GRAPH and bucket.batch == 1 else 1.2 if mode is Mode.GRAPH else 1.0
        return Warmed(executable, Cost(cost_s, cost_s))

    def auto(
        self,
        *resolutions: Resolution,
        modes: tuple[Mode, ...] = (Mode.XLA,),
        default_mode: Mode = Mode.XLA,
        demands: dict[Resolution, Demand] | None = None,
        corrected: Callable[[Programs], Programs] = lambda programs: programs,
        **settings: Any,
    ) -> Programs:
        limits = AutoBuckets(**settings)
        buckets = [Bucket(batch, *size) for size in resolutions or (SQUARE,) for batch in limits.candidates]
        offered = tuple(dict.fromkeys((*modes, default_mode)))
        model = ModelSettings(
            name="model", source="fake", modes=offered, default_mode=default_mode, auto_buckets=limits
        )
        return warm_up_auto(self, model, buckets, demands or {}, corrected=corrected, clock=lambda: self.now)


def batches(programs: Programs, mode: Mode = Mode.XLA, size: Resolution = SQUARE) -> list[int]:
    return sorted(bucket.batch for of, bucket in programs if of is mode and bucket[1:] == size)


def test_worthwhile_candidates_are_kept_and_the_others_dropped() -> None:
    warm_up = WarmUp()
    programs = warm_up.auto()
    assert sorted(bucket.batch for _, bucket in warm_up.compiled) == [1, 2, 3, 4, 6, 8, 12, 16]
    kept = batches(programs)
    assert 6 not in kept
    assert {1, 16} <= set(kept)
    assert len([made for made in warm_up.made if made() is not None]) == len(kept) <= 6


def test_no_more_are_kept_than_are_allowed() -> None:
    assert len(batches(WarmUp().auto(max_buckets=2))) == 2


def test_candidates_are_compared_by_costs_that_were_corrected() -> None:
    compared: list[list[int]] = []

    def corrected(programs: Programs) -> Programs:
        compared.append(batches(programs))
        return programs | {(Mode.XLA, Bucket(4, *SQUARE)): Warmed(Executable(), Cost(1e-3, 1e-3))}

    assert batches(WarmUp().auto(corrected=corrected, max_buckets=1)) == [4]
    assert compared == [[1, 2, 3, 4, 6, 8, 12, 16]]


def test_recorded_demand_decides_at_its_own_resolution() -> None:
    programs = WarmUp().auto(SQUARE, WIDE, demands={WIDE: Counter({3: 100})})
    assert batches(programs, size=WIDE) == [3]
    assert batches(programs, size=SQUARE) == batches(WarmUp().auto())


def test_only_the_default_mode_is_measured_and_the_others_get_its_set() -> None:
    warm_up = WarmUp()
    programs = warm_up.auto(modes=(Mode.GRAPH, Mode.XLA), default_mode=Mode.XLA)
    kept = batches(programs)
    assert batches(programs, Mode.GRAPH) == kept
    assert [bucket.batch for mode, bucket in warm_up.compiled if mode is Mode.GRAPH] == kept


def test_with_auto_as_default_a_candidate_costs_what_its_fastest_mode_does() -> None:
    # In XLA a demand of 2 is cheapest as one batch of 2 (2.0 s), in graph mode single images take 0.75 s each.
    demands = {SQUARE: Counter({1: 1, 2: 100})}
    assert batches(WarmUp().auto(demands=demands, max_buckets=1)) == [2]
    modes = (Mode.XLA, Mode.GRAPH)
    programs = WarmUp().auto(demands=demands, max_buckets=1, modes=modes, default_mode=Mode.AUTO)
    assert batches(programs) == batches(programs, Mode.GRAPH) == [1]


def test_after_the_time_limit_the_best_measured_candidates_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    warm_up = WarmUp(compile_s=10.0)
    programs = warm_up.auto(max_compile_s=25.0)
    assert [bucket.batch for _, bucket in warm_up.compiled] == [1, 16, 4]
    assert set(batches(programs)) <= {1, 4, 16}
    assert "max_compile_s (25) is over with 3 of 8 candidates measured" in caplog.text


def test_resolutions_share_the_time_and_each_has_a_bucket_at_least() -> None:
    warm_up = WarmUp(compile_s=10.0)
    programs = warm_up.auto(SQUARE, WIDE, max_compile_s=40.0)
    assert [bucket[1:] for _, bucket in warm_up.compiled] == [SQUARE, SQUARE, WIDE, WIDE]
    late = WarmUp(compile_s=1000.0).auto(SQUARE, WIDE, max_compile_s=1.0)
    assert batches(late) == batches(late, size=WIDE) == [1]
    assert len(programs) >= 2


def test_what_is_kept_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up = WarmUp()

    def measure(make: Any) -> Any:
        made = make()
        return made, memory.Taken(held_bytes=MIB, run_bytes=10 * MIB * warm_up.compiled[-1][1].batch)

    monkeypatch.setattr(memory, "measure", measure)
    assert max(batches(warm_up.auto(max_memory_mib=90))) == 8
    with pytest.raises(ModelFailed, match="max_memory_mib: expected at least 11 for one bucket of 8x8, got 5"):
        WarmUp.auto(warm_up, max_memory_mib=5)


def test_unmeasurable_memory_fails_a_model_that_has_a_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(make: Any) -> Any:
        raise FileNotFoundError(2, "No such file")

    monkeypatch.setattr(memory, "measure", measure)
    assert WarmUp().auto()
    with pytest.raises(ModelFailed, match="max_memory_mib: memory can't be measured"):
        WarmUp().auto(max_memory_mib=5)


def test_the_choice_is_logged_with_what_it_gains(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    WarmUp().auto(demands={SQUARE: Counter({3: 100})})
    # One batch of 3 is 2.5 s, one of 4 is 3 s.
    assert "buckets 3 of 8 measured at 8x8: 833.37 ms expected for an image, 1000.03 with powers of two" in caplog.text


def test_memory_is_measured_while_something_runs_and_after_it() -> None:
    # In a process of its own: what other tests left behind may be given back meanwhile, and would hide what is held.
    # Beyond 32 MiB glibc takes memory from the system, and never from what the heap has free.
    code = """
from xlaserve.engine import memory

def make():
    passing = bytearray(160 * 2**20 * b"\\1")
    return passing[: len(passing) // 4]

kept, taken = memory.measure(make)
print(len(kept), *taken)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    kept_bytes, held_bytes, run_bytes = map(int, ran.stdout.split())
    assert kept_bytes == 40 * MIB
    assert 24 * MIB < held_bytes < 80 * MIB
    assert 80 * MIB < run_bytes < 350 * MIB


def test_demand_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    demands = {SQUARE: Counter({1: 5, 7: 2}), WIDE: Counter({256: 1})}
    write(tmp_path / "demand.json", demands)
    assert read(tmp_path / "demand.json") == demands


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"224": {"1": 2}}',
        '{"2x2": 3}',
        '{"2x2": {}}',
        '{"2x2": {"0": 1}}',
        '{"2x2": {"1": -4}}',
        "\x00",
    ],
)
def test_a_file_that_is_no_demand_is_refused_with_what_was_expected(tmp_path: Path, text: str) -> None:
    (tmp_path / "demand.json").write_text(text)
    with pytest.raises(ModelFailed, match=r"auto_buckets.demand: demand.json: expected JSON such as"):
        read(tmp_path / "demand.json")


def test_a_file_that_is_not_there_is_named_without_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFailed) as raised:
        read(tmp_path / "demand.json")
    assert str(raised.value) == "auto_buckets.demand: demand.json: No such file or directory"
