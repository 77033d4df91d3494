"""Every option of `loadtest` in every mode of use: it applies, or it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from xlaserve_loadtest import cli
from xlaserve_loadtest.option_checks import settings_of

SEVERAL: Final = frozenset({"started", "shared", "in-process", "target", "rest", "arms", "mixed arms"})
ONE_ARM: Final = frozenset({"started, one mode", "target, one mode", "one arm"})
NULL: Final = frozenset({"null"})
OPEN: Final = frozenset({"rate", "constant rate", "profile", "replay"})
SEARCH: Final = frozenset({"find-max", "server"})
SCENARIO: Final = frozenset({"offline"})
LOADS: Final = OPEN | SEARCH | SCENARIO
ALL: Final = SEVERAL | ONE_ARM | NULL | LOADS
RUNNING: Final = frozenset({"target", "target, one mode", "rest", "arms", "mixed arms", "one arm"})
ARMS: Final = frozenset({"arms", "mixed arms", "one arm"})
OF_OWN: Final = ALL - RUNNING - NULL

USES: Final[Mapping[str, tuple[str, ...]]] = {
    "started": (),
    "started, one mode": ("--mode", "xla"),
    "shared": ("--share-process",),
    "in-process": ("--in-process",),
    "null": ("--target", "null"),
    "target": ("--target", "h:1"),
    "target, one mode": ("--target", "h:1", "--mode", "xla"),
    "rest": ("--target", "https://h:1"),
    "arms": ("--arm", "a=h:1", "--arm", "xla=h:2"),
    "mixed arms": ("--arm", "a=https://h:1", "--arm", "xla=tfs://h:2"),
    "one arm": ("--arm", "a=h:1"),
    "rate": ("--rate", "5"),
    "constant rate": ("--rate", "5", "--arrivals", "constant"),
    "profile": ("--profile", "5:1"),
    "replay": ("--replay", "trace"),
    "find-max": ("--find-max", "--slo", "p99<5ms"),
    "server": ("--scenario", "server", "--slo-ms", "5"),
    "offline": ("--scenario", "offline"),
}

OPTIONS: Final[Mapping[str, tuple[tuple[str, ...], frozenset[str]]]] = {
    "--mode": (("--mode", "xla,graph"), ALL - ARMS - NULL),
    "--model": (("--model", "other"), ALL - NULL),
    "--mix": (("--mix", "a:1,b:1"), ALL - NULL),
    "--arm": (("--arm", "b=h:3"), ALL - (SEVERAL | ONE_ARM | NULL) | ARMS | {"started"}),
    "--baseline": (("--baseline", "xla"), SEVERAL | LOADS),
    "--no-control": (("--no-control",), ALL),
    "--equality-images": (("--equality-images", "8"), ALL - NULL),
    "--target": (("--target", "h:3"), LOADS | RUNNING - ARMS | NULL | {"started", "started, one mode"}),
    "--target-http": (("--target-http", "h:3"), RUNNING - ARMS),
    "--in-process": (("--in-process",), OF_OWN),
    "--config": (("--config", "trace"), OF_OWN),
    "--processes": (("--processes", "2"), OPEN | SCENARIO | {"started"}),
    "--share-process": (("--share-process",), OF_OWN),
    "--start-timeout": (("--start-timeout", "9"), OF_OWN - {"in-process"} | NULL),
    "--tls": (("--tls",), RUNNING),
    "--tls-ca": (("--tls-ca", "ca"), RUNNING),
    "--tls-cert": (("--tls-cert", "client-cert", "--tls-key", "client-key"), RUNNING),
    "--tls-key": (("--tls-key", "client-key", "--tls-cert", "client-cert"), RUNNING),
    "--tls-server-name": (("--tls-server-name", "name"), RUNNING),
    "--header": (("--header", "a=b"), RUNNING),
    "--compression": (("--compression", "gzip"), RUNNING),
    "--connections": (("--connections", "3"), RUNNING - {"rest"}),
    "--concurrency": (("--concurrency", "8"), ALL - LOADS),
    "--rate": (("--rate", "7"), ALL - LOADS | {"rate", "constant rate"}),
    "--profile": (("--profile", "7:1"), ALL - LOADS | {"profile"}),
    "--arrivals": (("--arrivals", "poisson"), OPEN - {"replay"} | {"find-max"}),
    "--burst": (("--burst", "2"), OPEN - {"replay"}),
    "--replay": (("--replay", "trace"), ALL - LOADS | {"replay"}),
    "--save-arrivals": (("--save-arrivals", "saved"), OPEN),
    "--max-in-flight": (("--max-in-flight", "3"), OPEN | SEARCH),
    "--scenario": (("--scenario", "single-stream"), ALL - LOADS | SCENARIO),
    "--find-max": (("--find-max", "--slo", "p99<5ms"), ALL - LOADS | {"find-max"}),
    "--slo": (("--slo", "p99<5ms"), OPEN | {"find-max"}),
    "--slo-ms": (("--slo-ms", "5"), OPEN | {"server"}),
    "--duration": (("--duration", "9"), ALL - {"profile"}),
    "--warmup": (("--warmup", "1"), ALL),
    "--block": (("--block", "2"), ALL - SEARCH - {"profile", "replay"}),
    "--full-duration": (("--full-duration",), ALL),
    "--deadline": (("--deadline", "3"), ALL - {"in-process"}),
    "--workers": (("--workers", "2"), ALL - {"in-process"}),
    "--generator": (("--generator", "g:1"), ALL - {"in-process"} - NULL),
    "--generator-key": (("--generator-key", "key"), frozenset()),
    "--seed": (("--seed", "0"), ALL),
    "--schedule-seed": (("--schedule-seed", "0"), SEARCH | {"rate", "profile"}),
    "--sample-seed": (("--sample-seed", "0"), SCENARIO | {"server"}),
    "--images": (("--images", ".", "--payload", "pixels"), ALL),
    "--payload": (("--payload", "pixels"), ALL),
    "--distinct": (("--distinct",), ALL),
    "--images-per-request": (("--images-per-request", "2"), ALL - SCENARIO - {"server", "replay"}),
    "--input": (("--input", "a=zeros"), RUNNING),
    "--shape": (("--shape", "a=3"), RUNNING),
    "--size": (("--size", "8x8"), ALL - {"replay"}),
    "--out": (("--out", "."), ALL),
    "--record": (("--record", "run.gz"), ALL),
    "--abort-if": (("--abort-if", "errors>0"), ALL - SEARCH),
    "--live-port": (("--live-port", "9100"), ALL),
    "--details": (("--details",), ALL),
    "--html": (("--html", "r"), ALL),
    "--csv": (("--csv", "r"), ALL),
    "--json": (("--json", "r"), ALL),
    "--markdown": (("--markdown", "r"), ALL),
    "--junit": (("--junit", "r"), ALL),
    "--fail-if": (("--fail-if", "errors>0"), ALL),
    "--these-processes": (("--these-processes",), ALL),
}
"""An example of each option, and the modes of use in which it applies."""


def is_taken(*words: str) -> bool:
    parser = cli.parser()
    try:
        settings_of(parser.parse_args(words), parser)
    except SystemExit:
        return False
    return True


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificates: Mapping[str, str]) -> None:
    """A working folder with the files that the examples name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOADTEST_GENERATOR_KEY", "k" * 64)
    Path("trace").write_text('{"at_s": 0, "images": 2, "size": "8x8"}\n')
    for name, path in certificates.items():
        Path(name).symlink_to(path)


