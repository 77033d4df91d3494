"""What deploy/compose.yaml starts, without containers: a server, a load test and the Prometheus that watches both.

Their commands are those of the file, but for ports, folders, TLS and limits for a caller. Beside them is a server of
several processes, which the load test loads. Both servers have the labels that they would have as pods.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

import grpc
import psutil
import trustme
import yaml
from scripts.monitoring import compose
from scripts.monitoring.__main__ import DEPLOY

from xlaserve_client import VisionClient
from xlaserve_client.errors import ClientError

START_S: Final = 300
STOP_S: Final = 30
SCRAPE: Final = "1s"
DETECTOR: Final = "shapes-detector"
KEY: Final = "a key of a caller with narrow limits"
TRACE_ID: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACE: Final = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
"""A trace that is recorded somewhere."""
ONE, SEVERAL = "xlaserve-one-0", "xlaserve-several-0"
"""The servers, of one process and of several, by their names as pods."""
FRONTS: Final = 2
NAMESPACE: Final = "xlaserve"
FAKE_GPU: Final = Path(__file__).parent / "fake_gpu"
SAMPLES: Final = DEPLOY.parent / "scripts" / "samples"


class Prometheus:
    """Asks a Prometheus server."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **parameters: object) -> Any:
        """Returns what its API answers. Raises OSError."""
        query = urllib.parse.urlencode(parameters, doseq=True)
        with urllib.request.urlopen(f"http://{self._address}/api/v1/{path}?{query}", timeout=STOP_S) as answer:
            return json.load(answer)["data"]

    def range(self, query: str, start: float, end: float, step_s: float) -> list[dict[str, Any]]:
        """Returns the series of a query over time."""
        found: list[dict[str, Any]] = self.get("query_range", query=query, start=start, end=end, step=step_s)["result"]
        return found

    def now(self, query: str) -> list[dict[str, Any]]:
        """Returns the present value of each series of a query."""
        found: list[dict[str, Any]] = self.get("query", query=query)["result"]
        return found

    def values(self, label: str, match: str) -> list[str]:
        """Returns the values of a label, as a dashboard's variable has them."""
        found: list[str] = self.get(f"label/{label}/values", **{"match[]": match})
        return found


