"""Where each option of `loadtest` applies. One that a run would ignore is refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Final

from xlaserve_loadtest.addresses import Address
from xlaserve_loadtest.schedule.arms import ALL
from xlaserve_loadtest.settings import NULL

_SEVERAL_CONNECTIONS: Final = ("", "tfs")
"""Protocols over gRPC; the servers of a fleet get a connection each."""

_Applies = Callable[[argparse.Namespace], object]


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Ends with status 2 where an option is given that does not apply beside the others."""
    for name, (where, applies) in _USES.items():
        value = getattr(options, name)
        is_given = value is not None and value is not False and value not in ((), [])
        if is_given and not applies(options):
            parser.error(f"--{name.replace('_', '-')} is for {where}")


def is_search(options: argparse.Namespace) -> bool:
    """Whether the highest rate is searched."""
    return bool(options.find_max or options.scenario == "server")


def is_open(options: argparse.Namespace) -> bool:
    """Whether the load is an open loop, and no search."""
    return bool(options.rate or options.profile or options.replay)


def is_running(options: argparse.Namespace) -> bool:
    """Whether the servers were running before."""
    return bool(options.arm or options.target) and NULL not in options.target


def addresses(options: argparse.Namespace) -> list[str]:
    """Returns the addresses of running servers."""
    named = [target for target in options.target if target != NULL]
    return [*named, *(address for arm in options.arm for address in arm.addresses)]


def compares(options: argparse.Namespace) -> bool:
    """Whether arms are compared, as far as the command line tells: a running server may offer one mode alone."""
    if options.arm:
        return len(options.arm) > 1
    return NULL not in options.target and (len(options.mode) != 1 or options.mode == (ALL,))


def _starts_servers(options: argparse.Namespace) -> bool:
    return not (options.target or options.arm or options.in_process)


def _takes_rates(options: argparse.Namespace) -> bool:
    return bool(options.rate or options.profile)


def _draws_arrivals(options: argparse.Namespace) -> bool:
    return (_takes_rates(options) or is_search(options)) and options.arrivals != "constant"


_RUNNING: Final = ("--target and --arm", is_running)
_OF_OWN: Final[tuple[str, _Applies]] = (
    "servers that are started here, and --in-process",
    lambda options: not (options.target or options.arm),
)
_SLO: Final[tuple[str, _Applies]] = (
    "--find-max, --scenario server, and open loops: --rate, --profile and --replay",
    lambda options: is_search(options) or is_open(options),
)

_USES: Final[Mapping[str, tuple[str, _Applies]]] = {
    "mode": ("all targets but --target null", lambda options: NULL not in options.target),
    "baseline": ("several arms", compares),
    "equality_images": (
        "all targets but --target null",
        lambda options: NULL not in options.target or not options.equality_images,
    ),
    "target_http": (
        "--target; the servers of arms are asked on their own",
        lambda options: options.target and NULL not in options.target,
    ),
    "config": _OF_OWN,
    "share_process": _OF_OWN,
    "processes": (
        "several arms on servers that are started here, without --share-process, --find-max and --scenario server",
        lambda options: (
            _starts_servers(options) and compares(options) and not options.share_process and not is_search(options)
        ),
    ),
    "start_timeout": (
        "servers that are started here",
        lambda options: _starts_servers(options) or NULL in options.target,
    ),
    "tls": _RUNNING,
    "tls_ca": _RUNNING,
    "tls_cert": _RUNNING,
    "tls_key": _RUNNING,
    "tls_server_name": _RUNNING,
    "header": _RUNNING,
    "compression": _RUNNING,
    "connections": (
        "--target and --arm over gRPC, as HOST:PORT or tfs://HOST:PORT",
        lambda options: any(Address.parse(one).protocol in _SEVERAL_CONNECTIONS for one in addresses(options)),
    ),
    "arrivals": (
        "--rate, --profile and --find-max",
        lambda options: _takes_rates(options) or options.find_max,
    ),
    "burst": ("--rate and --profile", _takes_rates),
    "save_arrivals": ("--rate, --profile and --replay", is_open),
    "max_in_flight": (
        "open loops: --rate, --profile, --replay, --find-max and --scenario server",
        lambda options: is_open(options) or is_search(options),
    ),
    "slo": _SLO,
    "slo_ms": _SLO,
    "duration": ("all loads but --profile, which lasts as long as its stages", lambda options: not options.profile),
    "block": (
        "all loads but --profile, --replay, --find-max and --scenario server, whose blocks have lengths of their own",
        lambda options: not (options.profile or options.replay or is_search(options)),
    ),
    "deadline": ("servers; --in-process has none", lambda options: not options.in_process),
    "workers": ("servers; --in-process sends nothing", lambda options: not options.in_process),
    "generator_key": ("--generator", lambda options: options.generator),
    "schedule_seed": (
        "arrivals that are drawn: of --rate, --profile, --find-max and --scenario server",
        _draws_arrivals,
    ),
    "sample_seed": ("--scenario", lambda options: options.scenario),
    "input": _RUNNING,
    "shape": _RUNNING,
    "out": ("run files without a name; the page is beside --record", lambda options: options.record is None),
}
"""The uses of an option, in words and as a condition. An option that is not here applies to every run, or
`option_checks` refuses it with a reason of its own."""
