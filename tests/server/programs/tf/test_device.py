from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from tests.control_groups import UNIFIED, lay_out

from xlaserve.config import Mode, ModelSettings, PerformanceHint, Settings
from xlaserve.errors import ConfigError
from xlaserve.programs.tf.device import GPU_LANES, Share, choose, configure, cpu_name, shares, unlike, usable_cores

GPU = "NVIDIA H200"
LATENCY = PerformanceHint.LATENCY


class TensorFlow:
    """Stands in for the module, whose settings hold for the whole process."""

    def __init__(self, gpus: list[str]) -> None:
        self.gpus = gpus
        self.told: dict[str, Any] = {}
        tell = self.told.__setitem__
        self.config = SimpleNamespace(
            LogicalDeviceConfiguration=lambda memory_limit: memory_limit,
            set_logical_device_configuration=lambda gpu, limits: tell(f"limits of {gpu}", limits),
            list_physical_devices=lambda kind: self.gpus,
            set_visible_devices=lambda devices, kind: tell("visible", devices),
            experimental=SimpleNamespace(
                get_device_details=lambda gpu: {"device_name": gpu},
                set_memory_growth=lambda gpu, grows: tell(f"growth of {gpu}", grows),
                enable_tensor_float_32_execution=lambda is_on: tell("tf32", is_on),
            ),
            threading=SimpleNamespace(
                set_intra_op_parallelism_threads=lambda threads: tell("intra", threads),
                set_inter_op_parallelism_threads=lambda threads: tell("inter", threads),
            ),
        )


@pytest.fixture
def tensorflow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TensorFlow]:
    """Installs a TensorFlow that sees `gpus`, on a machine of eight cores."""

    def install(*gpus: str) -> TensorFlow:
        module = TensorFlow(list(gpus))
        monkeypatch.setitem(sys.modules, "tensorflow", module)
        monkeypatch.setattr("xlaserve.programs.tf.device.usable_cores", lambda: 8)
        monkeypatch.setenv("KERAS_BACKEND", "jax")
        monkeypatch.setenv("TF_XLA_FLAGS", "")
        monkeypatch.setenv("XLA_FLAGS", "")
        return module

    return install


@pytest.mark.parametrize(
    ("settings", "lanes", "threads"),
    [
        ({}, 8, 1),
        ({"performance_hint": LATENCY}, 1, 8),
        ({"lanes": 3}, 3, 2),
        ({"lanes": 16}, 16, 1),
        ({"threads_per_lane": 4}, 8, 4),
        ({"performance_hint": LATENCY, "lanes": 2, "threads_per_lane": 3}, 2, 3),
    ],
)
def test_a_cpu_gets_a_lane_per_core_or_one_with_all_threads(settings: Any, lanes: int, threads: int) -> None:
    device = choose(Settings(**settings), cores=8, gpus=())
    assert (device.kind, device.lanes, device.threads_per_lane) == ("cpu", lanes, threads)


@pytest.mark.parametrize(
    ("settings", "lanes"), [({}, GPU_LANES), ({"performance_hint": LATENCY}, 1), ({"lanes": 4}, 4)]
)
def test_a_gpu_gets_two_overlapping_lanes_or_one(settings: Any, lanes: int) -> None:
    device = choose(Settings(**settings), cores=8, gpus=[GPU])
    assert (device.kind, device.name, device.lanes) == ("gpu", GPU, lanes)
    assert str(device) == f"gpu ({GPU}), lanes: {lanes}"


def test_a_gpu_is_left_alone_where_the_cpu_is_asked_for() -> None:
    assert choose(Settings(device="cpu"), cores=2, gpus=[GPU]).kind == "cpu"


def test_a_gpu_that_is_not_there_is_said_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"device: expected a GPU.*found none; set device: auto or cpu"):
        choose(Settings(device="gpu"), cores=2, gpus=())


@pytest.mark.parametrize(
    ("wanted", "chosen", "name"),
    [
        *(("auto", (0,), "H200"), ("gpu", (0,), "H200"), ("gpu:1", (1,), "T4")),
        *(("gpu:2,0", (2, 0), "A100"), ("gpu:1,1", (1,), "T4"), ("gpu:all", (0, 1, 2), "H200")),
    ],
)
def test_one_gpu_is_taken_or_those_that_are_named(wanted: str, chosen: tuple[int, ...], name: str) -> None:
    device = choose(Settings(device=wanted), cores=8, gpus=["H200", "T4", "A100"])
    assert (device.gpus, device.name, device.lanes) == (chosen, name, GPU_LANES * len(chosen))


def test_each_of_several_gpus_has_a_replica_and_lanes_of_its_own() -> None:
    device = choose(Settings(device="gpu:1,2", lanes=3), cores=12, gpus=["H200"] * 3)
    assert (device.lanes, device.threads_per_lane) == (6, 2)
    assert device.replicas == ("/GPU:0", "/GPU:1")  # those that TensorFlow is let see
    assert str(device) == "gpu (2 x H200), lanes: 6"


