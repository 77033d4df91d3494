"""The text of `xlaserve help models` about each field."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from xlaserve.commands.settings_flags import models_explained
from xlaserve.config import ModelSettings

FIELD = re.compile(r"^  ([a-z_.0-9]+) (\S.*)\n((?: {8}.*\n?)*)", re.MULTILINE)
SCHEMA = ModelSettings.model_json_schema()
DEFINITIONS: dict[str, Any] = SCHEMA["$defs"]


def choices(schema: Any) -> Iterator[str]:
    """Yields the values that a field offers, apart from those of fields within it."""
    match schema:
        case {"$ref": str(place)}:
            definition = DEFINITIONS[place.rpartition("/")[2]]
            yield from () if "properties" in definition else choices(definition)
        case {"enum": list(values)}:
            yield from map(str, values)
        case {"const": value}:
            yield str(value)
        case dict():
            for name in ("anyOf", "items", "prefixItems"):
                yield from choices(schema.get(name))
        case list():
            for part in schema:
                yield from choices(part)


def test_every_field_of_a_model_is_explained_with_the_values_it_offers() -> None:
    explained: dict[str, dict[str, str]] = defaultdict(dict)
    for name, takes, text in FIELD.findall(models_explained()):
        place, _, field = name.rpartition(".")
        explained[place][field] = takes
        assert text.strip(), name
    settings = {"": SCHEMA} | {name: one for name, one in DEFINITIONS.items() if "properties" in one}
    assert len(settings) > 7
    groups = {frozenset(fields): place for place, fields in explained.items()}
    assert set(groups) == {frozenset(one["properties"]) for one in settings.values()}
    for one in settings.values():
        place = groups[frozenset(one["properties"])]
        for field, schema in one["properties"].items():
            values = re.split(r"[^\w.-]+", explained[place][field])
            # Keys of mappings are shown as NAME.
            assert set(choices(schema)) <= set(values) or "{NAME:" in explained[place][field], field
