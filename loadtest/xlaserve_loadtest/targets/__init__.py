"""What requests are sent to: servers over gRPC, servers of the load tester's own, functions in its own process.

Nothing here knows when requests are due.
"""
