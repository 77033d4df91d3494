"""Targets of requests: servers over gRPC or HTTP, servers that the load tester starts, functions in its own process.

Nothing here knows when requests are due.
"""
