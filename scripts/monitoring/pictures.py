"""Draws the dashboards into docs/, from the queries of their panels: a server and a load test run for it meanwhile.

Grafana itself draws them otherwise; what is shown, and where, is the same.
"""

from __future__ import annotations

import argparse
import html
import math
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import plotly.graph_objects as go  # type: ignore[import-untyped]
import plotly.io  # type: ignore[import-untyped]
import plotly.offline  # type: ignore[import-untyped]
from scripts.monitoring import grafana
from scripts.monitoring.dashboards import BOARDS
from scripts.monitoring.live import SEVERAL, Prometheus, live

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
RATE_INTERVAL: Final = "15s"
STEP_S: Final = 2.0
CELL_PX: Final = 30
"""Height of one line of a dashboard's grid."""
CHROMIUM: Final = shlex.split(
    "chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --disable-dev-shm-usage --no-first-run"
    " --disable-background-networking --virtual-time-budget=10000 --force-device-scale-factor=1"
)
STYLE: Final = """
body { margin: 0; padding: 8px; font: 13px system-ui, sans-serif; background: #f4f5f5; color: #1f2328; }
h1 { font-size: 17px; margin: 2px 4px 8px; }
main { display: grid; grid-template-columns: repeat(24, minmax(0, 1fr)); grid-auto-rows: %dpx; gap: 0; }
section { background: #fff; border: 1px solid #dcdee0; border-radius: 3px; margin: 3px; padding: 4px 8px; }
section { overflow: hidden; }
h2 { font-size: 13px; margin: 4px 6px; align-self: end; }
h3 { font-size: 13px; font-weight: 600; margin: 0; }
.number { font-size: 26px; text-align: center; padding-top: 16px; color: #1a7f37; }
.nothing { text-align: center; padding-top: 60px; color: #6e7781; }
.legend { font-size: 11px; line-height: 17px; }
.legend span { margin-right: 12px; white-space: nowrap; }
.legend i { display: inline-block; width: 12px; height: 3px; margin-right: 4px; vertical-align: middle; }
table { border-collapse: collapse; width: 100%%; margin-top: 6px; }
th, td { text-align: left; padding: 2px 8px 2px 0; border-bottom: 1px solid #eaecef; white-space: nowrap; }
"""
COLOURS: Final = plotly.colors.qualitative.D3
FACTORS: Final = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"))


def shown(value: float, unit: str) -> str:
    """Returns a number as Grafana shows it, with three digits."""
    if not math.isfinite(value):
        return "-"
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit == "s" and value >= 86400:
        return f"{value / 86400:.3g} d"
    factor, prefix = next(((f, p) for f, p in FACTORS if abs(value) >= f), (1.0, ""))
    if factor < 1 and unit != "s":
        factor, prefix = 1.0, ""
    names = {"reqps": "req/s", "bytes": "B", "watt": "W", "joule": "J", "short": "", "none": ""}
    return f"{value / factor:.3g} {prefix}{names.get(unit, unit.removeprefix('suffix:'))}".strip()


