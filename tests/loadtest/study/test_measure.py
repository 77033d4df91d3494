from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tests.loadtest.study.fake_loadtest import fake_loadtest
from tests.required import required

from xlaserve_loadtest.study.measure import Measurement, measure
from xlaserve_loadtest.study.record import Cell


@pytest.fixture
def how(tmp_path: Path) -> Measurement:
    return Measurement(("xla", "graph"), "graph", 0.5, 4, 20.0, False, True, tmp_path / "runs")


CELL = Cell("keras.applications:ResNet50", 192, 8)


def test_a_load_test_gets_the_cell_and_its_reason_is_kept(how: Measurement, tmp_path: Path) -> None:
    script = (
        "print('loadtest: the server exited', arguments[arguments.index('--mode') + 1], file=sys.stderr); sys.exit(1)"
    )
    results = measure(CELL, how, fake_loadtest(tmp_path, script))
    assert {mode: result.reason for mode, result in results.items()} == {
        "xla": "loadtest: the server exited xla",
        "graph": "loadtest: the server exited graph",
    }
    (config,) = (tmp_path / "runs").glob("*-xla-graph.json")
    (model,) = json.loads(config.read_text())["models"]
    assert model["source"] == "keras.applications:ResNet50"
    assert model["weights"] == "random"
    assert (model["buckets"], model["input_size"], model["modes"]) == ([8], [192, 192], ["xla", "graph"])


def test_the_end_of_a_server_is_quoted_with_its_last_words(how: Measurement, tmp_path: Path) -> None:
    script = "sys.exit('starting\\nloadtest: the server was ended by signal 9\\nINFO compiling\\nINFO still compiling')"
    results = measure(CELL, how, fake_loadtest(tmp_path, script))
    assert results["xla"].reason == "loadtest: the server was ended by signal 9; INFO still compiling"


RECORDED = """
from xlaserve_loadtest.record.blocks import *
from xlaserve_loadtest.record.lines import *
from xlaserve_loadtest.record.requests import *
from xlaserve_loadtest.record.run_file import RunWriter
import numpy as np
modes = arguments[arguments.index("--mode") + 1].split(",")
if "broken" in modes and len(modes) > 1:
    sys.exit("loadtest: broken does not compile")
arms = tuple(Arm(mode, mode, "m", "embedded") for mode in modes)
environment = Environment("c", 2, (), "s", "3", {}, {})
with RunWriter(pathlib.Path(arguments[arguments.index("--record") + 1])) as file:
    file.write(Header("2026-11-20T18:00:00Z", (), {}, 0, None, "graph", arms, environment))
    file.write(Server(0, tuple(modes), "a", "s", ledger=(LedgerEntry("xla", (8, 9, 9), 1.5, 2.5, 0.1),)))
    for index in range(16):
        round_, place = divmod(index, 2)
        arm = modes[(place + round_) % len(modes)]
        step_ns = 5_000_000 if arm == "xla" else 10_000_000
        start_ns = index * 1_000_000_000
        due_ns = start_ns + np.arange(0, 900_000_000, step_ns)
        rows = np.zeros(due_ns.size, REQUEST)
        rows["scheduled_ns"] = rows["start_ns"] = due_ns
        rows["end_ns"] = due_ns + step_ns + (np.arange(due_ns.size) + index) % 7 * 10_000
        rows["images"], rows["measured"] = 8, True
        file.write(Requests(index, rows))
        window = (start_ns, start_ns + 900_000_000)
        file.write(BlockLine(index, arm, LoadLine("closed", 1), start_ns, start_ns + 950_000_000,
            GeneratorUse(1, 0.1, rows.size), window_ns=window, round=round_ // 2, server=0))
    file.write(End(False, True))
"""


def test_figures_ratio_and_price_come_from_the_run_file(how: Measurement, tmp_path: Path) -> None:
    results = measure(CELL, how, fake_loadtest(tmp_path, RECORDED))
    xla, graph = results["xla"], results["graph"]
    assert graph.images_per_s == pytest.approx(800, rel=0.05)
    assert xla.ratio == pytest.approx(2, rel=0.05)
    low, high = required(xla.ratio_interval)
    assert low < required(xla.ratio) < high
    assert (xla.verdict, graph.verdict, graph.ratio) == ("faster", None, 1.0)
    assert (xla.trace_s, xla.compile_s) == (1.5, 2.5)
    assert xla.p50_ms == pytest.approx(5, rel=0.05)


def test_a_mode_that_breaks_the_others_is_found_by_trying_each_alone(how: Measurement, tmp_path: Path) -> None:
    alone = dataclasses.replace(how, modes=("broken", "graph"))
    script = RECORDED + "if 'broken' in modes: sys.exit('loadtest: broken does not compile')"
    results = measure(CELL, alone, fake_loadtest(tmp_path, script))
    assert results["broken"].reason == "loadtest: broken does not compile"
    assert results["graph"].reason is None
    assert results["graph"].images_per_s == pytest.approx(800, rel=0.05)


def test_a_cell_that_takes_too_long_is_stopped(
    how: Measurement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = dataclasses.replace(how, modes=("xla",), timeout_s=0.3)
    results = measure(CELL, late, fake_loadtest(tmp_path, "time.sleep(600)"))
    assert results["xla"].reason == "not done after 0.3 s"
