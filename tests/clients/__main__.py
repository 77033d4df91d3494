"""Runs clients of others, each in an environment of its own, against a server, and writes what works.

python -m tests.clients [NAME ...]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.clients import table
from tests.clients.registry import CLIENTS, WORKS
from tests.clients.server import running


def main(names: Sequence[str]) -> int:
    chosen = [client for client in CLIENTS if client.name in names or not names]
    found: dict[str, list[table.Row]] = {}
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as target:
        for client in chosen:
            own = Path(folder) / client.name
            own.mkdir()
            found[client.name] = table.rows(client, client.results(target, own))
            for row in found[client.name]:
                print(*row, sep="  ", flush=True)
    table.write(found)
    return int(any(row.result != WORKS for rows in found.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
