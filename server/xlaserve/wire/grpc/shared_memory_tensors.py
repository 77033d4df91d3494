"""Tensors of a request and its response that lie in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from xlaserve.errors import InvalidArgument, UnsupportedFeature
from xlaserve.wire.grpc.context import Context
from xlaserve.wire.grpc.infer_message import InferMessage, parameter_items
from xlaserve.wire.shared.input_tensors import MAX_INPUTS, MAX_SHOWN
from xlaserve.wire.shared.output_tensors import OutputTensor
from xlaserve.wire.shared.parts import Part, wire_bytes
from xlaserve.wire.shared.shared_memory import SharedMemory, Slot, is_local, slot_of

_NOTHING: Final = memoryview(b"")


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
        """Returns the request with the inputs in shared memory as raw contents. Raises QueueFull as well.

        As Triton has it, raw contents of a request are those of its other inputs.
        """
        inputs = message.head.fields.inputs[:MAX_INPUTS]
        places = [f"inputs.{tensor.name[:64]}" for tensor in inputs]
        slots = [
            slot_of(parameter_items(tensor.parameters), where) for tensor, where in zip(inputs, places, strict=True)
        ]
        if not any(slots):
            return message
        sent = iter(message.raw)
        raw: list[memoryview] = []
        for tensor, slot, where in zip(inputs, slots, places, strict=True):
            if slot is None:
                raw.append(_NOTHING if tensor.HasField("contents") else next(sent, _NOTHING))
                continue
            if tensor.HasField("contents"):
                raise InvalidArgument(where, "no contents alongside shared memory", "both")
            raw.append(memoryview(await self._memory.read(slot, where)))
        if next(sent, None) is not None:
            raise InvalidArgument(where, "no contents alongside shared memory", "both")
        return message._replace(raw=tuple(raw))

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
