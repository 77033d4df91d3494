"""What tests put in the place of Ray: nodes by name, and actors in processes of their own or in threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest


class Affinity(NamedTuple):
    """NodeAffinitySchedulingStrategy."""

    node_id: str
    soft: bool


class TaskError(Exception):
    """What a function on a node raised; its text is a traceback."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"ray::it() (pid=1)\n  in somewhere\n{type(cause).__name__}: {cause}")
        self.cause = cause


class FakeRay(ModuleType):
    """The functions of `ray` that are used here."""

    def __init__(self, *nodes: str, cpus: float = 2.0, has_processes: bool = True) -> None:
        super().__init__("ray")
        self.address: str | None = None
        self.failure: Exception | None = None
        """What `init` raises."""
        self.alive = dict.fromkeys(nodes, True)
        self.resources = {"CPU": cpus} if cpus else {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        """The node and the options of each call."""
        self._has_processes = has_processes
        """Whether actors are in processes of their own."""
        self._running: dict[Future[Any], str] = {}
        self._actors: list[ProcessPoolExecutor] = []

    def init(self, address: str, **options: object) -> None:
        if self.failure is not None:
            raise self.failure
        assert self.address is None
        self.address = address

    def shutdown(self) -> None:
        assert self.address is not None
        self.address = None
        for actor in self._actors:
            for process in actor._processes.values():
                process.kill()
            actor.shutdown()
        self._actors.clear()

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": node, "NodeManagerAddress": "127.0.0.1", "Alive": is_alive, "Resources": self.resources}
            for node, is_alive in self.alive.items()
        ]

    def remote(self, what: Any) -> _Remote:
        return _Remote(self, what)

    def get(self, reference: Future[Any]) -> Any:
        return reference.result(60)

    def wait(
        self, references: Sequence[Future[Any]], num_returns: int, timeout: float
    ) -> tuple[list[Future[Any]], list[Future[Any]]]:
        assert num_returns == len(references)
        done, others = wait(references, timeout)
        return list(done), list(others)

    def kill_node(self, node: str) -> None:
        """The node goes, with what runs there."""
        self.alive[node] = False
        self.crash(node)

    def crash(self, node: str) -> None:
        """The processes of a node die."""
        for reference, own in list(self._running.items()):
            if own == node:
                _end(reference, RuntimeError(f"the worker of {node} died\nand more"))

    def start(self, what: Callable[..., Any], node: str, arguments: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        if not self.alive[node]:
            _end(future, RuntimeError(f"node {node} is not alive"))
            return future
        self._running[future] = node

        def run() -> None:
            try:
                _end(future, what(*arguments))
            except BaseException as error:
                _end(future, TaskError(error))

        threading.Thread(target=run, daemon=True).start()
        return future

    def start_actor(self, kind: type, node: str, arguments: tuple[Any, ...]) -> Any:
        if not self._has_processes:
            return _LocalActor(self, node, kind(*arguments))
        pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=_make, initargs=(kind, arguments))
        self._actors.append(pool)
        return _Actor(pool)


class _Remote:
    def __init__(self, ray: FakeRay, what: Any, **options: Any) -> None:
        self._ray = ray
        self._what = what
        self._options = options

    def options(self, **options: Any) -> _Remote:
        return _Remote(self._ray, self._what, **options)

    def remote(self, *arguments: Any) -> Any:
        node = self._options["scheduling_strategy"].node_id
        self._ray.calls.append((node, self._options))
        return self._ray.start_actor(self._what, node, arguments)


class _Actor:
    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> _Method:
        return _Method(self._pool, name)


class _LocalActor:
    def __init__(self, ray: FakeRay, node: str, made: Any) -> None:
        self._ray = ray
        self._node = node
        self._made = made

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._made, name)
        return SimpleNamespace(remote=lambda *arguments: self._ray.start(method, self._node, arguments))


class _Method(NamedTuple):
    pool: ProcessPoolExecutor
    name: str

    def remote(self, *arguments: Any) -> Future[Any]:
        return self.pool.submit(_call, self.name, arguments)


_made: list[Any] = []


def _make(kind: type, arguments: tuple[Any, ...]) -> None:
    _made.append(kind(*arguments))


def _call(name: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(_made[0], name)(*arguments)


def _end(future: Future[Any], value: object) -> None:
    if future.done():
        return
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)


def install(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Has `import ray` find it."""
    strategies = ModuleType("ray.util.scheduling_strategies")
    strategies.NodeAffinitySchedulingStrategy = Affinity  # type: ignore[attr-defined]
    modules = {"ray": ray, "ray.util": ModuleType("ray.util"), "ray.util.scheduling_strategies": strategies}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return ray
