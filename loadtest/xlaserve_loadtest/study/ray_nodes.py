"""The cells of a sweep on the nodes of a Ray cluster: on each node one at a time, with all its cores and GPUs."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock
from typing import Any, Final, Self

from xlaserve_loadtest.analysis.changes import apart
from xlaserve_loadtest.record.lines import Environment
from xlaserve_loadtest.run.environment import Machine
from xlaserve_loadtest.run.handshake import own_version
from xlaserve_loadtest.run.ray_cluster import Cluster, Node
from xlaserve_loadtest.study.measure import STOP_TIMEOUT_S, Measurement, measure
from xlaserve_loadtest.study.record import Cell, ModeResult
from xlaserve_loadtest.targets.target import TargetError

MAX_LOSSES: Final = 2
"""A cell whose process or node is lost so often has that as its result: it may be what kills them."""

_GRACE_S: Final = 10.0
_MAX_SHOWN: Final = 3


@dataclass(frozen=True)
class Probe:
    """What a node says of itself."""

    version: str
    machine: Machine


class RayNodes:
    """`with` finds the nodes that can measure one study together. Raises TargetError where there are none."""

    def __init__(self, address: str, tell: Callable[[str], None]) -> None:
        self._cluster = Cluster(address)
        self._tell = tell
        self._measurers: dict[Node, Any] = {}
        """The actors on the nodes that are not lost."""
        self._free: SimpleQueue[Node | None] = SimpleQueue()
        self._is_over = False

    def __enter__(self) -> Self:
        self._cluster.__enter__()
        try:
            nodes = self._cluster.nodes()
            measurers = [self._measurer(node) for node in nodes]
            probes = dict(zip(nodes, self._cluster.answers([own.probe.remote() for own in measurers]), strict=True))
            chosen, why = choose(probes)
            for line in why:
                self._tell(line)
            if not chosen:
                raise TargetError(f"--ray {self._cluster.address}: none of {len(nodes)} nodes can measure")
        except BaseException:
            self._cluster.__exit__()
            raise
        self._tell(f"measuring on {', '.join(map(str, chosen))}")
        self.environment = probes[chosen[0]].machine.environment
        """Of all of them."""
        self.count = len(chosen)
        """How many there are."""
        # The actors of the others end, as nothing refers to them.
        self._measurers = {node: own for node, own in zip(nodes, measurers, strict=True) if node in chosen}
        for node in chosen:
            self._free.put(node)
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        # Ray would kill the load tests, which then could not stop their servers.
        stopped = [own.stop.remote() for own in self._measurers.values()]
        self._cluster.answers(stopped, STOP_TIMEOUT_S + _GRACE_S)
        self._measurers.clear()
        self._cluster.__exit__()

    def measure(self, cell: Cell, how: Measurement) -> Mapping[str, ModeResult]:
        """Measures a cell on a node that is free, for which it waits. As many threads may call it as there are nodes.

        A node that is lost gets no more cells. Raises TargetError where no node is left.
        """
        problem: object = None
        for _ in range(MAX_LOSSES):
            node = self._free.get()
            if node is None:
                self._free.put(None)  # for the other threads
                break
            answer = self._cluster.answer(self._measurers[node].measure.remote(cell, how))
            if not isinstance(answer, Exception):
                self._free.put(node)
                results: Mapping[str, ModeResult] = answer[0]
                files: Mapping[str, bytes] = answer[1]
                how.folder.mkdir(parents=True, exist_ok=True)
                for name, data in files.items():
                    (how.folder / name).write_bytes(data)
                return results
            if self._is_over:
                raise answer
            problem = answer
            self._tell(f"{cell}: lost on {node}: {problem}")
            self._begin_again(node)
        if not self._measurers:
            raise TargetError(f"--ray {self._cluster.address}: no node is left")
        return dict.fromkeys(how.modes, ModeResult(reason=f"the load test was lost {MAX_LOSSES} times: {problem}"))

    def _begin_again(self, node: Node) -> None:
        """Starts the actor of a node anew; without an answer the node is lost, which the cluster may not know yet."""
        del self._measurers[node]
        measurer = self._measurer(node)
        (answer,) = self._cluster.answers([measurer.probe.remote()])
        if isinstance(answer, Exception):
            self._tell(f"node {node} is lost: {answer}")
            if not self._measurers:
                self._free.put(None)
            return
        self._measurers[node] = measurer
        self._free.put(node)

    def _measurer(self, node: Node) -> Any:
        return self._cluster.on(node, Measurer, num_cpus=node.cpus, num_gpus=node.gpus, max_concurrency=2)()


class Measurer:
    """An actor that has a node to itself. Its methods run in threads, two at a time."""

    def __init__(self) -> None:
        self._is_over = Event()
        self._is_measuring = Lock()

    def probe(self) -> Probe:
        """Says what it runs on."""
        return Probe(own_version(), Machine.of_this())

    def measure(self, cell: Cell, how: Measurement) -> tuple[Mapping[str, ModeResult], Mapping[str, bytes]]:
        """Returns the results, and what is to be kept of the load test."""
        with self._is_measuring, tempfile.TemporaryDirectory(prefix="loadtest-sweep-") as name:
            folder = Path(name)
            results = measure(cell, dataclasses.replace(how, folder=folder), is_over=self._is_over)
            return results, {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def stop(self) -> None:
        """Ends the load test that runs, and returns when it has ended."""
        self._is_over.set()
        with self._is_measuring:
            pass


def choose(probes: Mapping[Node, Probe | Exception]) -> tuple[list[Node], list[str]]:
    """Returns the nodes whose figures can stand in one study, and why the others are left out.

    They run our code, are as many machines, and have the environment that most of them have.
    """
    chosen: dict[Node, Machine] = {}
    left_out: list[str] = []
    machines: dict[str, Node] = {}
    for node, probe in probes.items():
        if isinstance(probe, Exception):
            left_out.append(f"node {node} is left out: {probe}; its cores may be in use")
        elif probe.version != own_version():
            left_out.append(f"node {node} is left out: it runs {probe.version}, and this side {own_version()}")
        elif probe.machine.id in machines:
            other = machines[probe.machine.id]
            left_out.append(f"node {node} is left out: it is the same machine as node {other}, and would disturb it")
        else:
            machines[probe.machine.id] = node
            chosen[node] = probe.machine
    if not chosen:
        return [], left_out
    kinds = {node: repr(_figures(machine.environment)) for node, machine in chosen.items()}
    ((most, _),) = Counter(kinds.values()).most_common(1)
    first = next(node for node in chosen if kinds[node] == most)
    for node in [node for node in chosen if kinds[node] != most]:
        differs = apart("", _figures(chosen[first].environment), _figures(chosen.pop(node).environment))
        said = [f"{name.removeprefix('.')}: {what}" for name, what in differs][:_MAX_SHOWN]
        left_out.append(f"node {node} is left out: it is not as node {first} ({'; '.join(said)})")
    return list(chosen), left_out


def _figures(environment: Environment) -> Mapping[str, Any]:
    return dataclasses.asdict(dataclasses.replace(environment, machine_ids=()))