def test_one_device_alone_has_no_replicas() -> None:
    assert choose(Settings(device="gpu:1"), cores=2, gpus=["H200"] * 2).replicas == ()
    assert choose(Settings(device="cpu"), cores=2, gpus=["H200"] * 2).replicas == ()


@pytest.mark.parametrize("wanted", ["gpu:2", "gpu:0,7"])
def test_a_number_that_no_gpu_has_is_said_with_those_that_are_there(wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"device: expected GPUs from 0 to 1, which TensorFlow can use, got {wanted}"):
        choose(Settings(device=wanted), cores=2, gpus=["H200"] * 2)


@pytest.mark.parametrize("wanted", ["tpu", "gpu:", "gpu:a", "gpu:0,", "gpu:-1", "cpu:0", "gpu:1;2"])
def test_a_device_is_spelt_in_one_of_a_few_ways(wanted: str) -> None:
    with pytest.raises(ValidationError, match="device"):
        Settings(device=wanted)


@pytest.mark.parametrize("modes", [(Mode.GRAPH,), (Mode.XLA,)])
def test_lanes_with_one_thread_each_share_no_work(
    tensorflow: Callable[..., TensorFlow], modes: tuple[Mode, ...]
) -> None:
    module = tensorflow()
    model = ModelSettings(name="m", source="builtin:digits", modes=modes)
    device = configure(Settings(models=(model,)), uses_tensorflow=True)
    assert (device.lanes, device.threads_per_lane) == (8, 1)
    assert module.told == {"visible": [], "intra": 1, "inter": 8}


def test_the_pool_has_as_many_threads_as_all_lanes_may_use(tensorflow: Callable[..., TensorFlow]) -> None:
    module = tensorflow()
    configure(Settings(lanes=2, threads_per_lane=3), uses_tensorflow=True)
    assert module.told["intra"] == 6


VECTORS, PRODUCTS = "--xla_cpu_prefer_vector_width=", "--xla_cpu_experimental_ynn_fusion_type="


@pytest.mark.parametrize(
    ("inherited", "expected"),
    [
        ("", [f"{VECTORS}512", f"{PRODUCTS}LIBRARY_FUSION_TYPE_DOT"]),
        ("--xla_dump_to=here", ["--xla_dump_to=here", f"{VECTORS}512", f"{PRODUCTS}LIBRARY_FUSION_TYPE_DOT"]),
        (f"{VECTORS}256 {PRODUCTS}", [f"{VECTORS}256", PRODUCTS]),
    ],
)
def test_programs_use_the_widest_vectors_and_fast_products_by_default(
    tensorflow: Callable[..., TensorFlow], monkeypatch: pytest.MonkeyPatch, inherited: str, expected: list[str]
) -> None:
    tensorflow()
    monkeypatch.setenv("XLA_FLAGS", inherited)
    configure(Settings(), uses_tensorflow=True)
    assert os.environ["XLA_FLAGS"].split() == expected


def test_on_a_cpu_only_graphs_that_ask_for_it_form_clusters(
    tensorflow: Callable[..., TensorFlow], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorflow()
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_min_cluster_size=2")
    configure(Settings(), uses_tensorflow=True)
    assert os.environ["TF_XLA_FLAGS"] == "--tf_xla_min_cluster_size=2 --tf_xla_cpu_global_jit"
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=2")
    with pytest.raises(ConfigError, match="TF_XLA_FLAGS: expected no --tf_xla_auto_jit"):
        configure(Settings(), uses_tensorflow=True)


@pytest.mark.parametrize("is_on", [False, True])
def test_tensor_float_32_is_switched_on_or_off_on_a_gpu(tensorflow: Callable[..., TensorFlow], is_on: bool) -> None:
    module = tensorflow(GPU)
    device = configure(Settings(tf32=is_on), uses_tensorflow=True)
    assert module.told["tf32"] is device.tf32 is is_on


def test_a_cpu_has_no_tensor_float_32(tensorflow: Callable[..., TensorFlow]) -> None:
    module = tensorflow()
    assert not configure(Settings(tf32=True), uses_tensorflow=True).tf32
    assert "tf32" not in module.told


def test_lanes_share_one_pool_of_threads(tensorflow: Callable[..., TensorFlow]) -> None:
    module = tensorflow()
    configure(Settings(lanes=2), uses_tensorflow=True)
    assert (module.told["intra"], module.told["inter"]) == (8, 2)


def test_the_first_gpu_is_taken_and_its_memory_not_all_at_once(tensorflow: Callable[..., TensorFlow]) -> None:
    module = tensorflow("H200", "T4")
    assert configure(Settings(), uses_tensorflow=True).name == "H200"
    assert module.told["visible"] == ["H200"]
    assert module.told["growth of H200"] is True
    assert "growth of T4" not in module.told


def test_of_each_gpu_in_use_a_fixed_part_of_the_memory_can_be_taken(tensorflow: Callable[..., TensorFlow]) -> None:
    module = tensorflow("H200", "T4", "A100")
    configure(Settings(device="gpu:2,0", gpu_memory_mib=4096), uses_tensorflow=True)
    assert module.told["visible"] == ["A100", "H200"]
    assert (module.told["limits of A100"], module.told["limits of H200"]) == ([4096], [4096])
    assert not any("growth" in key or "T4" in key for key in module.told)


def test_gpus_are_hidden_from_tensorflow_where_the_cpu_is_asked_for(tensorflow: Callable[..., TensorFlow]) -> None:
    module = tensorflow("H200")
    assert configure(Settings(device="cpu"), uses_tensorflow=True).kind == "cpu"
    assert module.told["visible"] == []


def test_a_server_without_tensorflow_models_never_imports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert configure(Settings(), uses_tensorflow=False).kind == "cpu"


def test_a_missing_tensorflow_is_said_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    with pytest.raises(ConfigError, match=r"expected tensorflow .*install xlaserve\[cpu\]"):
        configure(Settings(), uses_tensorflow=True)


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [
        ("max 100000\n", 16),
        ("400000 100000\n", 4),
        ("150000 100000\n", 1),
        ("50000 100000\n", 1),
        ("6400000 100000\n", 16),
        ("", 16),
    ],
)
def test_the_quota_of_a_control_group_bounds_the_cores(
    cpu_max: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    lay_out(tmp_path, "0::/service", [UNIFIED], {"service/cpu.max": cpu_max})
    assert usable_cores(tmp_path) == cores


def test_without_control_groups_all_cores_of_the_affinity_are_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5})
    assert usable_cores(tmp_path) == 2


