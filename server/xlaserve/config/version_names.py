"""Numbers and labels of versions, as settings and requests write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field

VERSION: Final = r"^[0-9]{1,18}$"
LABEL: Final = r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$"
LATEST: Final = re.compile(r"latest [1-9][0-9]{0,3}")

Number = Annotated[str, Field(pattern=VERSION, coerce_numbers_to_str=True), AfterValidator(lambda text: str(int(text)))]
"""The number of a version."""
Label = Annotated[str, Field(pattern=LABEL)]
"""The name of a version."""


def _version_or_label(text: str) -> str:
    if re.fullmatch(VERSION, text):
        return str(int(text))
    if re.fullmatch(LABEL, text):
        return text
    raise ValueError("expected a version's number, or a label: a letter or _, and at most 63 of A-Z a-z 0-9 . _ -")


VersionOrLabel = Annotated[str, Field(coerce_numbers_to_str=True), AfterValidator(_version_or_label)]
"""A version by its number or its label."""
Percentage = Annotated[float, Field(gt=0, le=100)]

SHARED: Final[Mapping[str, Any]] = {"version_labels": (), "routing": ()}
"""Settings that all versions of a model share, and what they are by default."""
