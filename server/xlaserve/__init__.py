"""A gRPC inference server for vision models that XLA compiles ahead of traffic."""

from importlib.metadata import version

__version__ = version("xlaserve")
