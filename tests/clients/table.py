"""The table in docs/clients.md of what works with which client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.clients.environments import REPOSITORY
from tests.clients.registry import Client

PAGE: Final = REPOSITORY / "docs" / "clients.md"
BEGIN: Final = "<!-- Written by `make test-clients`. -->\n"
END: Final = "<!-- End. -->\n"


class Row(NamedTuple):
    """One call of a client, and how it ended."""

    client: str
    version: str
    call: str
    result: str


def rows(client: Client, results: Iterable[str]) -> list[Row]:
    """Returns the rows of a client."""
    pairs = zip(client.calls, results, strict=True)
    return [
        Row(client.name, client.version, call, " ".join(result.replace("|", "/").split())) for call, result in pairs
    ]


def read(page: Path = PAGE) -> list[Row]:
    """Returns the rows that stand in the page."""
    table = page.read_text().partition(BEGIN)[2].partition(END)[0]
    return [Row(*(cell.strip() for cell in line.strip("|").split(" | "))) for line in table.splitlines()[3:] if line]


def write(found: Mapping[str, Sequence[Row]], page: Path = PAGE) -> None:
    """Writes the rows of clients by their names; those of other clients stay."""
    before, _, rest = page.read_text().partition(BEGIN)
    kept = [row for row in read(page) if row.client not in found]
    lines = [f"| {' | '.join(row)} |" for row in (*(row for own in found.values() for row in own), *kept)]
    table = "\n".join(["", "| client | version | call | result |", "|---|---|---|---|", *lines, "", ""])
    page.write_text(f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}")
