"""The `xlaserve-fleet` command."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from xlaserve.errors import ConfigError, XlaserveError
from xlaserve_client.cli_parser import Parser, add_completion
from xlaserve_fleet import folders, follow, haproxy, settings
from xlaserve_fleet.addresses import Entry
from xlaserve_fleet.policy import BUSY, WAIT
from xlaserve_fleet.settings import LOCAL, FleetSettings

TIMEOUT_S: Final = 600.0
POLL_S: Final = 0.5
GRPC_PORT: Final = 8001
HTTP_PORT: Final = 8000
WIDTH: Final = 120
"""Columns of the table where stdout is no terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 when something failed, 2 for a wrong command line."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    own = parser().parse_args(arguments)
    try:
        return int(own.run(own))
    except XlaserveError as error:
        _say(f"xlaserve-fleet: {error}")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def up(own: argparse.Namespace) -> int:
    """Starts the fleet, or makes one that is there what the file says."""
    fleet = settings.load(own.file)
    cluster = _cluster()
    with cluster.connected(fleet):
        if fleet.ray != LOCAL:
            _deploy(cluster, fleet, own)
            return 0
        # What ends this command ends Ray, and so the servers: they drain first. Ray has set a handler of its own.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            _deploy(cluster, fleet, own)
            _say("Ctrl-C stops it")
            while cluster.is_up(fleet):
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            _say("draining")
            cluster.down(fleet)
    return 0


def update(own: argparse.Namespace) -> int:
    """Makes a fleet what the file says, while some of its servers serve."""
    with _existing(own) as (cluster, fleet):
        _deploy(cluster, fleet, own, own.restart)
    return 0


def status(own: argparse.Namespace) -> int:
    """Shows the servers."""
    with _existing(own) as (cluster, fleet):
        seen = cluster.status(fleet)
    if seen is None:  # another command has taken it down just now
        raise _absent(fleet)
    if own.json:
        servers = [
            {"id": one.id, "address": one.address, "http": one.http, "state": one.state, **one.about}
            for one in seen.servers
        ]
        found = {"state": seen.state, "message": seen.message, "replicas": seen.replicas, "names": seen.names}
        sys.stdout.write(json.dumps({**found, "servers": servers}, indent=2) + "\n")
    else:
        out = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
        out.print(f"{fleet.name}: {seen.state.lower()}: {seen.counts}; at fleet://{seen.names or '(no name service)'}")
        if seen.message:
            out.print(seen.message.strip(), markup=False)
        out.print(_table(seen.servers))
    return 0


def down(own: argparse.Namespace) -> int:
    """Drains and stops the servers, and the name service."""
    with _existing(own) as (cluster, fleet):
        cluster.down(fleet)
    _say("stopped")
    return 0


def following(own: argparse.Namespace) -> int:
    """Writes files whenever the servers change, for ever."""
    if not own.addresses_file and not own.haproxy:
        raise ConfigError("follow: expected --addresses-file, --haproxy or both")
    used: list[follow.Server] | None = None
    for servers in follow.lists(own.names):
        if servers != used:
            used = servers if _use(own, servers) else None
        if own.once:
            break
    return 0 if used is not None else 1


