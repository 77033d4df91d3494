"""The number of fronts of `auto` by the device of the configuration."""

from __future__ import annotations

from typing import Any

import pytest

from xlaserve.config import Settings
from xlaserve.errors import ConfigError
from xlaserve.processes import capacity as module
from xlaserve.processes.capacity import MOST_FRONTS, Costs, needed, resolve_fronts

COSTS = Costs(front_us=400, engine_us=100)


@pytest.mark.parametrize(
    ("images_per_s", "cores", "engines", "expected"),
    [
        (0.0, 16, 1, 1),
        (2_500, 16, 1, 1),
        (2_501, 16, 1, 2),
        (2_501, 16, 2, 3),
        (9_000, 16, 1, 4),
        (90_000, 16, 1, 4),
        (90_000, 16, 8, 15),
        (9_000, 3, 1, 2),
        (9_000, 2, 1, 1),
        (9_000, 1, 1, 1),
        (1e9, 512, 64, MOST_FRONTS),
    ],
)
def test_fronts_are_as_many_as_bring_what_engines_compute_beside_one_core(
    images_per_s: float, cores: int, engines: int, expected: int
) -> None:
    assert needed(images_per_s, cores, engines, COSTS) == expected


def test_as_many_fronts_as_can_be_set_are_looked_at() -> None:
    assert Settings(fronts=MOST_FRONTS).fronts == MOST_FRONTS
    with pytest.raises(ValueError, match="fronts"):
        Settings(fronts=MOST_FRONTS + 1)


NETWORK = {"name": "m", "source": "builtin:digits"}
CORES = 8


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine of 8 cores and 2 GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(module, "usable_cores", lambda: CORES)
    return monkeypatch


def fronts(model: dict[str, Any] = NETWORK, **settings: Any) -> int:
    return resolve_fronts(Settings.model_validate({"models": [model], **settings})).front_processes


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"device": "cpu"}, 0),
        ({"device": "auto"}, 5),
        ({"device": "gpu"}, 5),
        ({"device": "gpu:1"}, 5),
        ({"device": "gpu:0,1"}, 7),
        ({"device": "gpu:all"}, 7),
        ({"device": "gpu", "fronts": 2}, 2),
        ({"device": "gpu", "fronts": 0}, 0),
        ({"device": "cpu", "fronts": 2}, 2),
    ],
)
def test_a_gpu_has_the_fronts_its_engines_could_need_and_a_cpu_one_process(
    machine: pytest.MonkeyPatch, settings: dict[str, Any], expected: int
) -> None:
    assert fronts(**settings) == expected


def test_engines_are_counted_only_where_they_are_processes_of_their_own(machine: pytest.MonkeyPatch) -> None:
    assert fronts(device="gpu", engines=2) == 7
    with pytest.raises(ConfigError, match=r"engines: expected fronts: 1 or more as well, as .* here, got engines: 2"):
        fronts(device="cpu", engines=2)
    assert fronts(device="cpu", engines=1) == 0


def test_a_machine_without_a_gpu_that_may_be_seen_is_a_cpu(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("CUDA_VISIBLE_DEVICES", "")
    assert fronts(device="auto") == 0


def test_models_that_use_no_device_are_served_by_one_process(machine: pytest.MonkeyPatch) -> None:
    assert fronts({"name": "m", "source": "builtin:noop"}, device="gpu") == 0


@pytest.mark.parametrize(
    "model",
    [
        {**NETWORK, "modes": ["xla", "graph"], "shadow": {"mode": "graph", "share": 0.1}},
        {**NETWORK, "unmatched": "background"},
    ],
    ids=["shadow", "background"],
)
def test_shadows_and_resolutions_without_buckets_need_no_own_process(
    machine: pytest.MonkeyPatch, model: dict[str, Any]
) -> None:
    assert fronts(model, device="gpu") == 5
