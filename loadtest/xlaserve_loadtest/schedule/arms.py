"""What is compared: arms, and which server process each of them needs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xlaserve_loadtest.record.lines import Arm

_KINDS: Final = {"xla": "xla", "graph": "graph", "eager": "graph", "autocluster": "autocluster", "auto": "xla"}
"""By the server's modes: the kind of process that runs each."""
MODES: Final = tuple(_KINDS)
USUAL_MODES: Final = ("xla", "graph")
"""Measured where none is named."""
ALL: Final = "all"
AS_IT_IS: Final = ""
"""The mode of a server that names none, which is not sent."""
_CONTROL: Final = "(again)"


def name_arms(models: Sequence[str], modes: Sequence[str], target: str) -> list[Arm]:
    """Returns an arm for each model and mode, named for the mode where there is one model."""
    return [Arm(_name(model, mode, len(models)), mode, model, target) for model in models for mode in modes]


def _name(model: str, mode: str, models: int) -> str:
    if mode == AS_IT_IS:
        return model
    return mode if models == 1 else f"{model} {mode}"


def choose_baseline(arms: Sequence[Arm], mode: str) -> str | None:
    """Returns the first arm of that mode, where there is another to compare with it."""
    found = next((arm.name for arm in arms if arm.mode == mode), None)
    return found if len(arms) > 1 else None


def with_controls(arms: Sequence[Arm], mode: str) -> list[Arm]:
    """Returns the arms, each followed by a twin where it is a baseline: the A/A control."""
    found = []
    for arm in arms:
        found.append(arm)
        if arm.mode == mode and sum(other.model == arm.model for other in arms) > 1:
            found.append(Arm(f"{arm.name} {_CONTROL}", arm.mode, arm.model, arm.target, is_control_of=arm.name))
    return found


def process_kind(mode: str, *, is_shared: bool) -> str:
    """Returns which server process runs a mode; modes of one kind run in the same.

    TensorFlow's threads are set for a whole process, and XLA needs other settings than graph mode: in one process, one
    of the two would be measured at a disadvantage. `is_shared` puts them together all the same.
    """
    return "shared" if is_shared else _KINDS.get(mode, mode)
