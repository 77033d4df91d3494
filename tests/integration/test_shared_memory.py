"""Triton's system shared memory extension over a real socket, with files in /dev/shm."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.integration.conftest import DIGITS, DIGITS_SIZE, MakeRequest, Server, StartServer

from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto.open_inference_pb2_grpc import GRPCInferenceServiceStub

IMAGES = 3
PIXEL_BYTES = IMAGES * DIGITS_SIZE[0] * DIGITS_SIZE[1] * 3
SCORE_BYTES = IMAGES * 10 * 4


@pytest.fixture(scope="module")
def sharing(start_module_server: StartServer) -> Server:
    return start_module_server({"models": [{**DIGITS, "modes": ["graph"]}], "shared_memory": True})


@pytest.fixture
def stub(sharing: Server) -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(sharing.grpc) as channel:
        stub = GRPCInferenceServiceStub(channel)
        yield stub
        stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())


@pytest.fixture
def file() -> Iterator[Path]:
    """A file of /dev/shm for pixels and then scores."""
    file = Path("/dev/shm") / f"xlaserve-test-{os.getpid()}"
    file.write_bytes(np.random.default_rng(0).integers(0, 256, PIXEL_BYTES, np.uint8).tobytes() + bytes(SCORE_BYTES))
    yield file
    file.unlink(missing_ok=True)


def register(stub: GRPCInferenceServiceStub, file: Path) -> None:
    whole = pb.SystemSharedMemoryRegisterRequest(name="both", key=f"/{file.name}", byte_size=PIXEL_BYTES + SCORE_BYTES)
    stub.SystemSharedMemoryRegister(whole)
    end = pb.SystemSharedMemoryRegisterRequest(
        name="end", key=f"/{file.name}", offset=PIXEL_BYTES, byte_size=SCORE_BYTES
    )
    stub.SystemSharedMemoryRegister(end)


def shared_request() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="digits")
    parameters = request.inputs.add(name="pixels", datatype="UINT8", shape=[IMAGES, *DIGITS_SIZE, 3]).parameters
    parameters["shared_memory_region"].string_param = "both"
    parameters["shared_memory_byte_size"].int64_param = PIXEL_BYTES
    return request


def scores_into(request: pb.ModelInferRequest, region: str, size_bytes: int = SCORE_BYTES, offset: int = 0) -> None:
    parameters = request.outputs.add(name="scores").parameters
    parameters["shared_memory_region"].string_param = region
    parameters["shared_memory_byte_size"].int64_param = size_bytes
    parameters["shared_memory_offset"].int64_param = offset


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), str(caught.value.details())


def test_pixels_and_scores_go_through_shared_memory(stub: GRPCInferenceServiceStub, file: Path) -> None:
    sent = pb.ModelInferRequest(model_name="digits", raw_input_contents=[file.read_bytes()[:PIXEL_BYTES]])
    sent.inputs.add(name="pixels", datatype="UINT8", shape=[IMAGES, *DIGITS_SIZE, 3])
    expected = stub.ModelInfer(sent).raw_output_contents[0]
    register(stub, file)
    # Only the input, only the output, both; the same place by its offset in either region.
    assert stub.ModelInfer(shared_request()).raw_output_contents[0] == expected
    into_end, into_both = shared_request(), shared_request()
    scores_into(sent, "end")
    scores_into(into_end, "end")
    scores_into(into_both, "both", offset=PIXEL_BYTES)
    for request in (sent, into_end, into_both):
        file.write_bytes(file.read_bytes()[:PIXEL_BYTES] + bytes(SCORE_BYTES))
        response = stub.ModelInfer(request)
        assert list(response.raw_output_contents) == [b""]
        (output,) = response.outputs
        assert (output.name, output.datatype, list(output.shape)) == ("scores", "FP32", [IMAGES, 10])
        assert output.parameters["shared_memory_byte_size"].int64_param == SCORE_BYTES
        assert not output.HasField("contents")
        assert file.read_bytes()[PIXEL_BYTES:] == expected
    (streamed,) = stub.ModelStreamInfer(iter([into_end]))
    assert not streamed.error_message
    assert list(streamed.infer_response.raw_output_contents) == [b""]


def test_images_and_classes_go_through_shared_memory(
    stub: GRPCInferenceServiceStub, file: Path, valid: MakeRequest
) -> None:
    encoded = valid("image")
    data = encoded.raw_input_contents[0]
    file.write_bytes(data + bytes(100))
    stub.SystemSharedMemoryRegister(
        pb.SystemSharedMemoryRegisterRequest(name="r", key=f"/{file.name}", byte_size=len(data) + 100)
    )
    encoded.outputs.add(name="scores").parameters["classification"].int64_param = 2
    expected = stub.ModelInfer(encoded).raw_output_contents[0]
    del encoded.raw_input_contents[:]
    for parameters, size_bytes, offset in (
        (encoded.inputs[0].parameters, len(data), 0),
        (encoded.outputs[0].parameters, 100, len(data)),
    ):
        parameters["shared_memory_region"].string_param = "r"
        parameters["shared_memory_byte_size"].int64_param = size_bytes
        parameters["shared_memory_offset"].int64_param = offset
    response = stub.ModelInfer(encoded)
    assert list(response.outputs[0].shape) == [1, 2]
    written = response.outputs[0].parameters["shared_memory_byte_size"].int64_param
    assert file.read_bytes()[len(data) :][:written] == expected


def test_regions_are_shown(stub: GRPCInferenceServiceStub, file: Path) -> None:
    register(stub, file)
    assert "system_shared_memory" in stub.ServerMetadata(pb.ServerMetadataRequest()).extensions
    regions = stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest()).regions
    assert {name: (one.name, one.key, one.offset, one.byte_size) for name, one in regions.items()} == {
        "both": ("both", f"/{file.name}", 0, PIXEL_BYTES + SCORE_BYTES),
        "end": ("end", f"/{file.name}", PIXEL_BYTES, SCORE_BYTES),
    }
    unknown = pb.SystemSharedMemoryStatusRequest(name="nope")
    assert refused(lambda: stub.SystemSharedMemoryStatus(unknown))[0] is grpc.StatusCode.NOT_FOUND


def test_a_client_that_lies_or_changes_its_file_gets_an_error_alone(
    stub: GRPCInferenceServiceStub, file: Path, valid: MakeRequest
) -> None:
    register(stub, file)
    both, too_small, too_large, unknown = (shared_request() for _ in range(4))
    both.raw_input_contents.append(bytes(PIXEL_BYTES))
    scores_into(too_small, "end", SCORE_BYTES - 1)
    scores_into(too_large, "end", SCORE_BYTES + 1)
    unknown.inputs[0].parameters["shared_memory_region"].string_param = "nope"
    wrong = {"both": both, "too small": too_small, "too large": too_large, "unknown": unknown}
    codes = {name: refused(partial(stub.ModelInfer, request))[0].name for name, request in wrong.items()}
    assert codes == {
        "both": "INVALID_ARGUMENT",
        "too small": "INVALID_ARGUMENT",
        "too large": "INVALID_ARGUMENT",
        "unknown": "NOT_FOUND",
    }
    os.truncate(file, 10)
    code, message = refused(lambda: stub.ModelInfer(shared_request()))
    assert (code, "got 10 bytes" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    file.unlink()
    assert refused(lambda: stub.ModelInfer(shared_request()))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert stub.ModelInfer(valid()).outputs


def test_files_elsewhere_can_not_be_registered(stub: GRPCInferenceServiceStub, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(8))
    for key in (f"/../..{tmp_path}/secret", f"{tmp_path}/secret", ".."):
        request = pb.SystemSharedMemoryRegisterRequest(name="r", key=key, byte_size=4)
        assert refused(partial(stub.SystemSharedMemoryRegister, request))[0] is grpc.StatusCode.INVALID_ARGUMENT