def test_every_option_is_looked_at() -> None:
    names = {action.option_strings[0] for action in cli.parser()._actions if action.option_strings}
    assert names - {"-h", "--version", "--print-completion"} == OPTIONS.keys()


@pytest.mark.parametrize("use", USES)
def test_every_mode_of_use_is_one(use: str) -> None:
    assert is_taken(*USES[use])


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_refused_wherever_a_run_would_ignore_it(option: str) -> None:
    words, applies = OPTIONS[option]
    assert {use for use, others in USES.items() if is_taken(*others, *words)} == applies


@pytest.mark.parametrize(
    "words",
    [
        ("--record", "run.gz", "--out", "."),
        ("--target", "h:1", "--input", "a=zeros", "--payload", "pixels"),
        ("--target", "fleet://h:1", "--connections", "3"),
        ("--mode", "xla,graph", "--baseline", "eager"),
        ("--baseline", "eager"),
        ("--arm", "a=h:1,model=one", "--arm", "b=h:2,model=two", "--model", "three"),
    ],
)
def test_an_option_that_another_leaves_without_use_is_refused(words: tuple[str, ...]) -> None:
    assert not is_taken(*words)


def test_a_trial_of_no_images_is_what_the_null_target_has_anyway() -> None:
    assert is_taken("--target", "null", "--equality-images", "0")
