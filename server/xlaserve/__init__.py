"""A gRPC inference server for vision models that XLA compiles ahead of traffic."""

import os
from importlib.metadata import version

__version__ = version("xlaserve")

# Connections are read by the thread that grpcio takes events from, not by others that hand each event to it (ADR 17).
# Read once, when grpcio is imported.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
