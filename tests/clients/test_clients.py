from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.clients import table
from tests.clients.registry import CLIENTS, WORKS, Client, Target
from tests.clients.server import running

QUICK = [client for client in CLIENTS if client.is_quick]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with running(tmp_path_factory.mktemp("server")) as target:
        yield target


@pytest.mark.parametrize("client", QUICK, ids=[client.name for client in QUICK])
def test_everything_that_users_of_a_client_call_works(client: Client, target: Target, tmp_path: Path) -> None:
    results = dict(zip(client.calls, client.results(target, tmp_path), strict=True))
    assert results == dict.fromkeys(client.calls, WORKS)


def test_the_page_has_a_row_for_each_call_of_each_pinned_client() -> None:
    expected = [(client.name, client.version, call) for client in CLIENTS for call in client.calls]
    rows = table.read()
    assert [row[:3] for row in rows] == expected
    assert {row.result for row in rows} == {WORKS}


def test_rows_are_read_as_written_and_those_of_other_clients_stay(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}{table.END}after\n")
    one = [table.Row("one", "1.0", "`-a`", WORKS), table.Row("one", "1.0", "`-b`", "Error: no")]
    other = [table.Row("other", "2", "`infer`", WORKS)]
    table.write({"one": one}, page)
    table.write({"other": other}, page)
    assert table.read(page) == [*other, *one]
    table.write({"one": one, "other": other}, page)
    assert table.read(page) == [*one, *other]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
