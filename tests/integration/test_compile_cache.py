"""A second start compiles nothing. If the cache was damaged in between, it may be slower, but never wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from scripts.digits_data import digit_images
from tests.integration.conftest import COMPILES, StartServer

from xlaserve.programs.cache.records import SUFFIX, Record, RecordFolder
from xlaserve_client import VisionClient

BUCKETS = [1, 2, 4]
TIMEOUT_S = 240
MODES = ("xla", "autocluster")
MAX_KIB = 8

needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


def configure(folder: Path, **settings: object) -> Path:
    model = {"name": "digits", "source": "builtin:digits", "buckets": BUCKETS}
    file = folder / "config.yaml"
    file.write_text(json.dumps({"models": [model], "compile_cache": "cache", "log_level": "info", **settings}))
    return file


class Warm:
    """One `xlaserve warm`: what it printed, and how many programs XLA says that it has compiled."""

    def __init__(self, config: Path, *flags: str, env: Mapping[str, str] | None = None) -> None:
        self._dump = config.parent / f"dump-{os.urandom(4).hex()}"
        xla_flags = f"--xla_dump_to={self._dump} --xla_dump_hlo_as_text"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "xlaserve", "warm", "--json", "--config", str(config), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XLA_FLAGS": xla_flags, **(env or {})},
        )

    def end(self) -> Warm:
        try:
            stdout, self.stderr = self.process.communicate(timeout=TIMEOUT_S)
        finally:
            self.process.kill()
        assert self.process.returncode == 0, self.stderr
        self.ledger: list[dict[str, Any]] = []
        while stdout := stdout.strip():  # one for each kind of engine
            part, end = json.JSONDecoder().raw_decode(stdout)
            self.ledger += part
            stdout = stdout[end:]
        self.compiled = len(list(self._dump.glob("*.before_optimizations.txt")))
        return self

    @property
    def from_cache(self) -> list[bool]:
        return [entry["from_cache"] for entry in self.ledger]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose cache is filled; copied, not changed."""
    folder = tmp_path_factory.mktemp("filled")
    first = Warm(configure(folder)).end()
    assert first.from_cache == [False] * len(BUCKETS)
    assert first.compiled == len(BUCKETS)
    return folder


@pytest.fixture
def config(filled: Path, tmp_path: Path) -> Path:
    shutil.copytree(filled / "cache", tmp_path / "cache")
    return configure(tmp_path)


@pytest.fixture(scope="module")
def scans() -> Iterator[list[bytes]]:
    yield [scan.png for scan in digit_images("held_out", side=32)[:4]]


def records(config: Path) -> list[Path]:
    return sorted((config.parent / "cache").rglob("*.xlaserve"))


def kept_record(file: Path) -> Record:
    record = RecordFolder(file.parent, read_only=True).read(file.name.removesuffix(SUFFIX), lambda record: record)
    assert record is not None
    return record


def test_a_second_start_compiles_nothing_and_times_nothing(config: Path) -> None:
    before = {file: file.read_bytes() for file in records(config)}
    second = Warm(config).end()
    assert second.from_cache == [True] * len(BUCKETS)
    assert second.compiled == 0
    after = {file: file.read_bytes() for file in records(config)}
    if "timed again" in second.stderr:  # other work disturbed the machine as the first start timed its programs
        before, after = (
            {file: data for file, data in each.items() if "cost-" not in file.name} for each in (before, after)
        )
    assert after == before
    assert "WARN" not in second.stderr
    assert "Error" not in second.stderr


ENGINES_OF_1_AND_2_CORES = """
from xlaserve.processes import engines
from xlaserve.programs.tf.device import Share

real, shares = engines.shares_of_machine, [Share(frozenset(cores)) for cores in SHARES]
engines.shares_of_machine = lambda settings: shares if settings.engines == 3 else real(settings)
"""
"""As on a machine whose cores engines can't share out evenly."""


@pytest.mark.slow
@needs_two_cores
def test_engines_that_share_out_the_cores_compile_nothing_that_is_warm(
    start_server: StartServer, tmp_path: Path
) -> None:
    several = {"fronts": 1, "engines": 2}
    assert Warm(configure(tmp_path, **several)).end().from_cache == [False] * len(BUCKETS)
    model = {"name": "digits", "source": "builtin:digits", "buckets": BUCKETS}
    server = start_server({"models": [model], "compile_cache": str(tmp_path / "cache"), **several})
    server.wait_for(lambda: len(re.findall(r"engine \d: process \d+ is ready", server.stderr)) == 2, "one is not ready")
    assert " compiled in " not in server.stderr
    assert server.stderr.count(" loaded in ") == 2 * len(BUCKETS)


@pytest.mark.slow
@needs_two_cores
def test_what_is_warm_is_of_use_to_engines_of_any_size(tmp_path: Path) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    shares = [{first}, {first, second}, {second}]
    (tmp_path / "sitecustomize.py").write_text(f"SHARES = {shares}\n{ENGINES_OF_1_AND_2_CORES}")
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    warm = Warm(configure(tmp_path, fronts=1, engines=3), env={"PYTHONPATH": path}).end()
    assert warm.from_cache == [False] * 2 * len(BUCKETS)
    facts = [json.loads(file.read_text()) for file in tmp_path.rglob("environment.json")]
    assert sorted(one["cores"] for one in facts) == ["1", "2"]


