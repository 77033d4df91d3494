"""HTML that is escaped unless it was built here, and the self-contained page that holds it."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any, Final

VOID: Final = frozenset({"br", "hr", "link", "meta"})
_LONG: Final = 36
"""Length from which a cell is broken into lines."""

POLICY: Final = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""The page's content security policy. It forbids every request, for any name in a run."""


class Markup(str):
    """Text that is HTML already. Any other text is escaped when it becomes part of an element."""

    __slots__ = ()


Child = str | Iterable["Child"] | None
"""Text, elements, or several of them; None is left out."""


def join(children: Iterable[Child]) -> Markup:
    """Returns the children one after the other, text among them escaped."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, str):
            parts.append(html.escape(child))
        elif child is not None:
            parts.append(join(child))
    return Markup("".join(parts))


def tag(name: str, /, *children: Child, **attributes: str) -> Markup:
    """Returns an element. A trailing underscore of an attribute's name is dropped (`class_`), others become hyphens."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for key, value in attributes.items()
    )
    end = "" if name in VOID else f"{join(children)}</{name}>"
    return Markup(f"<{name}{written}>{end}")


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Child]], *, numbers: Iterable[int] = (), caption: str | None = None
) -> Markup:
    """Returns a table that scrolls by itself where it is too wide, nothing where it has no rows.

    `numbers` are the columns aligned to the right.
    """
    right = set(numbers)

    def cell(kind: str, index: int, child: Child) -> Markup:
        kinds = ["number"] if index in right else []
        if isinstance(child, str) and len(child) > _LONG:
            kinds.append("long")
        return tag(kind, child, **({"class_": " ".join(kinds)} if kinds else {}))

    head = tag("tr", [cell("th", index, name) for index, name in enumerate(columns)])
    body = [tag("tr", [cell("td" if index else "th", index, child) for index, child in enumerate(row)]) for row in rows]
    if not body:
        return Markup()
    title = tag("p", caption, class_="caption") if caption else None
    return join([title, tag("div", tag("table", tag("thead", head), tag("tbody", body)), class_="scroll")])


def facts(pairs: Iterable[tuple[str, Child]]) -> Markup:
    """Returns a list of names and values; those without a value are left out."""
    return tag("dl", [[tag("dt", name), tag("dd", value)] for name, value in pairs if value])


def data(value: Any) -> Markup:
    """Returns JSON that is safe inside a script element with any strings. NaN is refused."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def page(title: str, *body: Child) -> str:
    """Returns a whole document that needs no network: styles, plotly and what draws its charts are inside."""
    content = join(body)
    has_charts = 'class="chart"' in content
    scripts = [_plotly(), _resource("page.js")] if has_charts else []
    document = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("title", title),
            # Else a browser asks the server for an icon.
            tag("link", rel="icon", href="data:,"),
            tag("style", Markup(_resource("page.css"))),
        ),
        tag("body", tag("main", content), [tag("script", Markup(script)) for script in scripts]),
        lang="en",
    )
    return f"<!doctype html>\n{document}\n"


def _resource(name: str) -> str:
    return (files("xlaserve_loadtest") / "page" / name).read_text(encoding="utf-8")


def _plotly() -> str:
    return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
