"""The fleet on Ray: its servers as replicas of Ray Serve, and the name service as an actor on the head.

Serve's controller places a replica for each server, checks it every second, starts another for one that fails, adds and
stops them as the policy says, and replaces them when what they are started with has changed. Nothing is ever sent to
a replica: Serve's proxies are off, and its handles unused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import ray
from ray import serve
from ray.exceptions import ActorDiedError, RayError

from xlaserve.errors import ConfigError, XlaserveError
from xlaserve_fleet import folders, policy
from xlaserve_fleet.addresses import Entry
from xlaserve_fleet.fleet_state import FAILED, Deployed, Status, next_revision
from xlaserve_fleet.member import Member
from xlaserve_fleet.name_service import NameService
from xlaserve_fleet.process import GRACE_S, LOOPBACK, ServerProcess
from xlaserve_fleet.settings import LOCAL, FleetSettings, flags

NAMESPACE: Final = "xlaserve"
DEPLOYMENT: Final = "server"
HEAD: Final = "node:__internal_head__"
"""A resource that Ray gives to the head's node alone."""
RAISED: Final = re.compile(r"^[\w.]*(?:Error|Failed)(?:\(\w+\))?: ", re.MULTILINE)
"""The beginning of the last part of a traceback."""
CHECK_S: Final = 1.0
CHECK_TIMEOUT_S: Final = 5.0
NAMES_TIMEOUT_S: Final = 60.0
REPORT_S: Final = 1.0
LOOK_BACK_S: Final = 5.0
"""The policy sees the average of this time."""
SURGE_PERCENT: Final = 25
TRIES: Final = 3
"""How often servers may fail to start before an update is given up."""
POLL_S: Final = 0.25


class Names:
    """The actor that is the name service."""

    def __init__(self, fleet: FleetSettings) -> None:
        self._service = NameService(_node_address(fleet), fleet.port)

    def renew(self, entry: Entry) -> None:
        """See `NameService`."""
        self._service.renew(entry)

    def remove(self, key: str) -> None:
        """See `NameService`."""
        self._service.remove(key)

    def entries(self) -> list[Entry]:
        """See `NameService`."""
        return self._service.entries()

    def address(self) -> str:
        """Returns where it listens, HOST:PORT."""
        return self._service.address


class RemoteNames:
    """The name service, for a server on any node. It is started where there is none."""

    def __init__(self, fleet: FleetSettings) -> None:
        self._fleet = fleet
        self._finding: asyncio.Task[Any] | None = None
        """Finds the actor, once: without the head it may take as long as that is away."""

    async def renew(self, entry: Entry) -> None:
        """See `Names`. Raises RayError, and whatever else Ray raises while it searches for the actor."""
        await self._call("renew", entry)

    async def remove(self, key: str) -> None:
        """See `Names`. Raises what `renew` raises."""
        await self._call("remove", key)

    async def _call(self, method: str, argument: object) -> None:
        if self._finding is None:
            self._finding = asyncio.create_task(asyncio.to_thread(_names, self._fleet))
        try:
            actor = await asyncio.shield(self._finding)
            await getattr(actor, method).remote(argument)
        except Exception:  # of whatever kind, as Ray's search for an actor may raise ValueError: searched for anew
            self._finding = None
            raise


class Replica:
    """A replica of Ray Serve: it has a server process beside it, and takes no requests itself."""

    async def __init__(self, fleet: FleetSettings, revision: str) -> None:  # type: ignore[misc]  # Serve awaits it
        context = serve.get_replica_context()
        key, node = context.replica_tag, _node_address(fleet)
        folder = folders.private() / f"{fleet.name}-{key}"
        process = ServerProcess(fleet.server, flags(fleet, node), folder, fleet.stop_s, node, recover_s=fleet.recover_s)
        about = {
            "node": ray.get_runtime_context().get_node_id(),
            "revision": revision,
            "supervisor": os.getpid(),
        }
        self._member = Member(key, process, RemoteNames(fleet), about)
        await self._member.start()

    async def check_health(self) -> None:
        """Raises where the server is to be replaced: Serve calls it."""
        await self._member.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns how loaded the server is: Serve calls it, for the policy."""
        return await self._member.load()

    async def __del__(self) -> None:
        """Drains the server: Serve awaits it before it ends a replica."""
        if hasattr(self, "_member"):
            await self._member.stop()


@contextmanager
def connected(fleet: FleetSettings) -> Iterator[None]:
    """Connects to Ray's cluster, or starts a local one for the time being. Raises ConfigError."""
    # For a local cluster; others have what `ray start` was given.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    where: dict[str, Any] = {"address": fleet.ray}
    local = None
    if fleet.ray == LOCAL:
        where = {"address": "local", "include_dashboard": False}
        local = fleet.local_address
    try:
        ray.init(**where, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"ray: expected a cluster at {fleet.ray}: {str(error).splitlines()[0]}") from None
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        if local is not None:
            address = ray.get_runtime_context().gcs_address
            folders.write(local, address)
            stack.callback(_forget, local, address)
        yield


def _forget(local: Path, address: str) -> None:
    """Removes the file that says where a local cluster is, unless a fleet that was started later has written it."""
    with suppress(OSError):
        if folders.read(local) == address:
            local.unlink()