def test_the_processor_has_the_name_that_linux_gives_it(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Some CPU: 2 GHz\nflags\t\t: fma\n\nmodel name\t: Another CPU\n")
    assert cpu_name(file) == "Some CPU: 2 GHz"


def test_a_processor_without_a_name_is_called_by_its_kind(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert cpu_name(file) == cpu_name(tmp_path / "missing") == platform.machine()


def several(engines: int | None = None, **settings: Any) -> Settings:
    return Settings(fronts=1, **settings) if engines is None else Settings(fronts=1, engines=engines, **settings)


@pytest.mark.parametrize("settings", [several(), several(device="gpu:1"), several(1, device="gpu:0,1"), Settings()])
def test_one_engine_has_the_whole_machine(settings: Settings) -> None:
    assert shares(settings, range(8), 8, 2) == [Share()]


def test_engines_share_out_the_cores() -> None:
    shared = shares(several(3), [1, 2, 3, 5, 6, 7, 8, 9], 8, 0)
    assert [sorted(share.cores) for share in shared] == [[1, 2], [3, 5, 6], [7, 8, 9]]
    assert not any(share.settings for share in shared)


def test_engines_with_as_many_cores_or_with_a_gpu_each_are_alike() -> None:
    def kinds(*arguments: Any) -> list[int]:
        return [len(share.cores) for share in unlike(shares(*arguments))]

    assert kinds(several(4), range(8), 8, 0) == [2]
    assert sorted(kinds(several(3), range(8), 8, 0)) == [2, 3]
    assert kinds(several(2), range(64), 9, 0) == [0]
    assert kinds(Settings(device="gpu:all", fronts=1), range(8), 8, 4) == [0]
    assert kinds(Settings(), range(8), 8, 0) == [0]


def test_engines_share_out_a_quota_on_any_cores() -> None:
    assert shares(several(2), range(64), 9, 0) == [Share(settings={"lanes": 4, "threads_per_lane": 1})] * 2
    latency = several(2, performance_hint=LATENCY)
    assert shares(latency, range(64), 9, 0) == [Share(settings={"lanes": 1, "threads_per_lane": 4})] * 2


def test_more_engines_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="engines: expected at most 2, one for each core, got 3"):
        shares(several(3), range(8), 2, 0)


@pytest.mark.parametrize(
    ("engines", "device", "devices"),
    [
        (None, "gpu:0,2", ["gpu:0", "gpu:2"]),
        (None, "gpu:all", ["gpu:0", "gpu:1", "gpu:2"]),
        (2, "gpu:all", ["gpu:0,2", "gpu:1"]),
        (3, "gpu:1,2", ["gpu:1", "gpu:2", "gpu:1"]),
        (2, "gpu:1", ["gpu:1", "gpu:1"]),
    ],
)
def test_engines_share_out_gpus(engines: int | None, device: str, devices: list[str]) -> None:
    shared = shares(several(engines, device=device), range(8), 8, 3)
    assert shared == [Share(settings={"device": one}) for one in devices]


def test_engines_may_all_run_on_the_first_gpu() -> None:
    assert shares(several(2, device="gpu"), range(8), 8, 3) == [Share(), Share()]
