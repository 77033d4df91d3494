"""How much memory of a container's limit a server takes: while it serves, and while its model is loaded again.

python -m bench.container_memory, as root: the server runs in a control group of its own, whose memory is what a
container's limit counts, but for files that can be dropped. With a server's arguments, it runs that in the group.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench import processes

OF_MEMORY: Final = Path("/sys/fs/cgroup/memory")
"""Where the groups are in the first version of control groups."""
USED: Final = ("memory.usage_in_bytes", "memory.current")
DROPPED: Final = ("total_inactive_file", "inactive_file")
"""In the first version and in the second."""
SAMPLE_S: Final = 0.05
SETTLE_S: Final = 3.0
BUCKETS: Final = (1, 4, 8)
MODELS: Final[dict[str, dict[str, object]]] = {
    "digits": {"name": "model", "source": "builtin:digits", "buckets": BUCKETS},
    "MobileNetV2": processes.application("MobileNetV2", buckets=BUCKETS),
    "ResNet50": processes.application("ResNet50", buckets=BUCKETS),
}
SERVERS: Final[tuple[dict[str, object], ...]] = (
    {"fronts": 0},
    {"fronts": 1, "swap": "engine"},
    {"fronts": 1, "swap": "in_place"},
)
GROUP: Final = "BENCH_GROUP"


def _working_set_bytes(group: Path) -> int:
    (used,) = (int((group / name).read_text()) for name in USED if (group / name).exists())
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return used - next(int(statistics[name]) for name in DROPPED if name in statistics)


@contextmanager
def _peak(group: Path) -> Iterator[list[int]]:
    """Yields a list that has the most bytes in use once the block has ended."""
    ended, found = threading.Event(), [0]

    def sample() -> None:
        while not ended.wait(SAMPLE_S):
            found[0] = max(found[0], _working_set_bytes(group))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def _measure(model: dict[str, object], server: dict[str, object], group: Path) -> tuple[int, int]:
    """Returns the bytes in use while it serves, and at most during a reload."""
    os.environ[GROUP] = str(group)
    settled = threading.Event()
    with tempfile.TemporaryDirectory() as cache:
        config = {"models": [model], "compile_cache": cache, **server}
        with processes.xlaserve(config, module="bench.container_memory") as found:
            settled.wait(SETTLE_S)
            serves = _working_set_bytes(group)
            with _peak(group) as reloaded:
                load = f"http://{found.http}/v2/repository/models/model/load"
                urllib.request.urlopen(urllib.request.Request(load, b"", method="POST"), timeout=600).close()
                settled.wait(SETTLE_S)
    return serves, reloaded[0]


def main() -> None:
    """Prints a row for each model and each server."""
    folder = OF_MEMORY if OF_MEMORY.exists() else OF_MEMORY.parent
    group = folder / f"bench-{os.getpid()}"
    group.mkdir()
    try:
        print("model        server                            serves  reload, MiB")
        for name, model in MODELS.items():
            for server in SERVERS:
                serves, reload = _measure(model, server, group)
                words = ", ".join(f"{key}: {value}" for key, value in server.items())
                print(f"{name:12} {words:32} {serves >> 20:7} {reload >> 20:12}", flush=True)
    finally:
        group.rmdir()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        (Path(os.environ[GROUP]) / "cgroup.procs").write_text(f"{os.getpid()}")
        runpy.run_module("xlaserve", run_name="__main__")
    else:
        main()
