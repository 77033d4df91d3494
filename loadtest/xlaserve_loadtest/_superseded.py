"""The first closed loop's report; goes with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from rich import box
from rich.table import Table

from xlaserve_loadtest import environment
from xlaserve_loadtest.session import Session
from xlaserve_loadtest.stats import Summary as ArmSummary
from xlaserve_loadtest.stats import ratio_to
from xlaserve_loadtest.stats import summarize as summarize_arm

BASELINE: Final = "graph"
INDICATIVE: Final = "indicative: no confidence interval yet"

_BUSY: Final = 0.8
"""Share of a core from which on the load generator may be what limits the result."""


def summaries(session: Session) -> list[ArmSummary]:
    """Returns what each mode of the session did, in the order asked for."""
    requests = session.record.requests()
    return [summarize_arm(mode, session.record.blocks, requests) for mode in session.settings.modes]


def baseline(arms: Sequence[ArmSummary]) -> ArmSummary | None:
    """Returns the arm that the others are held against, where it is among them and they are several."""
    return next((arm for arm in arms if arm.arm == BASELINE and len(arms) > 1), None)


def document(session: Session, arms: Sequence[ArmSummary], *, interrupted: bool) -> dict[str, Any]:
    """Returns the report as JSON's types."""
    base = baseline(arms)
    settings = dataclasses.asdict(session.settings)
    return {
        "schema": "xlaserve.loadtest/1",
        "started_at": session.started_at.isoformat(timespec="seconds"),
        "interrupted": interrupted,
        "complete": complete(session, arms),
        "configuration": {**settings, "config": settings["config"] and str(settings["config"])},
        "environment": environment.describe(),
        "server": {
            "address": session.address,
            "embedded": session.settings.target is None,
            "name": session.info and session.info.server,
            "model": session.info and {"name": session.info.name, **session.info.properties},
            "ended": session.obituary,
        },
        "baseline": base and base.arm,
        "ratio_note": INDICATIVE,
        "modes": [
            {
                "mode": arm.arm,
                **{key: value for key, value in dataclasses.asdict(arm).items() if key != "arm"},
                "images_per_s_ratio": ratio_to(base, arm) if base else None,
                "failure_messages": _messages(session, arm),
            }
            for arm in arms
        ],
    }


def complete(session: Session, arms: Sequence[ArmSummary]) -> bool:
    """Whether every block that was planned was run and answered."""
    return bool(session.plan) and all(_answered_blocks(arm) == _planned_blocks(session, arm) for arm in arms)


def table(session: Session, arms: Sequence[ArmSummary]) -> Table:
    """Returns the report's figures for a terminal."""
    settings = session.settings
    base = baseline(arms)
    images = "1 image" if settings.images_per_request == 1 else f"{settings.images_per_request} images"
    title = (
        f"{settings.model}: {settings.concurrency} at a time, {images} a request ({settings.payload}), latency in ms"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("mode")
    for heading in ("images/s", "requests/s", "mean", *arms[0].percentiles_ms, "errors"):
        table.add_column(heading, justify="right", no_wrap=True)
    if base:
        table.add_column(f"/ {base.arm}*", justify="right", no_wrap=True)
    for arm in arms:
        ratio = ratio_to(base, arm) if base else None
        table.add_row(
            arm.arm,
            _number(arm.images_per_s),
            _number(arm.requests_per_s),
            _number(arm.mean_ms),
            *(_number(value) for value in arm.percentiles_ms.values()),
            str(sum(arm.errors.values()) + sum(arm.warmup_errors.values())),
            *([] if base is None else ["-" if ratio is None else f"{ratio:.2f}"]),
        )
    return table


def notes(session: Session, arms: Sequence[ArmSummary], *, interrupted: bool) -> list[str]:
    """Returns the lines to read below the table: what its signs mean, and what went wrong."""
    lines = []
    if baseline(arms):
        lines.append(f"* images/s over those of {BASELINE}; {INDICATIVE}")
    if any(arm.requests and None in arm.percentiles_ms.values() for arm in arms):
        lines.append("- too few answers to tell")
    for arm in arms:
        answered, planned = _answered_blocks(arm), _planned_blocks(session, arm)
        if answered < planned and not interrupted:
            lines.append(f"{arm.arm}: stopped answering; {answered} of {planned} blocks were measured")
        messages = _messages(session, arm)
        for status, message in messages.items():
            count, warming = arm.errors.get(status, 0), arm.warmup_errors.get(status, 0)
            lines.append(f"{arm.arm}: {count + warming} x {status}, {warming} of them in warm-up: {message}")
        if arm.generator_busy is not None and arm.generator_busy > _BUSY:
            busy = f"it kept {arm.generator_busy:.0%} of a core busy"
            lines.append(f"{arm.arm}: the load generator may have been the limit: {busy}")
    if session.obituary:
        lines.append(session.obituary)
    if interrupted:
        lines.append("interrupted: this is what was measured until then")
    return lines


def _answered_blocks(arm: ArmSummary) -> int:
    return sum(bool(rate) for rate in arm.block_images_per_s)


def _planned_blocks(session: Session, arm: ArmSummary) -> int:
    return sum(block.arm == arm.arm for block in session.plan)


def _messages(session: Session, arm: ArmSummary) -> dict[str, str]:
    return {status.name: text for (name, status), text in session.record.failures.items() if name == arm.arm}


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
