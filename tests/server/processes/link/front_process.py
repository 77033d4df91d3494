"""A front that floods a model until it is killed, started with `python -m` and SOCKET MODEL."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from pathlib import Path

from tests.server.processes.link.models import pictures

from xlaserve.config import Mode
from xlaserve.engine.request import EngineRequest, Result
from xlaserve.processes.link.front_end.engine_link import EngineLink, connect
from xlaserve.processes.link.front_end.remote_model import RemoteModel


def model_of(link: EngineLink, name: str) -> RemoteModel:
    return next(model for model in link.models.values() if model.snapshot.title == name)


async def ask(link: EngineLink, name: str, number: int, images: int = 1) -> Result:
    pixels = pictures(*[number] * images)
    with model_of(link, name).admit(images, pixels.nbytes) as admitted:
        return await admitted.run(EngineRequest((pixels,), Mode.XLA, math.inf))


def flood(link: EngineLink, name: str, count: int) -> list[asyncio.Task[Result]]:
    return [asyncio.create_task(ask(link, name, number, 1 + number % 8)) for number in range(count)]


def start_front(path: Path, model: str) -> subprocess.Popen[bytes]:
    """Starts a process that floods a model."""
    arguments = [sys.executable, "-m", "tests.server.processes.link.front_process", str(path), model]
    front = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    assert front.stdout is not None
    with front.stdout:
        assert front.stdout.readline() == b"connected\n"
    return front


async def main(path: Path, model: str) -> None:
    link = await connect(path)
    print("connected", flush=True)
    while not link.is_lost:
        await asyncio.wait(flood(link, model, 200))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
