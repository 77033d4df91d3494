"""HTML elements, whose text is escaped, and the self-contained page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.resources import files
from typing import Any, Final

from markupsafe import Markup

from xlaserve_loadtest.printable import printable
from xlaserve_loadtest.reports.table import Cell, Strong, Table, wide

VOID: Final = frozenset({"br", "hr", "link", "meta"})
_LONG: Final = 36
"""Characters of a cell above which it gets more of the width than others."""

POLICY: Final = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""The page's content security policy. It forbids every request, whatever names a run contains."""

Child = str | Iterable["Child"] | None
"""Text, an element, or several of them; None is left out."""


def join(children: Iterable[Child]) -> Markup:
    """Returns the children one after the other, with text escaped."""
    return Markup().join(map(_written, (child for child in children if child is not None)))


def _written(child: str | Iterable[Child]) -> str:
    if isinstance(child, Markup):
        return child
    return printable(child) if isinstance(child, str) else join(child)


def tag(name: str, /, *children: Child, **attributes: str | None) -> Markup:
    """Returns an element; an attribute that is None is left out.

    A trailing underscore of an attribute's name is dropped (`class_`), others become hyphens.
    """
    written = Markup().join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value)
        for key, value in attributes.items()
        if value is not None
    )
    end = "" if name in VOID else Markup("{}</{}>").format(join(children), name)
    return Markup("<{}{}>{}").format(name, written, end)


def table(shown: Table) -> Markup:
    """Returns a table, empty where it has no rows. In a narrow window each row is shown as a list."""
    if not shown.columns:
        return Markup()
    columns = list(zip(shown.columns, shown.numeric(), strict=True))
    head = [tag("th", heading, class_="number" if is_numeric else None) for heading, is_numeric in columns]
    body = [
        tag(
            "tr",
            [
                _cell(cell, heading, is_numeric, is_name=not place or heading == "load")
                for place, (cell, (heading, is_numeric)) in enumerate(zip(row, columns, strict=True))
            ],
        )
        for row in shown.rows()
    ]
    title = tag("p", shown.title, class_="caption") if shown.title else None
    return join([title, tag("table", tag("thead", tag("tr", head)), tag("tbody", body))])


def _cell(content: Cell, heading: str, is_numeric: bool, *, is_name: bool) -> Markup:
    text = wide(content)
    value, bracket, bounds = text.partition(" [")
    shown: Child = text
    if isinstance(content, Strong) or content is False:
        shown = tag("strong", text)
    elif is_numeric and bracket:
        # A figure may be broken into two lines only before its bounds.
        shown = [value, " ", tag("span", f"[{bounds}", class_="bounds")]
    kind = "number" if is_numeric else "long" if len(text) > _LONG else None
    return tag("th" if is_name else "td", shown, class_=kind, data_heading=None if is_name else heading)


def facts(pairs: Iterable[tuple[str, Child]]) -> Markup:
    """Returns a list of names and values; names without a value are left out."""
    return tag("dl", [[tag("dt", name), tag("dd", value)] for name, value in pairs if value])


def data(value: Any) -> Markup:
    """Returns JSON that is safe inside a script element. Raises ValueError for NaN."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def page(title: str, *body: Child) -> str:
    """Returns a whole document that needs no network: it contains styles, plotly and the script that draws charts."""
    content = join(body)
    plotly = (("plotly", "package_data/plotly.min.js"),) if 'class="chart"' in content else ()
    scripts = (*plotly, ("xlaserve_loadtest", "page/page.js"))
    document = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("title", title),
            # Otherwise a browser asks the server for an icon.
            tag("link", rel="icon", href="data:,"),
            tag("style", Markup(_resource("xlaserve_loadtest", "page/page.css"))),
        ),
        tag("body", tag("main", content), [tag("script", Markup(_resource(*script))) for script in scripts]),
        lang="en",
    )
    return f"<!doctype html>\n{document}\n"


def _resource(package: str, path: str) -> str:
    return files(package).joinpath(path).read_text(encoding="utf-8")
