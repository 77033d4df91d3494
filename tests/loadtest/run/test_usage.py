from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from tests.required import required

from xlaserve_loadtest.run.energy import CpuMeters
from xlaserve_loadtest.run.usage import Usage, counts

BUSY = "import time\nwhile time.process_time() < 0.3: pass\n"


def package(root: Path, name: str, energy_uj: int) -> None:
    zone = root / name
    zone.mkdir(exist_ok=True)
    (zone / "energy_uj").write_text(f"{energy_uj}\n")
    (zone / "max_energy_range_uj").write_text("1000000\n")


def test_energy_is_that_of_all_packages_and_not_of_their_parts(tmp_path: Path) -> None:
    for name in ("intel-rapl:0", "intel-rapl:0:0", "intel-rapl:1", "dtpm"):
        package(tmp_path, name, 100_000)
    meters = CpuMeters(tmp_path)
    package(tmp_path, "intel-rapl:0", 350_000)
    package(tmp_path, "intel-rapl:0:0", 900_000)
    package(tmp_path, "intel-rapl:1", 50_000)  # begun again after 1,000,000
    assert meters.joules() == pytest.approx(0.25 + 0.95)


def test_without_meters_that_can_be_read_there_is_no_energy(tmp_path: Path) -> None:
    assert CpuMeters(tmp_path).joules() is None
    package(tmp_path, "intel-rapl:0", 1)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    assert CpuMeters(tmp_path).joules() is None


async def test_a_port_that_does_not_speak_http_has_no_counters() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\0\0\x06\x04 not HTTP\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        assert await counts(f"{host}:{port}", ["digits"]) is None


def test_cpu_time_is_that_of_all_processes_below_the_server() -> None:
    server = f"import subprocess, sys\nprint(flush=True)\nsubprocess.run([sys.executable, '-c', {BUSY!r}])\n"
    process = subprocess.Popen(
        [sys.executable, "-c", server + "print(flush=True)\ninput()"],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin and process.stdout
    process.stdout.readline()
    use = Usage(process.pid)
    process.stdout.readline()
    result = use.result()
    cpu_s = result.cpu_s
    process.communicate("\n")
    assert required(result.peak_rss_bytes) > 2**20  # seen at the end, however short the block
    assert cpu_s is not None
    assert cpu_s >= 0.29
