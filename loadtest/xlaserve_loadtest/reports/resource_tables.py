"""The tables of what a run took: time to compile, stages, padding, server and load generator."""

from __future__ import annotations

from xlaserve_loadtest.analysis.summary import Summary
from xlaserve_loadtest.reports.table import Number, Rows, Strong, mebibytes, place, share, titled


@titled("Price of compiling")
def prices(summary: Summary) -> Rows:
    """Returns the seconds of tracing and compiling, and the break-even, by arm."""
    for price in summary.prices:
        yield {
            "arm": price.arm,
            "break-even": price.text,
            "programs": len(price.programs),
            "trace s": price.trace_s,
            "compile s": price.compile_s,
        }


@titled("")
def programs(summary: Summary) -> Rows:
    """Returns the seconds of tracing, compiling and running of each program."""
    for price in summary.prices:
        for program in price.programs:
            yield {
                "arm": price.arm,
                "bucket": "x".join(map(str, program.bucket)),
                "trace, s": Number(f"{program.trace_s:.2f}"),
                "compile, s": Number(f"{program.compile_s:.2f}"),
                "run alone, ms": Number(f"{program.run_s * 1000:.2f}"),
                "run with all lanes busy, ms": None
                if program.run_loaded_s is None
                else Number(f"{program.run_loaded_s * 1000:.2f}"),
            }


@titled("Where the mean latency went")
def stages(summary: Summary) -> Rows:
    """Returns each stage's share of the mean latency."""
    for point in summary.shown_points:
        if point.stages:
            yield {**place(point), **{stage.name: share(stage.share) for stage in point.stages}}


@titled("What it took: padding, server and generator")
def use(summary: Summary) -> Rows:
    """Returns the resources that server and generator used, by arm and load."""
    for point in summary.shown_points:
        yield {
            **place(point),
            "padding": share(point.padding.waste if point.padding else None),
            "CPU ms/image": point.server.cpu_ms_per_image,
            "peak MiB": mebibytes(point.server.peak_rss_bytes),
            "GPU": share(point.server.gpu_utilisation),
            "GPU MiB": mebibytes(point.server.gpu_memory_bytes),
            "J/image": point.server.energy_j_per_image,
            "generator busy": share(point.generator.busy),
            "others": share(point.generator.others),
            "late": Number(f"{point.generator.late_share:.2%}"),
        }


@titled("Images and padding")
def padding(summary: Summary) -> Rows:
    """Returns images and rows of padding, by arm and load."""
    for point in summary.shown_points:
        if point.padding:
            yield {
                **place(point),
                "images": point.padding.images,
                "rows of padding": point.padding.padded_rows,
                "share of all rows": share(point.padding.waste),
            }


@titled("Whether the load tester itself was the limit")
def generator(summary: Summary) -> Rows:
    """Returns figures of the load generator, and whether it kept up, by arm and load."""
    for point in summary.shown_points:
        yield {
            **place(point),
            "workers": point.generator.workers,
            "CPU ms a request": point.generator.cpu_ms_per_request,
            "share of its ceiling": share(point.generator.busy),
            "processors used by others": share(point.generator.others),
            "late sends": Number(f"{point.generator.late_sends:,} ({point.generator.late_share:.2%})"),
            "load generator": Strong("generator-limited") if point.generator.is_limited else "kept up",
            "steady": point.steady,
            "compiled while requests waited": point.server.serving_compilations,
            "compiled beside traffic": point.server.compilations,
        }
