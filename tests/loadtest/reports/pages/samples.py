"""Runs of every kind that a report has to show, as run files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tests.loadtest.run_files import ENVIRONMENT, RunFile

from xlaserve_loadtest.analysis.summary import Summary, summarize
from xlaserve_loadtest.record.blocks import BlockLine, Counters, GeneratorUse, LoadLine, ServerUse
from xlaserve_loadtest.record.lines import Arm, End, Equality, Event, Failure, LedgerEntry
from xlaserve_loadtest.record.requests import Status
from xlaserve_loadtest.record.run_file import read_run

STAGES_S = {"decode_s": 0.0004, "queue_s": 0.002, "gather_s": 0.0001, "execute_s": 0.006, "encode_s": 0.0003}
MODELS = ("efficientnetv2b0", "inception_resnet_v2")
MODES = ("xla", "graph", "autocluster")
LOADS = (
    LoadLine("closed", concurrency=1),
    LoadLine("closed", concurrency=16, images_per_request="1:0.7,8:0.3"),
    LoadLine("open", rate_per_s=50.0, arrivals="poisson"),
    LoadLine("open", rate_per_s=130.0, ramp_per_s=(20.0, 240.0), arrivals="constant"),
)
CLOSED = tuple(LoadLine("closed", concurrency=slots) for slots in (1, 4, 16, 64))
OPEN = tuple(LoadLine("open", rate_per_s=rate, arrivals="poisson") for rate in (20.0, 50.0, 80.0))
PROFILES = (
    LoadLine("open", rate_per_s=65.0, arrivals="poisson", stages=((0.0, 100.0, 10.0), (100.0, 100.0, 30.0)), burst=8),
    LoadLine("open", rate_per_s=50.0, arrivals="constant", burst=4),
)
KEPT_UP = GeneratorUse(workers=2, cpu_s=0.1, sends=200, late_sends=1, busy=0.31)
EARLIER = 5 * 10**11
MS = {"xla": 8.0, "graph": 11.0, "autocluster": 17.0}


def arms_of(models: tuple[str, ...] = MODELS, modes: tuple[str, ...] = MODES) -> tuple[Arm, ...]:
    found = []
    for model, mode in product(models, modes):
        name = f"{model} {mode}" if len(models) > 1 else mode
        found.append(Arm(name, mode, model, "embedded"))
        if mode == "graph":
            found.append(Arm(f"{name} (again)", mode, model, "embedded", is_control_of=name))
    return tuple(found)


def ledger(arms: tuple[Arm, ...], batches: tuple[int, ...] = (1, 4, 16, 64)) -> tuple[LedgerEntry, ...]:
    return tuple(
        LedgerEntry(
            arm.mode,
            (batch, 299, 299),
            1.1,
            0.0 if arm.mode == "graph" else 3 + batch / 9,
            0.004,
            0.006,
            None,
            arm.model,
        )
        for arm in arms
        if arm.is_control_of is None
        for batch in batches
    )


def new_run(path: Path, arms: tuple[Arm, ...], **header: Any) -> RunFile:
    command = (
        "loadtest",
        "--mode",
        "xla,graph,autocluster",
        "--model",
        ",".join(MODELS),
        "--config",
        "/etc/xlaserve/config.yaml",
    )
    environment = replace(
        ENVIRONMENT,
        cpu="AMD EPYC 9B14 96-Core Processor",
        system="Linux-6.1.0-29-cloud-amd64-x86_64-with-glibc2.36",
        packages={"tensorflow": "2.21.0", "keras": "3.15.1", "grpcio": "1.80.0", "numpy": "2.4.1"},
        flags={"XLA_FLAGS": "--xla_cpu_use_thunk_runtime=true --xla_cpu_fast=true", "TF_ENABLE_ONEDNN_OPTS": "1"},
    )  # fmt: skip
    options = {
        "arms": arms,
        "baseline": arms[1].name if len(arms) > 1 else None,
        "command": command,
        "environment": environment,
    }
    run = RunFile(path)
    run.header(())
    run.lines[0] = replace(run.lines[0], **{**options, **header})
    run.server(
        arms=tuple(arm.name for arm in arms),
        ledger=ledger(arms),
        ready_s=48.0,
        models={model: {"weights": "random"} for model in MODELS},
    )
    return run


def add_blocks(
    run: RunFile, arms: tuple[Arm, ...], loads: tuple[LoadLine, ...] = LOADS, *, rounds: int = 4, **more: Any
) -> RunFile:
    """Adds mirrored blocks of every arm under every load."""
    random = np.random.default_rng(run.blocks)
    for load, turn in product(loads, range(rounds)):
        for arm in (*arms, *reversed(arms)):
            mean_ms = MS.get(arm.mode, 14.0) * (2 if arm.model == MODELS[1] else 1) * np.exp(random.normal(0, 0.03))
            latencies = mean_ms * (load.concurrency or 4) * random.lognormal(0, 0.2, 200)
            due = None if load.type == "closed" else np.sort(random.integers(0, 4 * 10**9, 200))
            counters = Counters({f"{batch}x299x299": 3 * batch for batch in (1, 4, 16, 64)}, 70, 200, 0, 0)
            options: dict[str, Any] = {
                "round": turn, "model": np.arange(200) % len(arm.served),
                "stages_s": {**STAGES_S, "total_s": 0.009}, "counters": counters, "due_ns": due,
                "generator": KEPT_UP, "server_use": ServerUse(3.1, 2**31, 0.4, 2**34), "steady": True,
            }  # fmt: skip
            run.block(arm.name, latencies, load=load, **{**options, **more})
    return run


def crowded(path: Path) -> Path:
    """Eight arms of long names under four loads."""
    arms = arms_of()
    run = add_blocks(new_run(path, arms), arms)
    equal = [Equality(arm.name, "graph", 64, 1e-6, 1e-5, 1.0, 1e-4, 1e-3, is_equal=True) for arm in arms]
    return run.write(*equal)


def alone(path: Path) -> Path:
    """One arm, and no baseline."""
    arms = arms_of(MODELS[:1], ("xla",))
    return add_blocks(new_run(path, arms), arms, LOADS[:1]).write()


def compared(path: Path) -> Path:
    """What most runs are: three modes of one model under one load."""
    arms = arms_of(MODELS[:1])
    return add_blocks(new_run(path, arms), arms, LOADS[1:2], rounds=6).write()


def troubled(path: Path) -> Path:
    """Every kind of warning, for every arm."""
    arms = arms_of()
    limited = GeneratorUse(workers=2, cpu_s=0.4, sends=200, late_sends=90, dropped=1234, busy=0.97)
    counters = Counters({"4x299x299": 50}, 700, 200, 3, 2)
    run = add_blocks(
        new_run(path, arms), arms, LOADS[::3], rounds=2, generator=limited, counters=counters, steady=False
    )
    for arm in arms:
        run.block(arm.name, [1000.0] * 20, load=LOADS[0], status=Status.DEADLINE_EXCEEDED, generator=KEPT_UP)
        run.block(arm.name, [5.0] * 99 + [3000.0], load=LOADS[0], generator=KEPT_UP)
    message = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:8001: Failed to connect to remote host"
    )
    return run.write(
        *(Failure(arm.name, "DEADLINE_EXCEEDED", 20, "Deadline Exceeded") for arm in arms),
        Failure(arms[0].name, "UNAVAILABLE", 1_234_567, message),
        Event(
            run.now_ns, "error", "the server ended: signal 9; tensorflow/core/framework/allocator.cc:122] exceeds 10%"
        ),
        Event(EARLIER, "note", "the clock of the server was 12 ms ahead"),
        End(interrupted=False, complete=False, reason="the server did not answer any more"),
        ends=False,
    )


def both_loops(path: Path) -> Path:
    """Closed and open loops of several loads each."""
    arms = arms_of(MODELS[:1], MODES[:2])
    return add_blocks(new_run(path, arms), arms, (*CLOSED, *OPEN)).write()


def profiled(path: Path) -> Path:
    """Stages of a rate, and bursts."""
    arms = arms_of(MODELS[:1], MODES[:2])
    return add_blocks(new_run(path, arms), arms, PROFILES).write()


def mixed(path: Path) -> Path:
    """A mix of models, in processes of its own for each arm, under a closed and an open loop."""
    models = ("resnet50", "mobilenet_v3_large", "inception_resnet_v2")
    shares = "resnet50:0.34,mobilenet_v3_large:0.33,inception_resnet_v2:0.33"
    arms = tuple(replace(arm, model=shares, models=models) for arm in arms_of((shares,), MODES[:2]))
    run = new_run(path, arms)
    for server in range(6):
        add_blocks(run, arms, (CLOSED[2], OPEN[1]), rounds=1, server=server)
    return run.write()


def between_servers(path: Path) -> Path:
    """Two running servers, one of them without modes."""
    arms = (
        Arm("ours", "xla", "resnet50", "10.0.0.1:8001,10.0.0.2:8001"),
        Arm("theirs", "", "resnet_v1", "some-long-host-name.europe-west4.internal.example:9001"),
        Arm("ours (again)", "xla", "resnet50", "10.0.0.1:8001,10.0.0.2:8001", is_control_of="ours"),
    )
    return add_blocks(new_run(path, arms, baseline="ours"), arms, CLOSED[1:2]).write()


def overloaded(path: Path) -> Path:
    """An open loop that sends more than one of the arms answers."""
    arms = arms_of(MODELS[:1], MODES[:2])
    load = LoadLine("open", rate_per_s=100.0, arrivals="poisson")
    run, random = new_run(path, arms), np.random.default_rng(0)
    for turn, arm in product(range(8), arms):
        due = np.sort(random.integers(0, 4 * 10**9, 400))
        slow = 10 + (due / 1e6 * 0.6 if arm.mode == "graph" else 0)
        run.block(arm.name, slow * random.lognormal(0, 0.1, 400), load=load, due_ns=due, round=turn, generator=KEPT_UP)
        whole = run.lines[-1]
        assert isinstance(whole, BlockLine)
        run.lines[-1] = replace(whole, window_ns=(whole.start_ns, whole.start_ns + 4 * 10**9))
    return run.write()


def starved(path: Path) -> Path:
    """A closed loop whose generator had no processor to itself."""
    arms = arms_of(MODELS[:1], MODES[:2])
    starving = GeneratorUse(
        2, 0.1, sends=200, busy=0.6, wait_ms=7.5, longest_wait_ms=120.0, preemptions=3120, steal=0.21
    )
    return add_blocks(new_run(path, arms), arms, CLOSED[1:2], generator=starving).write()


def unequal(path: Path) -> Path:
    """Arms that do not compute the same."""
    arms = arms_of()
    run = add_blocks(new_run(path, arms), arms, LOADS[:1])
    return run.write(
        *(Equality(arm.name, arms[1].name, 64, 0.31, 7.7, 0.42, 1e-4, 1e-3, is_equal=False) for arm in arms[2:])
    )


def searched(path: Path, **header: Any) -> Path:
    """A search for the highest rate, every rate tried several times."""
    arms = tuple(arm for arm in arms_of() if arm.is_control_of is None)
    configuration = {"duration_s": 5.0, "slo": "p99<50ms", "find_max": True}
    run = new_run(path, arms, **{"configuration": configuration, **header})
    random = np.random.default_rng(0)
    for arm, rate, role in product(arms, (20.0, 40.0, 60.0, 80.0, 95.0), ("search", "search", "search")):
        busy = rate * MS[arm.mode] / 1000
        latencies = MS[arm.mode] / max(0.05, 1 - busy) * random.lognormal(0, 0.2, 600)
        due = np.sort(random.integers(0, 5 * 10**9, 600))
        load = LoadLine("open", rate_per_s=rate, arrivals="poisson")
        run.block(
            arm.name,
            latencies,
            load=load,
            due_ns=due,
            role=role,
            generator=KEPT_UP,
            stages_s={**STAGES_S, "total_s": 0.009},
        )
    for arm in arms[:2]:
        due = np.sort(random.integers(0, 100 * 10**9, 7000))
        load = LoadLine("open", rate_per_s=70.0, arrivals="poisson")
        run.block(
            arm.name, 20 * random.lognormal(0, 0.2, 7000), load=load, due_ns=due, role="confirm", generator=KEPT_UP
        )
    return run.write()


def scenario(path: Path) -> Path:
    """One of MLPerf's scenarios, which is a search as well."""
    return searched(path, scenario="server")


HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;",
    "a|`b`*c*_d_~~e~~[f](http://g) @everyone <!-- &lt;b>",
    "x\n| y | z |\n# xla is faster than graph\r\n\t- [bold]z[/]",
    "m\x1b[2J\x1b]0;owned\x07\x9b31m",
    "n" * 200,
    "k" * 199 + "z",
    "\N{RIGHT-TO-LEFT OVERRIDE}retsaf \N{HEBREW LETTER ALEF}\N{HEBREW LETTER BET}\N{LINE SEPARATOR}",
    "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{PERSONAL COMPUTER} d\N{LATIN SMALL LETTER E WITH ACUTE} \N{KATAKANA LETTER MO}",
    '=HYPERLINK("http://g")',
    "\\\"'{}%s %{x} $x$",
)
"""Names that some format would take for more than text."""


def hostile(path: Path) -> Path:
    """Names of models, arms, modes, machines and messages that mean something to a format."""
    arms = tuple(
        Arm(name, name, name, name, is_control_of=HOSTILE[0] if name == HOSTILE[1] else None, models=(name, f"{name}2"))
        for name in HOSTILE
    )
    environment = replace(ENVIRONMENT, cpu=HOSTILE[0], gpus=HOSTILE, packages=dict.fromkeys(HOSTILE, HOSTILE[0]))
    run = new_run(path, arms, baseline=HOSTILE[0], environment=environment, command=HOSTILE)
    add_blocks(run, arms, CLOSED[:2])
    failures = (Failure(name, name, 3, name) for name in HOSTILE)
    equalities = (Equality(name, HOSTILE[0], 6, 0.3, 7.7, 0.4, 1e-4, 1e-3, is_equal=False) for name in HOSTILE[1:])
    return run.write(
        *failures, *equalities, *(Event(run.now_ns, what, name) for what in ("error", "note") for name in HOSTILE)
    )


def empty(path: Path) -> Path:
    """Nothing was measured."""
    return new_run(path, arms_of()).write(End(True, False, "interrupted while the server started"), ends=False)


SAMPLES: dict[str, Callable[[Path], Path]] = {
    each.__name__: each
    for each in (
        alone,
        compared,
        both_loops,
        profiled,
        mixed,
        between_servers,
        overloaded,
        starved,
        crowded,
        troubled,
        unequal,
        searched,
        scenario,
        hostile,
        empty,
    )
}


@cache
def summary(name: str) -> Summary:
    """Returns a sample as reports show it."""
    with TemporaryDirectory() as folder:
        return summarize(read_run(SAMPLES[name](Path(folder, f"{name}.run.jsonl.gz"))))
