"""What `xlaserve warm` compiles for, without compiling."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest

from xlaserve.commands import warm
from xlaserve.commands.command import Invocation
from xlaserve.config import Settings
from xlaserve.processes import engine


@pytest.mark.parametrize("fronts", ["auto", 2])
def test_it_compiles_as_each_of_several_gpus_has_an_engine_of_its_own(
    monkeypatch: pytest.MonkeyPatch, fronts: object
) -> None:
    """One engine of both would have replicas, which are not kept."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    repository = SimpleNamespace(load_all=AsyncMock(), index=list, serving=lambda: {"digits": True})
    made = Mock(return_value=SimpleNamespace(repository=repository))
    monkeypatch.setattr(engine, "Engine", made)
    model = {"name": "digits", "source": "builtin:digits"}
    settings = Settings.model_validate({"models": [model], "device": "gpu:0,1", "fronts": fronts})
    assert warm.run(Invocation(argparse.Namespace(json=True), settings, lambda: settings)) == 0
    (given, *_), _ = made.call_args
    assert given.device == "gpu:1"
