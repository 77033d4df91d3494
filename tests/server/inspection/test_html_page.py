from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

from xlaserve.inspection import html_page
from xlaserve.inspection.explanation import Explanation


class Tags(HTMLParser):
    """Fails where a page loads anything, and notes its text."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.circles = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        assert not {"src", "href"} & {name for name, _ in attributes}
        self.circles += tag == "circle"

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    return tags


def test_the_page_holds_every_instruction_and_loads_nothing(explained: Explanation) -> None:
    tags = read(html_page.render(explained))
    for row in explained.rows:
        assert row.name in tags.text
    assert "stem <1>" in tags.text, "a name is text, not markup"
    assert tags.circles == 3, "one for each that computes and was traced"


def test_a_program_that_was_not_traced_has_a_page_as_well(explained: Explanation) -> None:
    rows = tuple(dataclasses.replace(row, measured_s=None) for row in explained.rows)
    tags = read(html_page.render(dataclasses.replace(explained, rows=rows)))
    assert "No instruction was traced." in tags.text
