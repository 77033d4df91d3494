"""A method at its paths."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from xlaserve.admission.caller import ADMIN, Role
from xlaserve.wire.http.message import HttpAnswer, HttpRequest

Method = Callable[[HttpRequest], Awaitable[HttpAnswer]]
"""Answers a request. May raise any error."""


class Operation(NamedTuple):
    """A method, and where it is found."""

    verb: str
    paths: Sequence[str]
    name: str
    """The operation's name in metrics and in the OpenAPI document."""
    method: Method
    roles: Sequence[Role] = ADMIN
    """One of these is needed, where there are any."""
    is_probe: bool = False
    """Whether others learn by it whether the server is well: small, and counted by itself."""
