"""Whom an address belongs to, as far as bounds for each are concerned."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Final

IPV6_PREFIX: Final = 64
"""Bits of an IPv6 address that tell one network from another: who has one address of it has them all."""


@lru_cache(maxsize=4096)
def network_of(host: str) -> str:
    """Returns what is counted together with an address: itself, or its network where it is of IPv6."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False))