class Drawing:
    """Draws the panels of one dashboard."""

    def __init__(self, dashboard: Mapping[str, Any], prometheus: Prometheus, start: float, end: float) -> None:
        self._dashboard = dashboard
        self._prometheus = prometheus
        self._start, self._end = start, end
        self._values = grafana.chosen(dashboard, prometheus, instance=SEVERAL)

    def page(self) -> str:
        """Returns a page of HTML that needs nothing else."""
        body = "\n".join(self._panels())
        script = plotly.offline.get_plotlyjs()
        title = html.escape(self._dashboard["title"])
        head = f"<meta charset=utf-8><style>{STYLE % CELL_PX}</style><script>{script}</script>"
        return f"<!doctype html><html>{head}<body><h1>{title}</h1><main>{body}</main></body></html>"

    @property
    def height_px(self) -> int:
        """What the page takes."""
        lines: int = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in self._dashboard["panels"])
        return CELL_PX * lines + 56

    def _panels(self) -> Iterator[str]:
        for panel in self._dashboard["panels"]:
            place, title = panel["gridPos"], html.escape(panel["title"])
            at = f"grid-column: {place['x'] + 1} / span {place['w']}; grid-row: {place['y'] + 1} / span {place['h']}"
            if panel["type"] == "row":
                yield f'<h2 style="{at}">{title}</h2>'
            else:
                yield f'<section style="{at}"><h3>{title}</h3>{self._drawn(panel)}</section>'

    def _drawn(self, panel: Mapping[str, Any]) -> str:
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short")
        if panel["type"] == "timeseries":
            return self._lines(panel, unit)
        (query,) = grafana.queries_of(panel)
        found = self._prometheus.now(query.filled(self._values, RATE_INTERVAL))
        if panel["type"] == "stat":
            return f'<div class="number">{shown(float(found[0]["value"][1]), unit)}</div>'
        by = re.findall(r"\{\{(\w+)\}\}", query.legend)
        labels = [label for label in by if any(label in series["metric"] for series in found)]
        head = "".join(f"<th>{html.escape(label)}</th>" for label in (*labels, "Value"))
        rows = [
            [*(series["metric"].get(label, "") for label in labels), shown(float(series["value"][1]), unit)]
            for series in found
        ]
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        return f"<table><tr>{head}</tr>{body}</table>"

    def _lines(self, panel: Mapping[str, Any], unit: str) -> str:
        is_stacked = "stacking" in panel["fieldConfig"]["defaults"].get("custom", {})
        figure = go.Figure()
        for query in grafana.queries_of(panel):
            text = query.filled(self._values, RATE_INTERVAL)
            for series in self._prometheus.range(text, self._start, self._end, STEP_S):
                name = _named(query.legend, series["metric"])
                times = [time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) for at, _ in series["values"]]
                numbers = [float(value) if math.isfinite(float(value)) else None for _, value in series["values"]]
                group = "one" if is_stacked else None
                figure.add_scatter(x=times, y=numbers, name=name, mode="lines", line={"width": 1.5}, stackgroup=group)
        if not any(number is not None for trace in figure.data for number in trace.y):
            return '<div class="nothing">No data</div>'
        legend = "".join(
            f'<span><i style="background: {colour}"></i>{html.escape(trace.name)}</span>'
            for trace, colour in zip(figure.data, cycle(COLOURS))
        )
        figure.update_layout(
            height=panel["gridPos"]["h"] * CELL_PX - 44 - 17 * (1 + len(figure.data) // 4),
            margin={"l": 4, "r": 8, "t": 6, "b": 4},
            showlegend=False,
            template="plotly_white",
            font={"size": 11},
            colorway=COLOURS,
        )
        stacked: Counter[str] = Counter()
        for trace in figure.data:
            stacked.update({at: number or 0.0 for at, number in zip(trace.x, trace.y, strict=True)})
        alone = max(number for trace in figure.data for number in trace.y if number is not None)
        ticks = _ticks(max(stacked.values()) if is_stacked else alone)
        figure.update_yaxes(
            range=[0, 1.05 * ticks[-1]], tickvals=ticks, ticktext=[shown(tick, unit) for tick in ticks], automargin=True
        )
        figure.update_xaxes(tickformat="%H:%M:%S", nticks=4, tickangle=0)
        options = {"displayModeBar": False, "responsive": True}
        drawn: str = plotly.io.to_html(figure, config=options, include_plotlyjs=False, full_html=False)
        return f'{drawn}<div class="legend">{legend}</div>'


def _ticks(largest: float) -> list[float]:
    """Returns round numbers from 0 to `largest` or a little more."""
    if largest <= 0:
        return [0.0, 1.0]
    magnitude = 10 ** math.floor(math.log10(largest / 4))
    step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor * 4 >= largest)
    return [step * number for number in range(math.ceil(largest / step) + 1)]


def _named(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], "(none)"), legend)


def take(page: str, picture: Path, *, width_px: int, height_px: int) -> None:
    """Writes what a browser shows of a page."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page)
        subprocess.run(
            [
                *CHROMIUM,
                f"--user-data-dir={folder}/profile",
                f"--window-size={width_px},{height_px}",
                f"--screenshot={picture}",
                file.as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m scripts.monitoring.pictures", description=__doc__)
    parser.add_argument("--seconds", type=float, default=90, help="how long the load test is watched")
    parser.add_argument("--width", type=int, default=1280, help="of the pictures, in pixels")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the pictures")
    options = parser.parse_args()
    if shutil.which("chromium") is None:
        sys.exit("no chromium: scripts/install_chromium.sh installs it")
    with live(block_s=10) as prometheus:
        start = time.time()
        time.sleep(options.seconds)
        for board in BOARDS:
            drawing = Drawing(grafana.load(board.name), prometheus, start, time.time())
            picture = options.out / f"dashboard-{board.name}.png"
            take(drawing.page(), picture, width_px=options.width, height_px=drawing.height_px)
            print(picture)


if __name__ == "__main__":
    main()
