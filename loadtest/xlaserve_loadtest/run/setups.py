"""Gives workers the requests that they send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from xlaserve_loadtest.run.remote import RemoteWorker
from xlaserve_loadtest.run.worker import Setup
from xlaserve_loadtest.run.workers import WorkerProcess
from xlaserve_loadtest.schedule.payload import check_memory

COPIES_ON_THE_WAY: Final = 3
"""Of a setup's requests: the pickled call, the message that holds it, and the call as the worker has read it."""


async def set_up(workers: Sequence[WorkerProcess | RemoteWorker], setup: Setup) -> None:
    """Gives workers `setup`, each from another request on; one after the other, so that few copies are on the way.

    Raises PayloadError where this machine can't hold them.
    """
    requests = {id(request): request for own in setup.requests.values() for request in own}.values()
    here = sum(isinstance(worker, WorkerProcess) for worker in workers)
    check_memory([len(request.data) for request in requests], copies=here + COPIES_ON_THE_WAY)
    for index, worker in enumerate(workers):
        await worker.calls.setup(replace(setup, offset=index))
