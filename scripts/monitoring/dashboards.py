"""Grafana's dashboards, made of the questions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from string import ascii_uppercase
from typing import Final

from grafana_foundation_sdk.builders import common as build_common
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from scripts.monitoring.questions import QUESTIONS, STAGES, Unit
from scripts.monitoring.rules import FAST, OBJECTIVES, SLOW, recorded

TAG: Final = "xlaserve"
DATASOURCE: Final = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH: Final = 24
"""Columns of a dashboard."""
UNITS: Final[Mapping[Unit, str]] = {
    Unit.REQUESTS_PER_S: "reqps",
    Unit.IMAGES_PER_S: "suffix:images/s",
    Unit.BATCHES_PER_S: "suffix:batches/s",
    Unit.SHARE: "percentunit",
    Unit.SECONDS: "s",
    Unit.LANES: "suffix:lanes",
    Unit.CORES: "suffix:cores",
    Unit.BYTES: "bytes",
    Unit.WATTS: "watt",
    Unit.JOULES: "joule",
    Unit.COUNT: "short",
}
"""What Grafana calls them."""


@dataclass(frozen=True)
class Ask:
    """One query of a panel: a question, asked for each of some labels."""

    question: str
    by: tuple[str, ...] | None = None
    called: str = ""
    """What its series are called in the legend, before their labels."""

    @property
    def legend(self) -> str:
        """Grafana's template of a series' name."""
        by = QUESTIONS[self.question].by if self.by is None else self.by
        labels = (f"version {{{{{label}}}}}" if label == "version" else f"{{{{{label}}}}}" for label in by)
        return " ".join(filter(None, (self.called, *labels))) or self.question

    def promql(self, where: Mapping[str, str]) -> str:
        """Returns the query; Grafana chooses the range."""
        return QUESTIONS[self.question].promql(where=where, by=self.by, window="$__rate_interval")


@dataclass(frozen=True)
class Graph:
    """A panel of lines over time."""

    title: str
    asks: tuple[Ask, ...]
    columns: int = 8
    is_stacked: bool = False


@dataclass(frozen=True)
class Number:
    """A panel of one number, the present one."""

    title: str
    ask: Ask
    columns: int = 4


@dataclass(frozen=True)
class Table:
    """A panel with a row for each series as it is now."""

    title: str
    ask: Ask
    columns: int = 12


@dataclass(frozen=True)
class Budget:
    """A panel of how many times faster than allowed an objective's budget is used, in the alerts' ranges."""

    title: str
    question: str
    columns: int = 8


Panel = Graph | Number | Table | Budget


@dataclass(frozen=True)
class Board:
    """One dashboard. Its `variables` are labels, of which its reader chooses values."""

    name: str
    title: str
    description: str
    variables: tuple[str, ...]
    rows: Mapping[str, Sequence[Panel]]
    single: frozenset[str] = field(default_factory=frozenset)
    """Variables of which one value is shown at a time."""


SOURCES: Final = {
    "job": "xlaserve_build_info",
    "instance": 'xlaserve_build_info{job=~"$job"}',
    "model": 'xlaserve_model_state{job=~"$job", instance=~"$instance"}',
}
"""By variable: the series that have its values."""


def _graph(title: str, question: str, *by: str, columns: int = 8, is_stacked: bool = False) -> Graph:
    return Graph(title, (Ask(question, by or None),), columns, is_stacked)


def _by_process(title: str, question: str, columns: int = 8) -> Graph:
    """Returns a panel with a line for each process of a server: one, or those of its roles."""
    return Graph(title, (Ask(question, ("role",), "process"),), columns)


def _latency(*by: str, columns: int = 8) -> Graph:
    asks = (Ask("latency_p50", by, "p50"), Ask("latency_p99", by, "p99"))
    return Graph("Latency of answered requests", asks, columns)


def _stages(percent: int, columns: int = 8) -> Graph:
    return Graph(f"p{percent} by stage", tuple(Ask(f"{stage}_p{percent}", (), stage) for stage in STAGES), columns)


_FLEET: Final = Board(
    "fleet",
    "xlaserve / Fleet",
    "All servers: is all well, and where not?",
    ("job", "instance"),
    {
        "Now": (
            Number("Servers ready", Ask("ready", ("job",))),
            Number("Images", Ask("images", ())),
            Number("Failed", Ask("failed", ())),
            Number("p99", Ask("latency_p99", ())),
            Number("Lanes busy", Ask("lane_use", ())),
            Number("Headroom", Ask("headroom", ())),
        ),
        "Traffic": (
            _graph("Requests by status", "requests", "status", is_stacked=True),
            _graph("Images by server", "images", "instance", is_stacked=True),
            _graph("Images by model", "images", "model", is_stacked=True),
        ),
        "Errors and latency": (
            Graph("Failed and wrong requests", (Ask("failed", ("instance",)), Ask("wrong", ("instance",), "wrong:"))),
            _graph("Refusals for overload", "refusals", "instance", "reason"),
            _latency("instance"),
            Budget("Use of the budget of errors", "failed", 12),
            Budget("Use of the budget of latency", "slow", 12),
        ),
        "Saturation": (
            _graph("Lanes busy", "lane_use"),
            _graph("Seconds of queued work", "queued_work"),
            _graph("Fullness of queues", "queue_use", "instance", "model"),
            _graph("Headroom", "headroom"),
            _graph("Rows that are images", "batch_fill", "instance"),
            _graph("Compiled in traffic", "serving_compilations"),
        ),
        "What serves": (
            Table("Builds", Ask("builds")),
            Table("Models", Ask("model_states")),
            Graph("Restarts in an hour", (Ask("restarts"), Ask("process_restarts", None, "processes:"))),
            _graph("Memory", "memory"),
            _graph("Certificate ends in", "certificate"),
        ),
    },
)

_SERVER: Final = Board(
    "server",
    "xlaserve / One server",
    "One server: what it does, and what limits it.",
    ("job", "instance"),
    {
        "Traffic": (
            _graph("Requests by status", "requests", "status", is_stacked=True),
            _graph("Images by model", "images", "model", is_stacked=True),
            _latency("model"),
            _stages(50),
            _stages(99),
            Graph("Failed and wrong requests", (Ask("failed", None, "failed:"), Ask("wrong", (), "wrong, all"))),
        ),
        "Saturation": (
            _graph("Lanes busy", "lane_use"),
            _graph("Seconds of queued work", "queued_work"),
            _graph("Requests in flight", "in_flight"),
            Graph("Fullness", (Ask("queue_use", None, "queue of"), Ask("message_use", (), "messages"))),
            _graph("Refusals for overload", "refusals"),
            _graph("Refused by callers' limits", "limited"),
        ),
        "Models": (
            Table("States", Ask("model_states")),
            Table("Serving", Ask("models")),
            _graph("Warnings", "warnings"),
            _graph("Programs compiled", "compilations"),
            Graph(
                "Compiled in traffic, share from the cache",
                (Ask("serving_compilations", (), "in traffic"), Ask("cache_hits", None, "cached:")),
            ),
        ),
        "Processes": (
            _by_process("Cores", "cores", 6),
            _by_process("Memory", "memory", 6),
            _by_process("Open file descriptors", "file_use", 6),
            _graph("Processes that ended, in an hour", "process_restarts", "role", columns=6),
        ),
    },
    single=frozenset({"instance"}),
)

_MODEL: Final = Board(
    "model",
    "xlaserve / One model",
    "One model, in all servers: its modes and versions, latency by stage, batches and cost.",
    ("job", "instance", "model"),
    {
        "Traffic": (
            _graph("Images", "images", "version", "mode", is_stacked=True),
            _graph("Requests", "requests", "method", "status", is_stacked=True),
            Graph("Failed and wrong requests", (Ask("failed", (), "failed"), Ask("wrong", (), "wrong"))),
        ),
        "Latency": (
            _latency("version"),
            _stages(50),
            _stages(99),
            _graph("Over the objective", "slow", "version"),
            _graph("Refusals for overload", "refusals"),
            _graph("Batches that raised", "failed_batches", "version"),
        ),
        "Batches": (
            _graph("Images in a batch", "batch_size", "mode"),
            _graph("Rows that are images", "batch_fill", "mode"),
            _graph("Lanes busy with padding", "padding_waste", "mode"),
            _graph("Buckets", "buckets", "bucket", "mode", is_stacked=True),
            _graph("Lane time of an image", "image_cost", "mode"),
            _graph("Fullness of the queue", "queue_use", "instance"),
        ),
        "Versions and programs": (
            Table("Serving", Ask("models")),
            Table("States", Ask("model_states")),
            _graph("Time to compile a program", "compile_seconds", "version", "mode"),
            _graph("Share from the compile cache", "cache_hits", "version"),
            _graph("Agreement with the shadow", "shadow_agreement"),
        ),
    },
    single=frozenset({"model"}),
)

_DEVICE: Final = Board(
    "device",
    "xlaserve / One device",
    "The device of a server: its lanes, what an image costs there, and the GPUs, if it has any.",
    ("job", "instance"),
    {
        "Lanes": (
            _graph("Lanes busy", "lane_use"),
            _graph("Seconds of queued work", "queued_work"),
            _graph("Headroom", "headroom"),
            Graph("Running a batch", (Ask("execute_p50", ("model",), "p50"), Ask("execute_p99", ("model",), "p99"))),
            _graph("Lane time of an image", "image_cost", "model", "mode"),
            _graph("Lanes busy with padding", "padding_waste"),
        ),
        "Processor": (
            Table("Device", Ask("builds", ("instance", "device_name", "version", "tensorflow"))),
            _by_process("Cores", "cores", 6),
            _by_process("Memory", "memory", 6),
        ),
        "GPUs": (
            _graph("GPU busy", "gpu_use", columns=6),
            _graph("GPU memory", "gpu_memory_use", columns=6),
            _graph("Power", "gpu_power", columns=6),
            _graph("Energy of an image", "image_energy", columns=6),
        ),
    },
    single=frozenset({"instance"}),
)

_LOADTEST: Final = Board(
    "loadtest",
    "xlaserve / Load test",
    "A load test that runs with --live-port, beside what the servers see of it.",
    ("job", "instance"),
    {
        "Both": (
            Graph("Images", (Ask("loadtest_images"), Ask("images", (), "server")), 12),
            Graph(
                "Latency, from when it was due; server: from arrival",
                (
                    Ask("loadtest_latency_p50", ("arm", "load"), "p50"),
                    Ask("loadtest_latency_p99", ("arm", "load"), "p99"),
                    Ask("latency_p50", (), "server p50"),
                    Ask("latency_p99", (), "server p99"),
                ),
                12,
            ),
            Graph("Failed", (Ask("loadtest_failed"), Ask("failed", (), "server"))),
            Graph("Requests", (Ask("loadtest_requests"), Ask("requests", ("mode",), "server"))),
            _graph("Measured now", "loadtest_active"),
        ),
        "The servers": (
            _stages(99),
            _graph("Lanes busy", "lane_use"),
            _graph("Seconds of queued work", "queued_work"),
            _graph("Images in a batch", "batch_size", "model", "mode"),
            _graph("Rows that are images", "batch_fill", "model", "mode"),
            _graph("Lane time of an image", "image_cost", "model", "mode"),
        ),
    },
)

BOARDS: Final = (_FLEET, _SERVER, _MODEL, _DEVICE, _LOADTEST)


def _built(panel: Panel, where: Mapping[str, str]) -> Builder[dashboard.Panel]:
    match panel:
        case Graph():
            return _lines(panel.title, [_query(ask, where) for ask in panel.asks], _unit(panel.asks[0]), panel)
        case Budget(question=question):
            asked = [
                prometheus.Dataquery()
                .expr(f'{recorded(question, window)}{{job=~"$job"}} / {OBJECTIVES[question]}')
                .legend_format(f"{window} {{{{job}}}}")
                for window in (*FAST[:2], *SLOW[:2])
            ]
            return _lines(panel.title, asked, "none", panel)
        case Number(ask=ask):
            asked_once = _query(ask, where).instant().ref_id("A")
            shown = stat.Panel().with_target(asked_once).unit(_unit(ask)).height(4)
            return shown.title(panel.title).description(_described([ask])).datasource(DATASOURCE).span(panel.columns)
        case Table(ask=ask):
            rows = _query(ask, where).instant().format(PromQueryFormat.TABLE).ref_id("A")
            hidden = dashboard.DataTransformerConfig(id_val="organize", options={"excludeByName": {"Time": True}})
            filled = table.Panel().with_target(rows).with_transformation(hidden).height(8)
            return filled.title(panel.title).description(_described([ask])).datasource(DATASOURCE).span(panel.columns)


def _lines(
    title: str, asked: Sequence[prometheus.Dataquery], unit: str, panel: Graph | Budget
) -> Builder[dashboard.Panel]:
    lines = timeseries.Panel().title(title).datasource(DATASOURCE).span(panel.columns).height(8).unit(unit).min(0)
    lines = lines.line_width(1).show_points(common.VisibilityMode.NEVER)
    lines = lines.tooltip(build_common.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    if isinstance(panel, Graph):
        lines = lines.description(_described(panel.asks)).fill_opacity(30 if panel.is_stacked else 5)
        if panel.is_stacked:
            lines = lines.stacking(build_common.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    else:
        lines = lines.description("1 uses up the budget in exactly 30 days; the alerts say which speed is too fast.")
    legend = build_common.VizLegendOptions().show_legend(True).display_mode(common.LegendDisplayMode.LIST)
    lines = lines.legend(legend.placement(common.LegendPlacement.BOTTOM))
    for letter, query in zip(ascii_uppercase, asked, strict=False):
        lines = lines.with_target(query.ref_id(letter))
    return lines


def _query(ask: Ask, where: Mapping[str, str]) -> prometheus.Dataquery:
    query = prometheus.Dataquery().expr(ask.promql(where)).legend_format(ask.legend)
    return query.exemplar(True) if ask.question == "latency_p99" else query


def _unit(ask: Ask) -> str:
    return UNITS[QUESTIONS[ask.question].unit]


def _described(asks: Sequence[Ask]) -> str:
    return " ".join(dict.fromkeys(QUESTIONS[ask.question].text for ask in asks))


def _variable(name: str, board: Board) -> build.QueryVariable:
    query = f"label_values({SOURCES[name]}, {name})"
    variable = build.QueryVariable(name).label(name).datasource(DATASOURCE).query(query)
    variable = variable.refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
    variable = variable.sort(dashboard.VariableSort.ALPHABETICAL_ASC)
    if name in board.single:
        return variable
    everything = dashboard.VariableOption(text="All", value="$__all")
    return variable.multi(True).include_all(True).current(everything)


def _dashboard(board: Board) -> dashboard.Dashboard:
    where = {name: f'=~"${name}"' for name in board.variables}
    built = build.Dashboard(board.title).uid(f"xlaserve-{board.name}").description(board.description).tags([TAG])
    built = built.refresh("10s").time("now-30m", "now").tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
    others = build.DashboardLink("xlaserve").type(dashboard.DashboardLinkType.DASHBOARDS).tags([TAG])
    built = built.link(others.as_dropdown(True).include_vars(True).keep_time(True))
    built = built.with_variable(build.DatasourceVariable("datasource").type("prometheus").label("datasource"))
    for name in board.variables:
        built = built.with_variable(_variable(name, board))
    for title, panels in board.rows.items():
        built = built.with_row(build.Row(title))
        for panel in panels:
            built = built.with_panel(_built(panel, where))
    return built.build()


def files() -> Iterator[tuple[str, str]]:
    """Yields the names and the contents of the files."""
    for board in BOARDS:
        made = _dashboard(board)
        for number, panel in zip(count(1), made.panels or []):
            panel.id_val = number
        yield f"{board.name}.json", json.dumps(made, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
