"""Tensors of a request and its response that lie in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from xlaserve.errors import InvalidArgument, UnsupportedFeature
from xlaserve.wire.grpc.context import Context
from xlaserve.wire.grpc.infer_message import InferMessage, parameter_items
from xlaserve.wire.shared.input_tensors import MAX_SHOWN
from xlaserve.wire.shared.output_tensors import OutputTensor
from xlaserve.wire.shared.parts import Part, wire_bytes
from xlaserve.wire.shared.shared_memory import SharedMemory, Slot, is_local, slot_of


def for_peer(memory: SharedMemory | None, context: Context) -> SharedMemory:
    """Returns the server's shared memory. Raises UnsupportedFeature where the caller may not use it."""
    if memory is None:
        raise UnsupportedFeature("shared memory is turned off (see shared_memory); send the data in the message")
    if not is_local(context.peer()):
        raise UnsupportedFeature("shared memory is for clients on the same machine; send the data in the message")
    return memory


class SharedTensors:
    """The tensors of one request that lie in shared memory. Raises NotFound and InvalidArgument for wrong places."""

    def __init__(self, memory: SharedMemory, message: InferMessage) -> None:
        self._memory = memory
        self._outputs: dict[str, Slot] = {}
        self._kept: list[tuple[str, Slot, Sequence[Part]]] = []
        for output in islice(message.head.fields.outputs, MAX_SHOWN):
            where = f"outputs.{output.name[:64]}"
            if slot := slot_of(parameter_items(output.parameters), where):
                memory.check(slot, where)
                self._outputs[output.name] = slot

    async def fill(self, message: InferMessage) -> InferMessage:
        """Returns the request with its input as raw contents. Raises QueueFull as well."""
        inputs = message.head.fields.inputs
        if len(inputs) != 1:  # will be refused
            return message
        where = f"inputs.{inputs[0].name[:64]}"
        slot = slot_of(parameter_items(inputs[0].parameters), where)
        if slot is None:
            return message
        if message.raw or inputs[0].HasField("contents"):
            raise InvalidArgument(where, "no contents alongside shared memory", "both")
        return message._replace(raw=(memoryview(await self._memory.read(slot, where)),))

    def keep(self, tensor: OutputTensor) -> Slot | None:
        """Keeps an output for `write`, and returns where it will lie; None for one that goes into the response."""
        slot = self._outputs.get(tensor.name)
        if slot is None:
            return None
        self._kept.append((f"outputs.{tensor.name}", slot, tensor.values))
        return slot._replace(size_bytes=wire_bytes(tensor.values))

    async def write(self) -> None:
        """Writes the kept outputs. Raises InvalidArgument where one does not fit."""
        for where, slot, pieces in self._kept:
            await self._memory.write(slot, pieces, where)
