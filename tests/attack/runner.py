"""Runs the attacks of this folder's modules one after another, and looks after each whether the server is as before."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from tests.attack import pages, samples, sizes
from tests.attack.client import INFERENCE, Client
from tests.attack.registry import ATTACKS, OK, Round, Tally
from tests.attack.server import MIB, Server, ServerError

for _module in sorted(Path(__file__).parent.glob("[!_]*.py")):
    import_module(f"tests.attack.{_module.stem}")  # registers its attacks

QUIET_S: Final = 20.0
"""How long what is under way may take to end after an attack."""
WITHOUT_FRONTS: Final = {"sizes"}
"""Sites whose settings need one process: `unmatched: background`."""
FRONT_MIB: Final = 256
"""What each front may take more: it keeps memory that is free, and what it shares with the engine counts for both."""
NOOP: Final = {"name": "noop", "source": "builtin:noop", "modes": ["graph"], "buckets": [1, 2, 4, 8]}
DIGITS: Final = {"name": "digits", "source": "builtin:digits", "modes": ["xla", "graph"], "buckets": [1, 2, 4, 8]}
DETECTOR: Final = {"name": "shapes-detector", "source": "builtin:shapes-detector", "buckets": [1, 2]}
SEGMENTER: Final = {"name": "shapes-segmenter", "source": "builtin:shapes-segmenter", "buckets": [1, 2]}
SHARED: Final[dict[str, Any]] = {
    "models": [NOOP, DIGITS, DETECTOR, SEGMENTER],
    "max_message_bytes": 24 * MIB,
    "max_queue_images": 512,
    "model_control": True,
    "cors_origins": [pages.PAGE],
}


def run(
    names: Sequence[str],
    *,
    seed: int,
    seconds: float,
    is_short: bool = False,
    fronts: int = 0,
    say: Callable[[str], object] = print,
) -> dict[str, Tally]:
    """Runs the attacks `names` for some `seconds` in all, and returns what each accounted for.

    The starts of servers come on top; the short form does without the larger models. With `fronts` each server is as
    many of those and an engine.
    """
    attacks = [ATTACKS[name] for name in names if not (fronts and ATTACKS[name].site in WITHOUT_FRONTS)]
    weights = sum(attack.weight for attack in attacks)
    tallies: dict[str, Tally] = {}
    with tempfile.TemporaryDirectory(prefix="xlaserve-attack-") as folder:
        sites = _Sites(Path(folder), is_short=is_short, fronts=fronts)
        try:
            for attack in attacks:
                say(f"{attack.name}: {attack.summary}")
                server = sites.get(attack.site)
                share_s = seconds * attack.weight / weights
                own = Path(folder) / attack.name
                round = Round(
                    attack, seed=seed, seconds=share_s, is_short=is_short, shared=server, folder=own, fronts=fronts
                )
                tally = tallies[attack.name] = _run_one(round)
                say("\n".join((f"  {describe(tally)}", *(f"  FAULT {fault}" for fault in tally.faults))))
        finally:
            ended = sites.stop()
        tallies["the end"] = ended
    return tallies


def _run_one(round: Round) -> Tally:
    tally, server = round.tally, round.shared
    began, said, before_bytes = time.monotonic(), 0, 0
    if server:
        said = len(server.log)
        server.peak_bytes = before_bytes = server.resident_bytes
    try:
        round.attack.run(round)
    except (ServerError, OSError) as error:
        tally.fault(f"{type(error).__name__}: {error}")
    finally:
        round.end()
    if not tally.tried:
        tally.fault("nothing was tried")
    if server:
        examine(server, tally, said, round.attack.outage_s)
        grown_mib = (server.peak_bytes - before_bytes) / MIB
        tally.notes.append(f"+{max(0, grown_mib):.0f} MiB")
        most_mib = round.attack.most_mib + server.fronts * FRONT_MIB
        if grown_mib > most_mib:
            tally.fault(f"the server grew by {grown_mib:.0f} MiB, expected at most {most_mib}")
    for each in round.started:
        for line in each.bad_lines(but=round.attack.expects):
            tally.fault(f"in the log: {line}")
    tally.notes.append(f"{time.monotonic() - began:.0f} s")
    return tally


def examine(server: Server, tally: Tally, said: int = 0, outage_s: float = 0.0) -> None:
    """Notes in `tally` what is wrong with a server that nobody attacks any more, or not since `outage_s`.

    Its log is read from `said` on.
    """
    if not server.is_alive:
        tally.fault(f"the server died with {server.process.returncode}: {server.log[-2000:]}")
        return
    try:
        _check_serves(server, tally, outage_s)
        give_up_at = time.monotonic() + QUIET_S
        while left := server.metric("xlaserve_in_flight_requests") + server.metric("xlaserve_in_flight_images"):
            if time.monotonic() > give_up_at:
                tally.fault(f"requests and images still under way after {QUIET_S:g} s: {left:g}")
                break
            time.sleep(0.05)
        if server.metric('xlaserve_xla_compilations_total{phase="serving"}'):
            tally.fault("XLA compiled while serving")
        if server.get("/readyz")[0] != 200:
            tally.fault("/readyz is not 200")
    except OSError as error:
        tally.fault(f"HTTP does not answer: {error!r}")
    for line in server.bad_lines(said):
        tally.fault(f"in the log: {line}")


def _check_serves(server: Server, tally: Tally, outage_s: float) -> None:
    config = server.config_file.read_text()
    with Client(server.grpc) as client:
        for valid in (samples.classify(list(range(10))), samples.noop([1, 200]), samples.shapes("Detect")):
            name = getattr(valid.message, "model", "") or getattr(valid.message, "model_name", "")
            if f'"name": "{name}"' not in config:
                continue
            message = valid.message.SerializeToString()
            outcome, data, details = client.send_until_answered(valid.method, message, outage_s).outcome()
            if wrong := (valid.check(data) if outcome == OK else f"{outcome} {details}"):
                tally.fault(f"a normal request afterwards: {name}: {wrong}")
                server.is_fit = False
        outcome, *_ = client.send_until_answered(f"{INFERENCE}ServerLive", b"", outage_s).outcome()
        if outcome != OK:
            tally.fault(f"ServerLive afterwards: {outcome}")
            server.is_fit = False


class _Sites:
    """Servers that attacks share, started when one is wanted, and again where one has died or no longer serves."""

    def __init__(self, folder: Path, *, is_short: bool, fronts: int) -> None:
        self._folder = folder
        self._fronts = fronts
        self._shared = {**SHARED, "models": SHARED["models"][:2] if is_short else SHARED["models"]}
        self._servers: dict[str, Server] = {}
        self._count = 0

    def get(self, site: str) -> Server | None:
        if site == "own":
            return None
        if (server := self._servers.get(site)) and not server.is_fit:
            server.kill()
        if not server or not server.is_alive:
            self._count += 1
            config = self._shared if site == "shared" else _sizes(self._folder)
            server = Server(config, self._folder / f"{site}{self._count}", fronts=self._fronts)
            self._servers[site] = server.wait_until_ready()
        return self._servers[site]

    def stop(self) -> Tally:
        """Ends them, and returns what came of that."""
        tally = Tally()
        for site, server in self._servers.items():
            try:
                status = server.stop()
                tally.outcomes[OK if status == 0 else f"status {status}"] += 1
                if status:
                    tally.fault(f"the server {site} ended with {status}")
            except ServerError as error:
                tally.fault(f"the server {site}: {error}")
        return tally


def _sizes(folder: Path) -> dict[str, Any]:
    """Returns the settings of a server with a model that takes every size, which a process with Keras writes first."""
    file = folder / "any.keras"
    subprocess.run([sys.executable, "-c", sizes.SAVE, str(file)], check=True, capture_output=True, timeout=120)
    model = {
        **{"name": "any", "source": str(file), "buckets": [1, 2], "modes": ["xla"]},
        **{"resolutions": sizes.RESOLUTIONS, "unmatched": "background"},
        "max_background_resolutions": sizes.MAX_NEW,
    }
    return {"models": [model, NOOP], "max_message_bytes": 24 * MIB}


def describe(tally: Tally) -> str:
    """Returns a tally in a line."""
    outcomes = ", ".join(f"{count} {name}" for name, count in tally.outcomes.most_common())
    notes = f" ({', '.join(tally.notes)})" if tally.notes else ""
    return f"{tally.tried} tried: {outcomes or 'nothing'}; {tally.lost} lost; {tally.fault_count} faults{notes}"
