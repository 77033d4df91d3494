from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from xlaserve_loadtest.run.accuracy_log import write_log
from xlaserve_loadtest.schedule.payload import Request
from xlaserve_loadtest.targets.target import Array


async def test_each_sample_is_written_once_with_all_of_its_outputs(tmp_path: Path) -> None:
    # Five samples, two a request; the requests go round more than once.
    requests = [Request(bytes([index % 5, (index + 1) % 5]), 2, "xla") for index in range(16)]
    asked = []

    async def ask(arm: str, count: int) -> list[list[Array]]:
        asked.append((arm, count))
        return [
            [np.array([[index], [index + 1]], np.float32), np.array([[7], [8]], np.int32)] for index in range(count)
        ]

    path = await write_log(tmp_path / "a.run.jsonl.gz", "digits xla", requests, ask)
    assert path.name == "a.digits-xla.mlperf_log_accuracy.json"
    assert asked == [("digits xla", 5)]
    lines = json.loads(path.read_text())
    assert [line["qsl_idx"] for line in lines] == [0, 1, 2, 3, 4]
    data = bytes.fromhex(lines[3]["data"])
    assert np.frombuffer(data[:4], np.float32)[0] == 3
    assert np.frombuffer(data[4:], np.int32)[0] == 7
