"""Other ways to serve the same network on this machine."""

from __future__ import annotations

from typing import Final

SIDE: Final = 224
KERAS: Final = "model.keras"
SAVED: Final = "saved"
"""Files of the network, for xlaserve and for the others."""
