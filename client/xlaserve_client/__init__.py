"""A small typed Python client of xlaserve."""

from xlaserve_client.aio import AsyncVisionClient
from xlaserve_client.errors import (
    ClientError,
    DeadlineExceeded,
    InvalidReply,
    InvalidRequest,
    ModelFailed,
    ModelNotFound,
    Overloaded,
    ServerError,
    Unavailable,
)
from xlaserve_client.results import (
    Bucket,
    Category,
    Classification,
    ClassifyResult,
    InferResult,
    Model,
    Program,
    Timings,
)
from xlaserve_client.sync import VisionClient

__all__ = [
    "AsyncVisionClient",
    "Bucket",
    "Category",
    "Classification",
    "ClassifyResult",
    "ClientError",
    "DeadlineExceeded",
    "InferResult",
    "InvalidReply",
    "InvalidRequest",
    "Model",
    "ModelFailed",
    "ModelNotFound",
    "Overloaded",
    "Program",
    "ServerError",
    "Timings",
    "Unavailable",
    "VisionClient",
]
