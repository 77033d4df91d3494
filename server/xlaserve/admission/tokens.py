"""JSON Web Tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from xlaserve.admission.caller import Caller, Origin, Role, is_name
from xlaserve.admission.callers_file import Tokens
from xlaserve.errors import ConfigError

MAX_TOKEN_BYTES: Final = 16 * 1024
MAX_ACCEPTED: Final = 1024
SIGNATURE: Final = "sig"
"""The `use` of keys that are for signatures."""
LEEWAY_S: Final = 30
"""By how much clocks may differ."""
_ROLES: Final = {role.value for role in Role}


class TokenReader:
    """Reads tokens that are signed by a key of a set. Keys for other algorithms or uses are left out."""

    def __init__(self, settings: Tokens, clock: Callable[[], float] = time.time) -> None:
        """Raises ConfigError."""
        try:
            import jwt  # noqa: PLC0415 - an extra
        except ImportError:
            raise ConfigError("access: tokens need the extra jwt: pip install 'xlaserve[jwt]'") from None
        self._jwt = jwt
        self._settings = settings
        self._clock = clock
        self._accepted: dict[str, tuple[Caller, float]] = {}
        """Tokens that were checked, with when they expire: a signature takes a tenth of a millisecond."""
        try:
            keys = jwt.PyJWKSet.from_dict(json.loads(settings.jwks.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"access: tokens.jwks: {settings.jwks} can't be read: {error.strerror}") from None
        except Exception as error:  # whatever libraries raise of what is no such set
            reason = " ".join(str(error).split())
            raise ConfigError(f"access: tokens.jwks: {settings.jwks}: expected a JSON Web Key Set: {reason}") from None
        self._keys = {
            key.key_id: key
            for key in keys.keys
            if key.algorithm_name in settings.algorithms and key.public_key_use in (None, SIGNATURE)
        }
        if not self._keys:
            expected = f"public keys for {', '.join(settings.algorithms)}"
            raise ConfigError(f"access: tokens.jwks: {settings.jwks}: expected {expected}, got none")

    def caller(self, token: str) -> Caller | None:
        """Returns whose token it is, None where it is not accepted."""
        caller, until_s = self._accepted.get(token, (None, 0.0))
        if caller is not None and self._clock() < until_s:
            return caller
        self._accepted.pop(token, None)
        try:
            claims = self._claims(token)
            caller = self._caller(claims)
            if len(self._accepted) >= MAX_ACCEPTED:
                self._accepted.clear()
            self._accepted[token] = caller, float(claims["exp"])
            return caller
        except Exception:  # whatever libraries raise of what strangers send
            return None

    def _claims(self, token: str) -> Mapping[str, Any]:
        settings = self._settings
        if len(token) > MAX_TOKEN_BYTES:
            raise ValueError
        key_id = self._jwt.get_unverified_header(token).get("kid")
        key = self._keys[key_id] if key_id is not None or len(self._keys) != 1 else next(iter(self._keys.values()))
        claims: Mapping[str, Any] = self._jwt.decode(
            token,
            key,
            algorithms=[*settings.algorithms],
            audience=settings.audience,
            issuer=settings.issuer,
            leeway=LEEWAY_S,
            options={"require": ["exp", "sub"]},
        )
        return claims

    def _caller(self, claims: Mapping[str, Any]) -> Caller:
        roles = claims.get(self._settings.roles_claim, [])
        models = claims.get(self._settings.models_claim, ["*"])
        named = roles.split() if isinstance(roles, str) else roles
        if not is_name(subject := claims["sub"]):
            raise ValueError
        if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
            raise ValueError
        if not isinstance(named, list):
            raise ValueError
        return Caller(
            subject,
            frozenset(Role(one) for one in named if one in _ROLES),
            tuple(models),
            self._settings.limits,
            self._settings.priority,
            Origin.TOKEN,
        )
