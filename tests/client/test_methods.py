"""Each method of the typed API is in both clients, as a command, and with its results where users import them."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import xlaserve_client
from xlaserve_client import AsyncVisionClient, VisionClient, results
from xlaserve_client.cli import parser
from xlaserve_client.vision_calls import METHODS

NAMES = {"ListModels": "models"}
"""In the client, where they are not the method's own."""


@pytest.mark.parametrize("name", [NAMES.get(method, method.lower()) for method in METHODS])
def test_a_method_is_in_both_clients_and_a_command(name: str) -> None:
    both = [inspect.signature(getattr(client, name)).parameters for client in (VisionClient, AsyncVisionClient)]
    assert both[0] == both[1]
    assert parser().parse_args([name] if name == "models" else [name, "digits", "image.png"]).run


def test_every_result_is_exported() -> None:
    defined = {name for name, value in vars(results).items() if dataclasses.is_dataclass(value)}
    assert defined <= set(xlaserve_client.__all__)