@contextmanager
def live(*, has_fake_gpu: bool = False, block_s: float = 2) -> Iterator[Prometheus]:
    """Starts them on free ports, and stops them in the end."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        authority = trustme.CA()
        _write_identity(folder, authority)
        path = os.pathsep.join([*[str(FAKE_GPU)] * has_fake_gpu, os.environ.get("PYTHONPATH", "")])
        processes: list[subprocess.Popen[bytes]] = []
        addresses: dict[str, dict[str, Any]] = {}
        for name, fronts in ((ONE, 0), (SEVERAL, FRONTS)):  # one after the other: they share a cache
            command = [*_server_command(folder, name), f"--fronts={fronts}"]
            processes.append(stack.enter_context(started(command, folder / f"{name}.log", PYTHONPATH=path)))
            ready = folder / f"{name}.json"
            wait_until(ready.exists, processes, folder)
            addresses[name] = json.loads(ready.read_text())
            stack.enter_context(_asked(addresses[name]["grpc"], folder / "ca.pem"))
        loaded = addresses[SEVERAL]
        live_port = _free_port()
        command = [
            *(sys.executable, "-m", "xlaserve_loadtest", *compose.command("loadtest")),
            *("--target", loaded["grpc"], "--target-http", loaded["metrics"], "--tls-ca", str(folder / "ca.pem")),
            *("--block", str(block_s), "--warmup", "0.5", "--workers", "1", "--equality-images", "0"),
            *("--live-port", str(live_port), "--out", str(folder / "run")),
        ]
        processes.append(stack.enter_context(started(command, folder / "loadtest.log")))
        listen = f"127.0.0.1:{_free_port()}"
        command = _prometheus_command(
            folder,
            listen,
            {
                "xlaserve": [_as_pod(name, where["metrics"]) for name, where in addresses.items()],
                "loadtest": [{"targets": [f"127.0.0.1:{live_port}"]}],
            },
        )
        processes.append(stack.enter_context(started(command, folder / "prometheus.log")))
        prometheus = Prometheus(listen)
        wait_until(lambda: _is_up(prometheus), processes, folder)
        _kill_front(addresses[SEVERAL]["pid"])
        yield prometheus


def _write_identity(folder: Path, authority: trustme.CA) -> None:
    certificate = authority.issue_cert("127.0.0.1", not_after=datetime.now(UTC) + timedelta(days=90))
    (folder / "key.pem").write_bytes(certificate.private_key_pem.bytes())
    (folder / "certificate.pem").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    authority.cert_pem.write_to_path(folder / "ca.pem")
    limits = [{"images_per_s": 1}]
    known = {"name": "limited", "key_sha256": sha256(KEY.encode()).hexdigest(), "roles": ["infer"], "limits": limits}
    access = {"callers": [known], "anybody": {"roles": ["infer", "observe"]}}
    (folder / "access.yaml").write_text(yaml.safe_dump(access))


def _kill_front(supervisor: int) -> None:
    """Has a process of a server end unasked."""
    next(child for child in psutil.Process(supervisor).children() if child.name() == "front 1").kill()


def _as_pod(name: str, address: str) -> dict[str, Any]:
    """Returns a target with the labels that deploy/kubernetes/overlays/monitoring has pods get."""
    return {"targets": [address], "labels": {"instance": name, "namespace": NAMESPACE, "pod": name}}


def _server_command(folder: Path, name: str) -> list[str]:
    return [
        *(sys.executable, "-m", "xlaserve", *compose.command("xlaserve")),
        *(
            "--compile-cache",
            str(folder / "cache"),
            "--host",
            "127.0.0.1",
            "--grpc-port",
            "0",
            "--http-port",
            "0",
            "--metrics-port",
            "0",
        ),
        *("--tls-certificate", str(folder / "certificate.pem"), "--tls-key", str(folder / "key.pem")),
        *("--access", str(folder / "access.yaml"), "--ready-file", str(folder / f"{name}.json")),
    ]


def _prometheus_command(folder: Path, listen: str, targets: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """Returns the command, with the configuration of deploy/prometheus but for its targets and how often it looks."""
    source = DEPLOY / "prometheus"
    settings = yaml.safe_load((source / "prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE}
    for job in settings["scrape_configs"]:
        job["static_configs"] = [*targets[job["job_name"]]]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    for rules in source.glob("*.rules.yaml"):
        shutil.copy(rules, folder)
    return [
        *("prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"),
        *(f"--web.listen-address={listen}", "--enable-feature=exemplar-storage"),
    ]


@contextmanager
def started(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command until the block ends; what it says goes into `log`."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env={**os.environ, **environment}
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT if "xlaserve_loadtest" in command else signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def asking(ask: Callable[[Event], None]) -> Iterator[None]:
    """Runs `ask` on a thread until the block ends, which is when its event is set."""
    ending = Event()
    thread = Thread(target=ask, args=(ending,))
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def _asked(address: str, authority: Path) -> AbstractContextManager[None]:
    """Has a server asked, in the meantime, what the load test does not: images of files, too much, and nonsense."""
    credentials = grpc.ssl_channel_credentials(authority.read_bytes())
    digits = sorted((SAMPLES / "digits").glob("*.png"))
    shapes = sorted((SAMPLES / "shapes").glob("*.jpg"))

    def ask(ending: Event) -> None:
        with (
            VisionClient(address, credentials=credentials, metadata=[("traceparent", TRACE)]) as client,
            VisionClient(address, credentials=credentials, token=KEY) as limited,
        ):
            while not ending.wait(0.2):
                client.detect(shapes[:2], model=DETECTOR)
                for caller, model, deadline_s in (
                    (client, "digits", 10),
                    (client, "digits", 0.002),
                    (limited, "digits", 10),
                    (client, "none", 10),
                    (client, DETECTOR, 10),
                ):
                    with suppress(ClientError):
                        caller.classify(digits[:3], model=model, deadline_s=deadline_s)

    return asking(ask)


def _is_up(prometheus: Prometheus) -> bool:
    with suppress(OSError):
        return [series["value"][1] for series in prometheus.now("up")] == ["1", "1", "1"]
    return False


def wait_until(condition: Callable[[], object], processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Returns once `condition` holds. Raises RuntimeError where a process ends first, or it takes too long."""
    give_up_at = time.monotonic() + START_S
    while not condition():
        if any(process.poll() is not None for process in processes) or time.monotonic() > give_up_at:
            logs = [f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(folder.glob("*.log"))]
            raise RuntimeError("\n\n".join(["it did not come up", *logs]))
        time.sleep(0.05)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port
