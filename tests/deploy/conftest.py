"""The servers of the integration tests serve here as well."""

from __future__ import annotations

from tests.integration.conftest import connect, start_server

__all__ = ["connect", "start_server"]
