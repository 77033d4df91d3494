from __future__ import annotations

from unittest.mock import Mock

from xlaserve.model.version import superseded


def test_one_version_of_a_model_serves_at_a_time() -> None:
    old, failed, newcomer = Mock(), Mock(), Mock()
    assert superseded([old, failed, newcomer], newcomer) == [old, failed]
    assert superseded([newcomer], newcomer) == []
