"""A gRPC inference server for vision models that XLA compiles ahead of traffic."""

import os
from importlib.metadata import version

__version__ = version("xlaserve")

# Both are read once, when grpcio is imported.
# Connections are read by the thread that grpcio takes events from, not by others that hand each event to it (ADR 17).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
# gRPC's core writes a line for each call with a header that it can't parse: anybody could fill the log.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
