"""Callers, their roles and their limits."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Final, Self, TypeGuard

from pydantic import Field, model_validator

from xlaserve.config.base import Frozen
from xlaserve.errors import PermissionDenied

MAX_NAME_LENGTH: Final = 255
"""Characters of a caller's name, as many as OpenID Connect allows the subject of a token."""
Priority = Annotated[int, Field(ge=1, le=3)]
"""1 is the highest."""


class Role(StrEnum):
    """A permission. No role contains another."""

    INFER = "infer"
    """Ask models, and read what a client must know of them."""
    OBSERVE = "observe"
    """Read metadata, statistics, metrics and reflection."""
    ADMIN = "admin"
    """Load and unload models, record profiles, share memory, change what is logged."""


# What methods ask for: one of these roles.
INFER: Final = (Role.INFER,)
READ: Final = (Role.INFER, Role.OBSERVE)
"""For what clients have to know of models, and operators too."""
OBSERVE: Final = (Role.OBSERVE,)
ADMIN: Final = (Role.ADMIN,)
ANYONE: Final[tuple[Role, ...]] = ()


class Origin(StrEnum):
    """The source of a caller's name. Callers of two origins with one name are two callers."""

    FILE = "file"
    """The access file, or the server itself."""
    TOKEN = "token"
    """The subject of a token."""
    ADDRESS = "address"
    """The address of a client without credentials."""


class Limit(Frozen):
    """How many images a caller may ask of some models, counted for these together."""

    models: tuple[str, ...] = Field(("*",), min_length=1)
    """The models, by name or by a pattern such as `resnet*`; all by default."""
    images_per_s: float | None = Field(None, ge=1e-6, le=1e9)
    """Images a second in the long run."""
    burst_images: int | None = Field(None, ge=1, le=10**9)
    """Images that may come at once after a pause; as many as in a second by default. A request with more is taken after
    a pause that is long enough for the burst, and the next one waits until `images_per_s` has made up for it."""
    max_images: int | None = Field(None, ge=1)
    """Images under way at a time. A request with more gets INVALID_ARGUMENT."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.images_per_s is None and self.max_images is None:
            raise ValueError("expected images_per_s, max_images or both")
        if self.images_per_s is None and self.burst_images is not None:
            raise ValueError("burst_images: expected images_per_s as well")
        return self

    @property
    def burst(self) -> float:
        """Images that may come at once, where there is a rate."""
        return self.burst_images or max(1.0, self.images_per_s or 0.0)


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who was recognised."""

    name: str
    """For logs; see `is_name`."""
    roles: frozenset[Role]
    models: tuple[str, ...] = ("*",)
    """Names of models, or patterns of them as shells have, that the roles are for."""
    limits: tuple[Limit, ...] = ()
    """Limits: all that name a model hold for its requests."""
    priority: Priority = 2
    """The highest that its requests may have."""
    origin: Origin = Origin.FILE

    @property
    def is_listed(self) -> bool:
        """Whether the access file names it: others have names that somebody else chose."""
        return self.origin is Origin.FILE

    @property
    def identity(self) -> str:
        """Who it is, for what belongs to a caller. Another key or certificate of the same name is the same caller."""
        return f"{self.origin}:{self.name}"

    def may_use(self, model: str) -> bool:
        """Whether its roles are for a model."""
        return self.may_use_all or is_among(model, self.models)

    @property
    def may_use_all(self) -> bool:
        """Whether its roles are for every model."""
        return "*" in self.models

    def check_role(self, *roles: Role) -> None:
        """Raises PermissionDenied where it has none of these."""
        if self.roles.isdisjoint(roles):
            raise PermissionDenied("this caller may not do that")

    def check_model(self, model: str) -> None:
        """Raises PermissionDenied, whether or not there is such a model."""
        if not self.may_use(model):
            raise PermissionDenied("this caller may not use that model")

    def check_all_models(self) -> None:
        """Raises PermissionDenied where its roles are for some models alone: what is asked for shows all."""
        if not self.may_use_all:
            raise PermissionDenied("this is for callers who may use all models")


def is_name(text: object) -> TypeGuard[str]:
    """Whether a text names a caller: without control characters, which programs cut or show as something else."""
    return isinstance(text, str) and 1 <= len(text) <= MAX_NAME_LENGTH and text.isprintable()


def is_among(model: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of the patterns, as shells have them, is for a model."""
    return any(fnmatchcase(model, pattern) for pattern in patterns)


STRANGER: Final = Caller("stranger", frozenset(), ())
"""Who may call what is open to anybody, where others have to be recognised."""
ANYBODY: Final = Caller("anybody", frozenset(Role), priority=1)
"""Who calls where nobody is asked who they are."""
CURRENT: Final[ContextVar[Caller]] = ContextVar("caller", default=ANYBODY)
"""Who made the call that is being answered. A protocol sets it before it parses anything."""
