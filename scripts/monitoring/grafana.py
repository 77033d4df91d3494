"""Dashboards as Grafana reads them: which queries a panel sends once its variables have values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.monitoring.__main__ import DEPLOY
from scripts.monitoring.live import Prometheus

FOLDER: Final = DEPLOY / "grafana" / "dashboards"
_LABEL_VALUES: Final = re.compile(r"label_values\((.+), (\w+)\)")


@dataclass(frozen=True)
class Query:
    """One query of a panel."""

    panel: str
    text: str
    legend: str
    is_instant: bool

    def filled(self, values: Mapping[str, str], rate_interval: str) -> str:
        """Returns it with the values of variables."""
        return _filled(self.text, {**values, "__rate_interval": rate_interval})


def load(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """Returns a dashboard by the name of its file."""
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def queries(dashboard: Mapping[str, Any]) -> Iterator[Query]:
    """Yields the queries of all panels."""
    for panel in dashboard["panels"]:
        yield from queries_of(panel)


def queries_of(panel: Mapping[str, Any]) -> Iterator[Query]:
    """Yields the queries of one panel."""
    for target in panel.get("targets", ()):
        yield Query(panel["title"], target["expr"], target["legendFormat"], target.get("instant", False))


def chosen(dashboard: Mapping[str, Any], prometheus: Prometheus, **picked: str) -> dict[str, str]:
    """Returns the values of variables: all, or where one is shown at a time the one that is `picked`, or the first.

    Raises LookupError where there are none, or not that.
    """
    values: dict[str, str] = {}
    for variable in dashboard["templating"]["list"]:
        if found := _LABEL_VALUES.fullmatch(str(variable.get("query", ""))):
            there = sorted(prometheus.values(found[2], _filled(found[1], values)))
            name = variable["name"]
            wanted = there if variable.get("multi") else [picked.get(name, there[0])] if there else []
            if not wanted or not {*wanted} <= {*there}:
                raise LookupError(f"{name}: expected one of {there}, got {wanted}: {variable['query']}")
            values[name] = "|".join(wanted)
    return values


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$(\w+)", lambda match: values[match[1]], text)
