"""An engine in a process of its own, started with `python -m` and SOCKET GATE_OPENED GATE_REACHED.

Reads commands from stdin, a line of JSON each, and answers each with one; ends with stdin.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvloop
from tests.server.processes.link.models import Models

from xlaserve.processes.link.engine_end.host import Host, bound
from xlaserve.processes.link.engine_end.hosted_models import Hosted


def publish(host: Host, models: Models, closing: str = "") -> None:
    host.publish(Hosted(models.snapshot(name, is_open=name != closing), models.batchers[name]) for name in models.ids)


async def answer(command: list[Any], host: Host, models: Models) -> Any:
    match command:
        case ["held"]:
            return models.held()
        case ["fronts"]:
            return host.fronts
        case ["compile"]:
            models.compile()
            return None
        case ["renew", name, timeout_s]:
            publish(host, models, closing=name)
            await models.renew(name, timeout_s)
            publish(host, models)
            return None
        case _:
            raise ValueError(command)


async def serve(path: Path, gate_files: tuple[int, int]) -> None:
    async def answer_question(question: str, arguments: Mapping[str, Any]) -> None:
        assert question == "open"
        await host.open(**arguments)

    host = Host(answer_question)
    models = Models(gate_files, lambda: publish(host, models))
    publish(host, models)
    host.listen(bound(path))
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print("ready", flush=True)
    while line := await lines.readline():
        print(json.dumps(await answer(json.loads(line), host, models)), flush=True)
    await host.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    uvloop.run(serve(Path(sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3]))))
