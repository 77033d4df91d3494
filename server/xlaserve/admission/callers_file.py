"""The file that says who may come in: callers by key or certificate, and whose tokens are believed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import StringConstraints, ValidationError, field_validator, model_validator

from xlaserve.admission.caller import MAX_NAME_LENGTH, Caller, Limit, Origin, Priority, Role, is_name
from xlaserve.config import yaml_text
from xlaserve.config.base import Frozen
from xlaserve.config.errors_in_words import reasons
from xlaserve.config.files import lines_of
from xlaserve.errors import ConfigError

Hash = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
Algorithm = Literal["EdDSA", "ES256", "ES384", "PS256", "RS256"]
"""Signatures by key pairs alone: who can check a token can't make one."""


class Allowed(Frozen):
    """How much somebody may ask for."""

    limits: tuple[Limit, ...] = ()
    """Each caller has its own count. Several may be for one model: all of them hold."""
    priority: Priority = 2
    """The highest that requests may have: 1, 2 or 3. Those that ask for a higher one get this."""

    @field_validator("limits")
    @classmethod
    def _check_limits(cls, value: tuple[Limit, ...]) -> tuple[Limit, ...]:
        if len({limit.models for limit in value}) != len(value):
            raise ValueError("expected one for the same models")
        return value


class Known(Allowed):
    """Somebody who is recognised by a key or a certificate."""

    name: str
    """For logs and metrics; entries with one name share their limits' counts."""
    key_sha256: Hash | None = None
    """SHA-256 of an API key in hexadecimal; `xlaserve key` makes both."""
    certificate: str | None = None
    """A name in the client's certificate: its subject's common name, or an alternative name (DNS, URI or email)."""
    roles: frozenset[Role] = frozenset((Role.INFER,))
    models: tuple[str, ...] = ("*",)
    """Models that the roles are for, by name or by a pattern such as `resnet*`."""

    @field_validator("name", "certificate")
    @classmethod
    def _check_name(cls, value: str | None) -> str | None:
        if value is not None and not is_name(value):
            raise ValueError(f"expected 1 to {MAX_NAME_LENGTH} printable characters")
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.key_sha256 is None) == (self.certificate is None):
            raise ValueError("expected key_sha256 or certificate")
        return self

    @property
    def caller(self) -> Caller:
        """Who that is."""
        return Caller(self.name, self.roles, self.models, self.limits, self.priority)


class Anybody(Allowed):
    """Permissions of callers without a key, token or certificate. Limits and priority hold for each address."""

    roles: frozenset[Literal[Role.INFER, Role.OBSERVE]] = frozenset((Role.INFER,))
    models: tuple[str, ...] = ("*",)
    """Models that the roles are for, as callers have them."""

    def at(self, address: str) -> Caller:
        """Returns who calls from an address."""
        name = f"address {address}"
        return Caller(name, self.roles, self.models, self.limits, self.priority, Origin.ADDRESS)


class Tokens(Allowed):
    """Whose JSON Web Tokens are believed. Limits and priority are those of each subject (`sub`)."""

    jwks: Path
    """A JSON Web Key Set with the public keys."""
    issuer: str
    """The required value of `iss`."""
    audience: str
    """The value that `aud` must contain."""
    roles_claim: str = "roles"
    """Which claim lists the roles; others in it are ignored."""
    models_claim: str = "models"
    """Which claim lists the models that they are for; all where it is missing."""
    algorithms: tuple[Algorithm, ...] = ("RS256", "ES256", "EdDSA")


class AccessFile(Frozen):
    """The whole file."""

    callers: tuple[Known, ...] = ()
    tokens: Tokens | None = None
    anybody: Anybody | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for field in ("key_sha256", "certificate"):
            given = [value for known in self.callers if (value := getattr(known, field)) is not None]
            if len({*given}) != len(given):
                raise ValueError(f"callers: each {field} is one caller's")
        return self


def read(path: Path) -> AccessFile:
    """Reads the file; relative paths are taken from its folder. Raises ConfigError."""
    try:
        values = yaml_text.parse(path.read_text(encoding="utf-8"))
        if isinstance(values, dict) and isinstance(tokens := values.get("tokens"), dict) and "jwks" in tokens:
            values = {**values, "tokens": {**tokens, "jwks": path.parent / str(tokens["jwks"])}}
        return AccessFile.model_validate(values)
    except ValidationError as error:  # without what was given, which may be a key
        wrong = reasons(error, AccessFile, line_of=lines_of(path), whole="file", shows_values=False)
        raise ConfigError(f"access: {path}: {wrong}") from None
    except OSError as error:
        raise ConfigError(f"access: {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"access: {path}: not UTF-8: {error.reason}") from None
    except ValueError as error:
        raise ConfigError(f"access: {path}: not YAML: {error}") from None
