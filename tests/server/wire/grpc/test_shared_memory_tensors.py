from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from xlaserve.admission.message_memory import MessageMemory
from xlaserve.errors import UnsupportedFeature
from xlaserve.wire.grpc.shared_memory_tensors import for_peer
from xlaserve.wire.shared.shared_memory import SharedMemory


def context(peer: str) -> Any:
    return SimpleNamespace(peer=lambda: peer)


def test_shared_memory_is_for_local_clients_where_it_is_turned_on() -> None:
    memory = SharedMemory(1, 1, cast(MessageMemory, None))
    assert for_peer(memory, context("ipv4:127.0.0.1:1234")) is memory
    with pytest.raises(UnsupportedFeature, match="same machine"):
        for_peer(memory, context("ipv4:192.0.2.7:1234"))
    with pytest.raises(UnsupportedFeature, match="turned off"):
        for_peer(None, context("ipv4:127.0.0.1:1234"))
