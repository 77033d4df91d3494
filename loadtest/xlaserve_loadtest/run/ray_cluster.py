"""A Ray cluster: it starts processes of ours on its nodes, and ends them. What they send never passes through it."""

from __future__ import annotations

import importlib
import logging
import signal
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Self

from xlaserve_loadtest.targets.target import TargetError

ANSWER_S: Final = 60.0
"""How long a node may take to answer, a new process included."""


class Node(NamedTuple):
    """A node that takes work."""

    id: str
    host: str
    """The address by which the other nodes know it."""
    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.host} ({self.id[:8]})"


class Cluster:
    """`with` connects this process to the cluster at an address, as `ray.init` takes it. Raises TargetError."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __enter__(self) -> Self:
        try:
            # Only who asks for a cluster needs the package.
            self.ray: Any = importlib.import_module("ray")
        except ImportError:
            raise TargetError("--ray needs Ray: pip install 'xlaserve[ray]'") from None
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM)
        try:
            self.ray.init(self.address, logging_level=logging.ERROR, log_to_driver=False)
        except Exception as error:  # whatever the client finds wrong with an address
            raise TargetError(f"--ray {self.address}: {_in_a_line(error)}") from None
        finally:
            if is_main:  # Ray has put its own in the place of that
                signal.signal(signal.SIGTERM, before)
        return self

    def __exit__(self, *error: object) -> None:
        self.ray.shutdown()

    def nodes(self) -> list[Node]:
        """Returns the nodes that are alive and have cores for work. Raises TargetError where there are none."""
        found = [
            Node(
                node["NodeID"],
                node["NodeManagerAddress"],
                node["Resources"].get("CPU", 0.0),
                node["Resources"].get("GPU", 0.0),
            )
            for node in self.ray.nodes()
            if node["Alive"]
        ]
        working = sorted(node for node in found if node.cpus)
        if not working:
            raise TargetError(f"--ray {self.address}: none of {len(found)} nodes has cores for work")
        return working

    def on(self, node: Node, kind: type, **options: float) -> Any:
        """Returns what makes an actor of a class on a node, which is not started again when it dies there."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        affinity = strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
        where = {"scheduling_strategy": affinity, "num_cpus": 0, "max_restarts": 0}
        return self.ray.remote(kind).options(**{**where, **options}).remote

    def answers(self, references: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """Returns what `answer` does for each call; TimeoutError for those that did not end within ANSWER_S."""
        limit_s = ANSWER_S if timeout_s is None else timeout_s
        done, _ = self.ray.wait(list(references), num_returns=len(references), timeout=limit_s)
        late = TimeoutError(f"no answer within {limit_s:g} s")
        return [self.answer(one) if one in done else late for one in references]

    def answer(self, reference: Any) -> Any:
        """Returns what a call on a node returns, once it has; TargetError where it failed or was lost."""
        try:
            return self.ray.get(reference)
        except Exception as error:
            return TargetError(_in_a_line(error))


def _in_a_line(error: Exception) -> str:
    """Returns the last line of an error on a node, which is a traceback, or the first of an error of the cluster."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if hasattr(error, "cause") else 0]
