"""A load tester that says what XLA is worth."""

import os

# gRPC reads it when it is imported. In a process that uses gRPC, what uvloop forks would else abort now and then before
# it runs (https://github.com/grpc/grpc/pull/43157), and gRPC writes a line into the terminal for each that does not.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
