from __future__ import annotations

from unittest.mock import Mock

from xlaserve.model.version import State, superseded
from xlaserve_proto import vision_pb2 as pb


def test_one_version_of_a_model_serves_at_a_time() -> None:
    old, failed, newcomer = Mock(), Mock(), Mock()
    assert superseded([old, failed, newcomer], newcomer) == [old, failed]
    assert superseded([newcomer], newcomer) == []


def test_every_state_has_its_value_in_the_protocol() -> None:
    assert {"STATE_UNSPECIFIED", *(f"STATE_{state}" for state in State)} == set(pb.Model.State.keys())
