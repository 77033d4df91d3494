from __future__ import annotations

from tests.server.models.conftest import house, make_house

__all__ = ["house", "make_house"]
