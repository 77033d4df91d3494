from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path

import pytest

from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings, Settings
from xlaserve.models import catalog
from xlaserve.models.change_queue import Stop
from xlaserve.models.networks import cached
from xlaserve.models.preparer import PROCESS, Preparer
from xlaserve.programs.tf.device import Device, cpu_name

PATIENCE_S = 60
MODEL = ModelSettings(name="digits", source="builtin:digits", buckets=(BucketSettings(1),))


async def test_nothing_is_built_in_the_server_for_modes_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    device = Device("cpu", cpu_name(), 2, 1)
    model = MODEL.model_copy(update={"modes": (Mode.AUTO,)})
    monkeypatch.setattr("xlaserve.models.sources.digits.load", None)
    async with Preparer(Settings(), device, Stop()).prepare(model) as prepared:
        assert prepared is not None
        (environment,) = prepared.root.rglob("environment.json")
        for name in ("TF_XLA_FLAGS", "XLA_FLAGS"):  # as a server sets them for its device
            monkeypatch.setenv(name, json.loads(environment.read_text())[name])
        program = catalog.load(model, partial(cached.network, prepared, device)).program
        made = [program.compile(mode, Bucket(1, 32, 32)) for mode in model.compiled_modes]
    assert [one.from_cache for one in made] == [True] * 3


def test_the_process_ends_with_the_server(tmp_path: Path) -> None:
    process = subprocess.Popen(PROCESS, stdin=subprocess.PIPE)
    assert process.stdin
    process.stdin.write(Settings(models=(MODEL,), compile_cache=tmp_path).model_dump_json().encode() + b"\n")
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 1
