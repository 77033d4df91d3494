"""Recognises callers by what their protocol tells of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from xlaserve.admission import callers_file
from xlaserve.admission.audit import Refusals
from xlaserve.admission.caller import ANYBODY, Caller
from xlaserve.admission.tokens import TokenReader
from xlaserve.admission.watch import Watch
from xlaserve.errors import Unauthenticated

API_KEY: Final = "x-api-key"
AUTHORIZATION: Final = "authorization"
BEARER: Final = "bearer "


class _Known(NamedTuple):
    """Whom one reading of the access file lets in."""

    by_key: Mapping[str, Caller] = {}
    """By the SHA-256 of their key."""
    by_certificate: Mapping[str, Caller] = {}
    """By a name in their certificate."""
    tokens: TokenReader | None = None
    anybody: callers_file.Anybody | None = None


class Authenticator:
    """Lets in those whom the access file names; everybody where there is none.

    The file is read again when it has changed, and is as before where it then is wrong.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Raises ConfigError."""
        self._known = _Known()
        """Replaced as a whole, on another thread."""
        self.refusals = Refusals()
        self.watch: Watch | None = None
        if path is not None:

            def read() -> Sequence[Path]:
                return self._read(path)

            self.watch = Watch("access", [path], read)

    @property
    def is_locked(self) -> bool:
        """Whether callers have to be recognised."""
        return self.watch is not None

    @property
    def asks_for_certificates(self) -> bool:
        """Whether somebody is recognised by a certificate."""
        return bool(self._known.by_certificate)

    @property
    def asks_connections(self) -> bool:
        """Whether somebody without credentials in their headers may be let in."""
        return self.asks_for_certificates or self._known.anybody is not None

    def by_headers(self, headers: Mapping[str, str]) -> Caller | None:
        """Returns who sent these headers, by their names in lower case; None where they have no credentials.

        Raises Unauthenticated, always with the same words.
        """
        if self.watch is None:
            return ANYBODY
        if key := headers.get(API_KEY):
            return self._of_key(key)
        authorization = headers.get(AUTHORIZATION, "")
        if not authorization:
            return None
        if authorization[: len(BEARER)].lower() != BEARER:
            raise unauthenticated()
        credential = authorization[len(BEARER) :].strip()
        tokens = self._known.tokens
        if tokens is not None and credential.count(".") == 2 and (caller := tokens.caller(credential)):
            return caller
        return self._of_key(credential)

    def by_connection(self, names: Iterable[str], address: str) -> Caller:
        """Returns who has a certificate, that was verified, with these names, or else anybody who may call from there.

        Raises Unauthenticated.
        """
        known = self._known
        for name in names:
            if caller := known.by_certificate.get(name):
                return caller
        if known.anybody is None:
            raise unauthenticated()
        return known.anybody.at(address)

    def _of_key(self, key: str) -> Caller:
        # How long a look-up takes tells at most something of the hash, and nothing of keys.
        caller = self._known.by_key.get(hashlib.sha256(key.encode("utf-8", "replace")).hexdigest())
        if caller is None:
            raise unauthenticated()
        return caller

    def _read(self, path: Path) -> Sequence[Path]:
        found = callers_file.read(path)
        self._known = _Known(
            {known.key_sha256: known.caller for known in found.callers if known.key_sha256},
            {known.certificate: known.caller for known in found.callers if known.certificate},
            TokenReader(found.tokens) if found.tokens else None,
            found.anybody,
        )
        return [path, *([found.tokens.jwks] if found.tokens else [])]


OPEN: Final = Authenticator()
"""Lets everybody in."""


def unauthenticated() -> Unauthenticated:
    """Returns the one refusal of all that is not recognised."""
    return Unauthenticated("authentication required: send a valid API key or token as `authorization: Bearer ...`")
