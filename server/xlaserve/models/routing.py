"""Routing of requests that name no version, where several versions share these requests."""

from __future__ import annotations

import random
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

HASH_BITS: Final = 64


class Routing:
    """Divides requests by `shares`, percentages by label or version; "" stands for the default version."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._shares = tuple(shares.items())

    def choose(self, request_id: str) -> str:
        """Returns the label or version that answers: for one id always the same, in every process; without, by chance.

        A share that grows keeps its ids as long as those before it stay as they are.
        """
        left = (_place(request_id) if request_id else random.random()) * 100
        for target, share in self._shares:
            left -= share
            if left < 0:
                return target
        return ""


def _place(request_id: str) -> float:
    """Returns the hash of an id as a number from 0 to 1."""
    digest = blake2b(request_id.encode(errors="surrogatepass"), digest_size=HASH_BITS // 8).digest()
    return float(int.from_bytes(digest) / 2**HASH_BITS)