def deploy(fleet: FleetSettings, restart: bool = False) -> Deployed:
    """Has Serve make the fleet what it should be. Does not wait for the servers.

    Servers that were started with other settings are replaced; with `restart`, all are. Raises ConfigError where the
    name service can't be had, and XlaserveError where it does not answer.
    """
    serve.start(proxy_location="Disabled")
    address, servers = _ask_names(fleet)
    revision = next_revision(fleet, servers, restart=restart)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the interval is to become a variable of the environment
        scaling = serve.config.AutoscalingConfig(
            min_replicas=fleet.min_servers,
            max_replicas=fleet.most_servers,
            metrics_interval_s=REPORT_S,
            look_back_period_s=LOOK_BACK_S,
            upscale_delay_s=fleet.scale_up_after_s,
            downscale_delay_s=fleet.scale_down_after_s,
            policy={
                "policy_function": f"{policy.__name__}:{policy.Policy.__name__}",
                "policy_kwargs": {"target_wait_s": fleet.target_wait_s},
            },
        )
    deployment = serve.deployment(
        Replica,
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": fleet.cores, "num_gpus": fleet.gpus},
        autoscaling_config=scaling,
        health_check_period_s=CHECK_S,
        health_check_timeout_s=CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=fleet.stop_s + 2 * GRACE_S,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=TRIES,
        max_surge_percent=SURGE_PERCENT if fleet.update == "start_first" else 0,
    )
    # Without a version of ours Serve takes each deployment for a new one, and replaces all servers.
    deployment = deployment.options(version=revision, _internal=True)
    target = serve.RunTarget(target=deployment.bind(fleet, revision), name=fleet.name, route_prefix=None)
    serve.run_many([target], wait_for_applications_running=False)
    return Deployed(address, revision)


def status(fleet: FleetSettings) -> Status | None:
    """Returns how the fleet is; None where there is none."""
    application = serve.status().applications.get(fleet.name)
    if application is None:
        return None
    deployment = application.deployments.get(DEPLOYMENT)
    replicas = (
        {str(getattr(k, "value", k)).lower(): n for k, n in deployment.replica_states.items()} if deployment else {}
    )
    message = (deployment.message if deployment else "") or application.message
    names, servers = "", []
    with suppress(RayError, ValueError):
        actor = ray.get_actor(_actor_name(fleet), namespace=NAMESPACE)
        names, servers = ray.get([actor.address.remote(), actor.entries.remote()], timeout=CHECK_TIMEOUT_S)
    return Status(str(application.status.value), message, replicas, names, servers)


def wait(fleet: FleetSettings, revision: str, timeout_s: float, say: Callable[[str], None]) -> Status:
    """Returns once all servers that there should be serve as `revision`. Raises XlaserveError where they can't."""
    give_up_at = time.monotonic() + timeout_s
    said = ""
    while True:
        seen = status(fleet)
        if seen is None:
            raise XlaserveError(f"fleet {fleet.name}: another command has taken it down")
        if seen.counts != said:
            said = seen.counts
            say(said)
        if seen.state == FAILED:
            raise XlaserveError(f"fleet {fleet.name}: {_cause(seen.message)}")
        if seen.is_complete(fleet.min_servers, revision):
            return seen
        if time.monotonic() > give_up_at:
            raise XlaserveError(f"fleet {fleet.name}: not ready after {timeout_s:g} s: {said} {seen.message}".strip())
        time.sleep(POLL_S)


def is_up(fleet: FleetSettings) -> bool:
    """Returns whether there is such a fleet."""
    return fleet.name in serve.status().applications


def down(fleet: FleetSettings) -> None:
    """Drains and stops all servers, then the name service, and Serve where it has nothing else to run."""
    serve.delete(fleet.name, _blocking=False)  # which waits for a minute at most
    while is_up(fleet):
        time.sleep(POLL_S)
    with suppress(ValueError):
        ray.kill(ray.get_actor(_actor_name(fleet), namespace=NAMESPACE))
    if not serve.status().applications:
        serve.shutdown()


def _node_address(fleet: FleetSettings) -> str:
    return LOOPBACK if fleet.ray == LOCAL else str(ray.util.get_node_ip_address())


def _actor_name(fleet: FleetSettings) -> str:
    return f"{fleet.name}-names"


def _names(fleet: FleetSettings) -> Any:
    """Returns the name service's actor, which Ray starts again on the head whenever it ends."""
    options = {
        "name": _actor_name(fleet),
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
        "resources": {HEAD: 0.001},
    }
    return ray.remote(Names).options(**options).remote(fleet)


def _ask_names(fleet: FleetSettings) -> tuple[str, list[Entry]]:
    """Returns the HOST:PORT of the name service, started where there is none, and its list.

    Raises ConfigError where it can't start, and XlaserveError where it does not answer.
    """
    give_up_at = time.monotonic() + NAMES_TIMEOUT_S
    while True:
        names = None
        try:
            names = _names(fleet)
            asked = [names.address.remote(), names.entries.remote()]
            address, servers = ray.get(asked, timeout=max(0.0, give_up_at - time.monotonic()))
            break
        except (RayError, ValueError) as error:  # ValueError: another command has started or ended it just now
            if isinstance(error, ActorDiedError) and error.actor_init_failed:
                ray.kill(names)  # its name is free again
                raise ConfigError(_cause(str(error))) from None
            if time.monotonic() >= give_up_at:
                late = f"expected an answer of the name service within {NAMES_TIMEOUT_S:g} s"
                raise XlaserveError(f"fleet {fleet.name}: {late}, got {error!r}") from None
        time.sleep(POLL_S)
    if not address.endswith(f":{fleet.port}"):
        raise ConfigError(f"port: the fleet's name service is at {address}; only a new fleet can have it elsewhere")
    return address, servers


def _cause(text: str) -> str:
    """Returns what a remote error says without the traces before it."""
    *_, last = RAISED.split(text)
    return " ".join(last.split()) or "failed"