def parser() -> argparse.ArgumentParser:
    """Returns the command's parser."""
    top = Parser(prog="xlaserve-fleet", description="Runs servers on many machines, which Ray places.")
    top.add_argument("--version", action="version", version=version("xlaserve"))
    actions = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, action: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        found = actions.add_parser(name, help=text)
        found.set_defaults(run=action)
        return found

    def add_file(found: argparse.ArgumentParser) -> None:
        found.add_argument("--config", dest="file", type=Path, required=True, metavar="FILE", help="the fleet's YAML")

    def add_timeout(found: argparse.ArgumentParser) -> None:
        found.add_argument(
            "--timeout-s",
            type=_positive,
            default=TIMEOUT_S,
            metavar="S",
            help=f"how long to wait until all servers are ready; {TIMEOUT_S:g} by default",
        )

    starting = add("up", up, "start servers, and wait until they are ready")
    add_file(starting)
    add_timeout(starting)
    shown = add("status", status, "show the servers")
    add_file(shown)
    shown.add_argument("--json", action="store_true", help="print JSON instead of a table")
    changed = add("update", update, "apply a changed file: servers are replaced while others serve")
    add_file(changed)
    add_timeout(changed)
    changed.add_argument(
        "--restart", action="store_true", help="replace the servers even where the file is as before: for new weights"
    )
    add_file(add("down", down, "drain and stop all servers"))
    followed = add("follow", following, "write files for proxies and others whenever the servers change")
    followed.add_argument("names", metavar="HOST:PORT", help="the fleet's name service")
    followed.add_argument("--addresses-file", type=Path, metavar="FILE", help="where to write an address a line")
    followed.add_argument("--haproxy", type=Path, metavar="FILE", help="where to write HAProxy's configuration")
    followed.add_argument("--grpc-port", type=int, default=GRPC_PORT, metavar="N", help="HAProxy's, for gRPC; 8001")
    followed.add_argument("--http-port", type=int, default=HTTP_PORT, metavar="N", help="HAProxy's, for HTTP; 8000")
    followed.add_argument("--reload", metavar="COMMAND", help="what to run when the files have changed")
    followed.add_argument("--once", action="store_true", help="write them once, and end")
    add_completion(top)
    return top


def _positive(text: str) -> float:
    """Parses a finite number greater than 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number greater than 0, got {text!r}")
    return value


def _use(own: argparse.Namespace, servers: list[follow.Server]) -> bool:
    """Writes the files and runs the command; returns whether all of it worked. Raises ConfigError with `--once`."""
    try:
        if own.addresses_file:
            follow.write(own.addresses_file, follow.addresses(servers))
        if own.haproxy:
            follow.write(own.haproxy, haproxy.configuration(servers, own.grpc_port, own.http_port))
    except ConfigError as error:
        if own.once:
            raise
        _say(str(error))
        return False
    if own.reload and not follow.reload(own.reload):
        return False
    _say(f"{len(servers)} servers")
    return True


def _cluster() -> ModuleType:
    """Returns the module that needs Ray. Raises ConfigError where that is missing."""
    try:
        from xlaserve_fleet import cluster  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(f"fleet: it needs the extra ray: pip install 'xlaserve[ray]' ({error})") from None
    return cluster


@contextmanager
def _existing(own: argparse.Namespace) -> Iterator[tuple[Any, FleetSettings]]:
    """Connects to the cluster of a fleet that is up. Raises ConfigError where there is none."""
    fleet = settings.load(own.file)
    joined = _joined(fleet)  # before Ray is imported
    cluster = _cluster()
    with cluster.connected(joined):
        if not cluster.is_up(fleet):
            raise _absent(fleet)
        yield cluster, fleet


def _joined(fleet: FleetSettings) -> FleetSettings:
    """Returns the settings with which a second command finds the cluster that `up` has started."""
    if fleet.ray != LOCAL:
        return fleet
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # as a local cluster has it; read when Ray is imported
    try:
        return fleet.model_copy(update={"ray": folders.read(fleet.local_address)})
    except OSError:
        raise _absent(fleet) from None


def _deploy(cluster: Any, fleet: FleetSettings, own: argparse.Namespace, restart: bool = False) -> None:
    deployed = cluster.deploy(fleet, restart)
    seen = cluster.wait(fleet, deployed.revision, own.timeout_s, _say)
    _say(f"{len(seen.servers)} servers are ready at fleet://{deployed.names}")


def _absent(fleet: FleetSettings) -> ConfigError:
    return ConfigError(f"name: there is no fleet {fleet.name}")


def _table(servers: list[Entry]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("server", "gRPC", "HTTP", "state", "wait ms", "lanes busy", "revision", "node", "pid"):
        table.add_column(title)
    for one in servers:
        about = one.about
        load = (f"{about[WAIT] * 1000:.3g}", f"{about[BUSY]:.0%}") if WAIT in about else ("", "")
        revision, node = str(about.get("revision", "")), str(about.get("node", ""))[:8]
        table.add_row(one.id, one.address, one.http, one.state, *load, revision, node, str(about.get("pid", "")))
    return table


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