def test_a_kept_cost_that_is_far_too_high_is_measured_again_and_kept_anew(
    config: Path, start_server: StartServer
) -> None:
    def kept() -> dict[str, dict[str, float]]:
        return {file.name: kept_record(file).header for file in records(config) if file.name.startswith("cost-")}

    before = kept()
    for file in records(config):
        if file.name.startswith("cost-") and "-xla-1x" in file.name:
            wrong = {key: 1000 * seconds for key, seconds in kept_record(file).header.items()}
            RecordFolder(file.parent, read_only=False).write(file.name.removesuffix(SUFFIX), wrong, {})
    doctored = kept()
    (name,) = [name for name in before if doctored[name] != before[name]]
    model = {"name": "digits", "source": "builtin:digits", "buckets": BUCKETS}
    server = start_server({"models": [model], "compile_cache": str(config.parent / "cache")})
    assert server.stderr.count("the compile cache's cost of xla 1x32x32 is ") == 1
    assert "all programs at 32x32 are timed again" in server.stderr
    after = kept()
    assert after[name]["alone_s"] < doctored[name]["alone_s"]
    assert all(after[other]["alone_s"] <= before[other]["alone_s"] for other in before.keys() - {name})
    with VisionClient(server.grpc) as client:
        (described,) = client.models()
    served_s = {program.bucket.batch: program.run_s for program in described.programs}
    assert served_s[1] == after[name]["alone_s"]
    assert server.stop() == 0


def test_damaged_files_are_made_anew(config: Path) -> None:
    whole = {file: file.read_bytes() for file in records(config)}
    assert {file.name.partition("-")[0] for file in whole} == {
        "cost",
        "network.xlaserve",
        "reference",
        "weights",
        "xla",
    }
    for index, (file, data) in enumerate(whole.items()):
        middle = len(data) // 2
        damage = (data[:middle], b"", data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :])
        file.write_bytes(damage[index % len(damage)])
    third = Warm(config).end()
    assert third.from_cache == [False] * len(BUCKETS)
    assert third.compiled == len(BUCKETS)
    assert third.stderr.count("is damaged") == len(whole) - 1  # nobody asks for weights without a program
    fourth = Warm(config).end()
    assert (fourth.compiled, fourth.from_cache) == (0, [True] * len(BUCKETS))


def test_an_executable_that_tensorflow_can_not_load_is_compiled_anew(config: Path) -> None:
    for file in records(config):
        if file.name.startswith("xla-"):
            folder, name = RecordFolder(file.parent, read_only=False), file.name.removesuffix(SUFFIX)
            record = kept_record(file)
            blobs = {key: bytes(blob) if key == "module" else bytes(blob)[:-100] for key, blob in record.blobs.items()}
            folder.write(name, record.header, blobs)
    third = Warm(config).end()
    assert third.from_cache == [False] * len(BUCKETS)
    fourth = Warm(config).end()
    assert (fourth.compiled, fourth.from_cache) == (0, [True] * len(BUCKETS))


@pytest.mark.slow
def test_two_processes_may_fill_one_folder_at_once(tmp_path: Path) -> None:
    config = configure(tmp_path)
    both = [Warm(config), Warm(config)]
    for process in both:
        process.end()
        assert "WARN" not in process.stderr
    second = Warm(config).end()
    assert (second.compiled, second.from_cache) == (0, [True] * len(BUCKETS))


def test_a_server_answers_from_a_read_only_cache_as_it_does_without(
    config: Path, start_server: StartServer, scans: list[bytes]
) -> None:
    before = {file: file.read_bytes() for file in records(config)}
    # One bucket: which of several is cheapest is not the same in every process.
    kept, missing = (
        {"name": name, "source": "builtin:digits", "buckets": [batch]} for name, batch in (("digits", 4), ("more", 8))
    )
    cache = {"compile_cache": str(config.parent / "cache"), "compile_cache_read_only": True}
    warm, cold = start_server({"models": [kept, missing], **cache}), start_server({"models": [kept], **COMPILES})
    answers = []
    for server in (warm, cold):
        with VisionClient(server.grpc) as client:
            classified = client.classify(scans, model="digits", top_k=10).classifications
            answers.append([{one.index: one.score for one in image.categories} for image in classified])
            described = {model.name: [program.from_cache for program in model.programs] for model in client.models()}
        assert described == ({"digits": [True], "more": [False]} if server is warm else {"digits": [False]})
    assert answers[0] == [pytest.approx(image, abs=1e-6) for image in answers[1]]
    for name, loads in (("digits", 1), ("more", 0)):
        assert warm.metric("xlaserve_cache_loads_total", model=name) == loads
        assert warm.metric("xlaserve_compilations_total", model=name) == 1 - loads
    assert "is not kept" in warm.stderr
    assert {file: file.read_bytes() for file in records(config)} == before
    assert warm.stop() == cold.stop() == 0


def test_a_folder_that_can_not_be_written_is_one_line_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder is to be")
    command = [sys.executable, "-m", "xlaserve", "warm", "--config", str(configure(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("xlaserve: compile_cache: expected a folder that can be written, got ")


def test_no_disk_is_too_full_to_serve(tmp_path: Path) -> None:
    """No file may grow beyond what a log needs: neither in the cache's folder nor in that for temporary files."""
    models = [
        {"name": f"digits{mode}", "source": "builtin:digits", "buckets": [1, 2], "modes": [mode]} for mode in MODES
    ]
    config = configure(tmp_path, models=models)
    limited = ("bash", "-c", f'ulimit -f {MAX_KIB}; exec "$@"', "bash")
    command = [*limited, sys.executable, "-m", "xlaserve", "warm", "--json", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert {entry["model"] for entry in json.loads(done.stdout)} == {"digitsxla", "digitsautocluster"}
    (warning,) = [line for line in done.stderr.splitlines() if "WARN" in line or "ERROR" in line]
    assert "can't be written: File too large" in warning
