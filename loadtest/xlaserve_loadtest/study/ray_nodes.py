"""Measurement of a sweep's cells on the nodes of a Ray cluster: one cell at a time on each, with all its cores and
GPUs."""

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
"""A cell whose process or node was lost this often has the loss as its result: the cell may be its cause."""

_GRACE_S: Final = 10.0
_MAX_SHOWN: Final = 3


@dataclass(frozen=True)
class Probe:
    """The version and the machine of a node."""

    version: str
    machine: Machine


class RayNodes:
    """The nodes that can measure one study together. Entering finds them, and raises TargetError where there are
    none."""

    def __init__(self, address: str, tell: Callable[[str], None]) -> None:
        self._cluster = Cluster(address)
        self._tell = tell
        self._measurers: dict[Node, Any] = {}
        """The actor on each node that is not lost."""
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
        """The environment that all chosen nodes have."""
        self.count = len(chosen)
        """The number of chosen nodes."""
        # The actors of the other nodes end, as no reference to them is left.
        self._measurers = {node: own for node, own in zip(nodes, measurers, strict=True) if node in chosen}
        for node in chosen:
            self._free.put(node)
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        # Otherwise Ray would kill the load tests, which then could not stop their servers.
        stopped = [own.stop.remote() for own in self._measurers.values()]
        self._cluster.answers(stopped, STOP_TIMEOUT_S + _GRACE_S)
        self._measurers.clear()
        self._cluster.__exit__()

    def measure(self, cell: Cell, how: Measurement) -> Mapping[str, ModeResult]:
        """Waits for a free node and measures a cell on it. As many threads may call it as there are nodes.

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
        """Starts the actor of a node again. If it does not answer, the node is lost, even if the cluster does not know
        yet."""
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
    """The actor that measures on a node. Ray runs its methods in threads, two at a time."""

    def __init__(self) -> None:
        self._is_over = Event()
        self._is_measuring = Lock()

    def probe(self) -> Probe:
        """Returns the version and the machine of this node."""
        return Probe(own_version(), Machine.of_this())

    def measure(self, cell: Cell, how: Measurement) -> tuple[Mapping[str, ModeResult], Mapping[str, bytes]]:
        """Measures a cell; returns the results, and the contents of the load test's files by name."""
        with self._is_measuring, tempfile.TemporaryDirectory(prefix="loadtest-sweep-") as name:
            folder = Path(name)
            results = measure(cell, dataclasses.replace(how, folder=folder), is_over=self._is_over)
            return results, {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def stop(self) -> None:
        """Stops the running load test, and returns when it has ended."""
        self._is_over.set()
        with self._is_measuring:
            pass


def choose(probes: Mapping[Node, Probe | Exception]) -> tuple[list[Node], list[str]]:
    """Returns the nodes whose figures can be compared in one study, and the reasons why the others are left out.

    Chosen nodes run this version, are on different machines, and have the environment that most such nodes have.
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
