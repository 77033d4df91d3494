from __future__ import annotations

from pathlib import Path

import pytest

from xlaserve.config import Bucket
from xlaserve.inspection import explanation, hlo
from xlaserve.inspection.buffers import Memory
from xlaserve.inspection.explanation import Explanation
from xlaserve.inspection.hlo import Module
from xlaserve.inspection.roofline import Machine

SMALL = (Path(__file__).parent / "small.hlo").read_text()
"""Preprocessing, a convolution, its activation, a product, and a factor that depends on weights alone."""


@pytest.fixture
def module() -> Module:
    return hlo.parse(SMALL)


@pytest.fixture
def explained(module: Module) -> Explanation:
    machine = Machine(flops_per_s=1e9, bytes_per_s=1e9)
    measured_s = {"pixels": 1e-6, "convolution.1": 8e-6, "activation": 2e-6}
    return Explanation(
        model="small",
        source="builtin:<small>",
        bucket=Bucket(2, 4, 4),
        device="cpu",
        versions="TensorFlow 0",
        machine=machine,
        machine_is_measured=True,
        operations_before=12,
        operations_after=module.count(),
        fusions=explanation.fusions(module),
        rows=explanation.rows(module, machine, measured_s),
        memory=Memory(input=96, parameters=1000, temporaries=256, outputs=24),
        compile_s=0.5,
        measured_s=1e-5,
    )
