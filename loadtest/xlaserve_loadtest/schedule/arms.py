"""The arms of a run, which are measured and compared: pure functions from models, modes and servers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from xlaserve_loadtest.addresses import FLEET, Address
from xlaserve_loadtest.record.lines import Arm
from xlaserve_loadtest.schedule.mix import Mix

MODES: Final = ("xla", "graph", "eager", "autocluster", "openvino", "auto")
"""The server's modes."""
USUAL_MODES: Final = ("xla", "graph")
"""The modes that are measured where the command line names none."""
ALL: Final = "all"
AS_IT_IS: Final = ""
"""The mode of requests that name no mode: the server chooses its default."""
MIX: Final = "mix"
"""Name of an arm of several models whose server names no modes."""
_CONTROL: Final = "(again)"


@dataclass(frozen=True)
class ServerArm:
    """An arm on a running server: `NAME=ADDRESS[,ADDRESS...][,model=MODEL][,mode=MODE]`."""

    name: str
    addresses: tuple[str, ...]
    model: str | None = None
    mode: str = AS_IT_IS

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the text of the command line, which `str` gives back. Raises ValueError."""
        name, _, rest = text.partition("=")
        parts = [part.strip() for part in rest.split(",")]
        addresses = tuple(part for part in parts if part and "=" not in part)
        chosen = dict(part.split("=", 1) for part in parts if "=" in part)
        is_whole = len(addresses) + len(chosen) == len(parts) and set(chosen) <= {"model", "mode"}
        if not name.strip() or not addresses or not is_whole or not all(chosen.values()):
            raise ValueError(f"expected NAME=ADDRESS, then ,model=MODEL or ,mode=MODE where needed; got {text!r}")
        check_addresses(addresses)
        return cls(name.strip(), addresses, chosen.get("model"), chosen.get("mode", AS_IT_IS))

    def __str__(self) -> str:
        more = [f"{key}={value}" for key, value in (("model", self.model), ("mode", self.mode)) if value]
        return f"{self.name}={','.join([*self.addresses, *more])}"


def check_addresses(addresses: Sequence[str]) -> None:
    """Raises ValueError where one is no address, and where they are of several protocols or several fleets."""
    protocols = [Address.parse(address).protocol for address in addresses]
    if len(set(protocols)) > 1 or protocols.count(FLEET) > 1:
        raise ValueError(
            f"expected addresses of one protocol or one fleet, and an arm for each, got {','.join(addresses)!r}"
        )


def name_arms(models: Sequence[str], modes: Sequence[str], target: str, shares: Sequence[float] = ()) -> list[Arm]:
    """Returns an arm for each model and mode, named after the mode where there is one model.

    With `shares`, the share of requests to each of `models`, there is one arm for each mode, of all models.
    """
    if shares:
        mix = str(Mix(dict(zip(models, shares, strict=True))))
        return [Arm(mode or MIX, mode, mix, target, models=tuple(models)) for mode in modes]
    return [Arm(_name(model, mode, len(models)), mode, model, target) for model in models for mode in modes]


def _name(model: str, mode: str, models: int) -> str:
    if mode == AS_IT_IS:
        return model
    return mode if models == 1 else f"{model} {mode}"


def common_modes(offered: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the modes that every model offers, in the first model's order, and the modes that only some models
    offer."""
    common = tuple(mode for mode in offered[0] if all(mode in modes for modes in offered))
    others = dict.fromkeys(mode for modes in offered for mode in modes if mode not in common)
    return common, tuple(others)


def name_servers(servers: Sequence[ServerArm], models: Sequence[str], shares: Sequence[float] = ()) -> list[Arm]:
    """Returns an arm for each server. A server that names no model runs the first of `models`, or all of them by
    `shares`."""
    mix = str(Mix(dict(zip(models, shares, strict=True)))) if shares else models[0]
    mixed = tuple(models) if shares else ()
    return [
        Arm(
            server.name,
            server.mode,
            server.model or mix,
            ",".join(server.addresses),
            models=() if server.model else mixed,
        )
        for server in servers
    ]


def choose_baseline(arms: Sequence[Arm], baseline: str) -> str | None:
    """Returns the name of the arm that `baseline` names, or of the first arm of that mode; None where there is one arm
    only."""
    found = next((arm.name for key in ("name", "mode") for arm in arms if getattr(arm, key) == baseline), None)
    return found if len(arms) > 1 else None


def with_controls(arms: Sequence[Arm], baselines: Collection[str]) -> list[Arm]:
    """Returns the arms, each of `baselines` followed by a copy of itself, its A/A control."""
    found = []
    for arm in arms:
        found.append(arm)
        if arm.name in baselines:
            found.append(replace(arm, name=f"{arm.name} {_CONTROL}", is_control_of=arm.name))
    return found
