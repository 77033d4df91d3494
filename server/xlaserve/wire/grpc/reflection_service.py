"""Reflection, as grpcio answers it, with messages that are counted and bounded as all others are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection, reflection_pb2

from xlaserve.errors import InvalidArgument
from xlaserve.wire.grpc.context import Context
from xlaserve.wire.grpc.reader import Parser
from xlaserve.wire.grpc.refused_call import no_message
from xlaserve.wire.grpc.streaming import Messages

MAX_REQUEST_BYTES: Final = 16 * 1024
"""Of a reflection request, whose answer repeats it; it holds a name or two."""


def _as_v1(v1alpha: Any) -> FileDescriptor:
    """Returns the file of grpc.reflection.v1, which differs in its names alone, and which grpcio lacks."""
    file = FileDescriptorProto()
    v1alpha.CopyToProto(file)
    renamed = text_format.Parse(str(file).replace("v1alpha", "v1"), FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(renamed.SerializeToString())
    return descriptor_pool.Default().FindFileByName(renamed.name)


REFLECTIONS: Final[tuple[Any, ...]] = tuple(
    file.services_by_name["ServerReflection"] for file in (_as_v1(reflection_pb2.DESCRIPTOR), reflection_pb2.DESCRIPTOR)
)
"""The versions of reflection: older clients ask for v1alpha alone. Their messages are the same on the wire."""


class Reflection:
    """Describes `services`, which are named in full, and itself, in every version."""

    def __init__(self, services: Iterable[str]) -> None:
        self._servicer: Any = reflection.aio.ReflectionServicer((*services, *(own.full_name for own in REFLECTIONS)))

    async def ServerReflectionInfo(self, messages: Messages, context: Context) -> None:
        """Answers each request of a stream in turn. Raises InvalidArgument for bytes that can't be parsed."""

        async def requests() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
            async for request, size_bytes in messages:
                if request is None:
                    raise no_message()
                yield request
                messages.release(size_bytes)

        async for response in self._servicer.ServerReflectionInfo(requests(), context):
            await messages.write(response.SerializeToString())


def _parse(data: bytes) -> reflection_pb2.ServerReflectionRequest | None:
    if len(data) > MAX_REQUEST_BYTES:
        raise InvalidArgument("message", f"at most {MAX_REQUEST_BYTES} bytes", f"{len(data)} bytes")
    try:
        return reflection_pb2.ServerReflectionRequest.FromString(data)
    except DecodeError:
        return None


PARSERS: Final[dict[str, Parser]] = {"ServerReflectionRequest": _parse}
