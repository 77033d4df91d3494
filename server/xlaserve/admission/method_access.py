"""Access to methods: a caller is recognised, and needs one of the method's roles.

The roles of each method are in `ROLES` of `wire.grpc.method_guard` and in `wire.http.routes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from xlaserve.admission.authenticator import Authenticator, unauthenticated
from xlaserve.admission.caller import CURRENT, STRANGER, Caller, Role
from xlaserve.errors import PermissionDenied, Unauthenticated

_UNKNOWN: Final = Caller("unknown", frozenset())


class MethodAccess:
    """Lets callers with one of `roles` call a method, or anyone where there are none; `action` names it in the log.

    A protocol shows it the headers of each call first, and then, where it `asks_connection`, the connection.
    """

    __slots__ = ("_action", "_authenticator", "_roles", "is_open")

    def __init__(self, authenticator: Authenticator, roles: Sequence[Role], action: str = "") -> None:
        self._action = action
        self._authenticator = authenticator
        self._roles = roles
        self.is_open = not authenticator.is_locked
        """Whether nobody is asked who they are."""

    @property
    def asks_connection(self) -> bool:
        """Whether the headers of the current call did not tell who calls."""
        return CURRENT.get() is _UNKNOWN

    def check_headers(self, headers: Mapping[str, str]) -> None:
        """Notes who sent these headers, by their names in lower case. Raises Unauthenticated or PermissionDenied."""
        CURRENT.set(STRANGER)
        try:
            caller = self._authenticator.by_headers(headers)
            if caller is None and not self._authenticator.asks_connections:
                raise unauthenticated()
        except Unauthenticated as error:
            self._turn_away(error)
        else:
            self._let_in(caller)

    def check_connection(self, names: Iterable[str], address: str) -> None:
        """Notes who calls from an address, with a certificate of these names. Raises what `check_headers` raises."""
        CURRENT.set(STRANGER)
        try:
            caller = self._authenticator.by_connection(names, address)
        except Unauthenticated as error:
            self._turn_away(error)
        else:
            self._let_in(caller)

    def _let_in(self, caller: Caller | None) -> None:
        """Notes who calls; None where the connection has to tell. Raises PermissionDenied."""
        CURRENT.set(_UNKNOWN if caller is None else caller)
        if caller is not None and self._roles:
            try:
                caller.check_role(*self._roles)
            except PermissionDenied as error:
                self._authenticator.refusals.note(self._action, self._roles, error)
                raise

    def _turn_away(self, error: Unauthenticated) -> None:
        """Raises `error` unless the method is for anyone."""
        if self._roles:
            self._authenticator.refusals.note(self._action, self._roles, error)
            raise error
