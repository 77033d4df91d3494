from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console
from tests.loadtest.reports.pages import samples

from xlaserve_loadtest.analysis.conditions import judge
from xlaserve_loadtest.printable import one_line
from xlaserve_loadtest.reports import cli, csv_rows, html, junit, markdown
from xlaserve_loadtest.reports.chart import short_names
from xlaserve_loadtest.reports.terminal import show
from xlaserve_loadtest.schedule.conditions import parse

CONDITIONS = [parse("p50>1ms"), parse(f"{samples.HOSTILE[-1]}:p50>1ms"), parse("errors>0")]
SUMMARY = samples.summary("hostile")
JUDGED = [judge(SUMMARY.points, SUMMARY.comparisons, CONDITIONS)]
SHOWN = [one_line(name) for name in samples.HOSTILE]


class Page(HTMLParser):
    """The elements of a page and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_data(self, data: str) -> None:
        self.text.append(" ".join(data.split()))


def test_a_page_shows_any_name_as_text() -> None:
    hostile, plain = Page(html.render([SUMMARY])), Page(html.render([samples.summary("crowded")]))
    assert hostile.elements <= plain.elements | {"strong"}
    assert hostile.attributes <= plain.attributes
    assert set(SHOWN) <= set(hostile.text)
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in "".join(hostile.text)


def test_markdown_shows_any_name_as_text_and_keeps_its_tables() -> None:
    text = markdown.render(SUMMARY, JUDGED[0])
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    written = [token.content.strip() for token in tokens if token.type == "html_block"]
    assert written == ["<details><summary>More figures</summary>", "</details>"]
    inline = [child for token in tokens for child in token.children or ()]
    # What the report itself marks: its verdict, and conditions that are met.
    assert {child.type for child in inline} <= {"text", "text_special", "softbreak", "strong_open", "strong_close"}
    assert not {"heading_open", "fence", "code_block", "hr"} & {token.type for token in tokens}
    assert sum(token.type == "table_open" for token in tokens) > 5
    cells = {
        "".join(child.content for child in token.children or ())
        for before, token in pairwise(tokens)
        if before.type == "td_open"
    }
    assert {name.replace(" @", " @\N{ZERO WIDTH SPACE}") for name in SHOWN} <= cells


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_a_terminal_shows_any_name_in_its_place(width: int) -> None:
    file = io.StringIO()
    show(SUMMARY, Console(file=file, width=width, force_terminal=True, color_system=None))
    text = file.getvalue()
    assert not re.findall("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028]", text)
    assert max(map(cell_len, text.splitlines())) <= width
    assert not [line for line in text.splitlines() if line.startswith(("| y", "# xla"))]
    assert "[bold]z[/]" in text
    for name in SHOWN[4:6]:
        assert name[:40] in text


def test_junit_csv_and_json_give_any_name_back() -> None:
    root = ElementTree.fromstring(junit.render(map(junit.suite, [SUMMARY], JUDGED)))
    assert [case.attrib["name"] for case in root.iter("testcase")] == [
        *(each.text for each in CONDITIONS),
        junit.COMPLETE,
    ]
    rows = list(csv.DictReader(io.StringIO(csv_rows.render([SUMMARY]))))
    assert {row["arm"].removeprefix("'") for row in rows} == set(SHOWN)
    assert not [cell for row in rows for cell in row.values() if cell.startswith(("=", "+", "@"))]
    document = json.loads(json.dumps(cli.to_json([SUMMARY], JUDGED)))
    assert [arm["name"] for arm in document["runs"][0]["header"]["arms"]] == list(samples.HOSTILE)


def test_names_that_are_cut_for_an_axis_stay_different() -> None:
    names = ["a" * 200, "a" * 100 + "b" + "a" * 100, "a" * 90 + "c" + "a" * 90, "short"]
    short = short_names([*names, *names])
    assert len(set(short.values())) == len(names)
    assert short["short"] == "short"
    assert max(map(len, short.values())) < 36
