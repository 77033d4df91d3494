from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.processes.supervision.messages import MAX_BYTES, Kind, MessageReader, encode

MESSAGES = st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=30)))


@given(MESSAGES, st.integers(1, 40))
def test_messages_are_found_however_they_come(messages: Sequence[tuple[Kind, bytes]], piece: int) -> None:
    sent = b"".join(encode(*message) for message in messages)
    reader = MessageReader()
    found = [message for start in range(0, len(sent), piece) for message in reader.feed(sent[start : start + piece])]
    assert found == messages


@pytest.mark.parametrize(
    ("garbage", "reason"), [(struct.pack("<BI", 1, MAX_BYTES + 1), "at most"), (bytes(5), "not a valid Kind")]
)
def test_garbage_is_refused(garbage: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        list(MessageReader().feed(garbage))
