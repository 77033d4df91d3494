from __future__ import annotations

from xlaserve.config import Mode
from xlaserve.telemetry.findings import Findings, Likeness, Pair


def test_findings_add_up() -> None:
    findings = Findings()
    assert (findings.agreement.value, findings.iou.value, findings.largest_difference) == (None, None, None)
    for one in (Likeness(1.0, 0.5, 0.25), Likeness(0.5, None, 0.125), Likeness(0.0, 1.0, None)):
        findings.add(one)
    assert (findings.agreement.value, findings.agreement.count) == (0.5, 3)
    assert (findings.iou.value, findings.largest_difference) == (0.75, 0.25)
    assert Pair(Mode.XLA, "1", Mode.GRAPH) == ("xla", "1", "graph")
