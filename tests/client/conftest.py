# ruff: noqa: N802 (the methods of a gRPC servicer are named by its contract)
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from numpy.typing import NDArray
from tests.client.fleets import CLIENTS, MakeClient, NameService, name_service

from xlaserve_proto import open_inference_pb2 as oip
from xlaserve_proto import open_inference_pb2_grpc as oip_grpc
from xlaserve_proto import vision_pb2 as vision
from xlaserve_proto import vision_pb2_grpc as vision_grpc

Failure = tuple[grpc.StatusCode, str] | tuple[grpc.StatusCode, str, float]
"""The seconds are when to come again."""
CLASSES = 4
StartPuppet = Callable[[], "Puppet"]


def come_again(wait_s: float) -> bytes:
    """Returns details of a status that say when to come again."""
    status, retry = Status(), RetryInfo()
    retry.retry_delay.FromNanoseconds(round(wait_s * 1e9))
    status.details.add().Pack(Status(message="something else"))
    status.details.add().Pack(retry)
    data: bytes = status.SerializeToString()
    return data


def images_of(request: Any) -> list[bytes]:
    """The bytes of each image, encoded or not."""
    if not request.HasField("pixels"):
        return list(request.images)
    count = request.pixels.images
    size = len(request.pixels.rgb) // count
    return [request.pixels.rgb[size * row : size * (row + 1)] for row in range(count)]


def about(request: Any) -> dict[str, Any]:
    """What is in every answer."""
    timings = vision.Timings(decode_s=0.25, total_s=0.5)
    return {"model": request.model, "version": "1", "mode": request.mode or "xla", "timings": timings}


class Puppet(oip_grpc.GRPCInferenceServiceServicer, vision_grpc.VisionServicer):
    """Answers by a simple rule: the class is an encoded image's first byte, or the value of an array's first pixel."""

    def __init__(self) -> None:
        self.target = ""
        self.seen: list[Any] = []
        self.seen_at: list[float] = []
        self.tokens: list[str] = []
        self.cancelled = threading.Event()
        """Set when a call ends that is held."""
        self.kill: Callable[[], object] = lambda: None
        """Stops the server at once; what is under way fails."""
        self.failures: list[Failure] = []
        """Each call takes one from the front and fails with it."""
        self.details: bytes | None = None
        """Of failures that say nothing of when to come again."""
        self.ready_after = 0
        """How many times readiness is denied."""
        self.runs: list[int] = []
        """Run lengths to answer with instead."""
        self.levels: NDArray[np.uint8] | None = None
        """An image to answer with instead."""
        self.declared: list[tuple[str, str, Sequence[int]]] = [
            ("photo", "UINT8", (-1, 4, 5, 3)),
            ("numbers", "FP32", (-1, 2)),
            ("place", "INT32", (-1, 1)),
        ]
        """Inputs in the metadata of any model."""
        self.more_models: list[vision.Model] = []
        """Listed behind the others."""
        self.hold: threading.Event | None = None
        """Where set, calls wait for it."""

    def _enter(self, request: Any, context: grpc.ServicerContext) -> None:
        self.seen.append(request)
        self.seen_at.append(time.monotonic())
        self.tokens += [str(value) for key, value in context.invocation_metadata() if key == "authorization"]
        context.add_callback(self._ended)
        if self.hold is not None:
            self.hold.wait(timeout=20)
        if self.failures:
            code, message, *wait_s = self.failures.pop(0)
            details = come_again(*wait_s) if wait_s else self.details
            if details is not None:
                context.set_trailing_metadata((("grpc-status-details-bin", details),))
            context.abort(code, message)

    def _ended(self) -> None:
        if self.hold is not None and not self.hold.is_set():
            self.cancelled.set()

    def ServerReady(self, request: oip.ServerReadyRequest, context: grpc.ServicerContext) -> oip.ServerReadyResponse:
        self._enter(request, context)
        self.ready_after -= 1
        return oip.ServerReadyResponse(ready=self.ready_after < 0)

    def ModelReady(self, request: oip.ModelReadyRequest, context: grpc.ServicerContext) -> oip.ModelReadyResponse:
        self._enter(request, context)
        return oip.ModelReadyResponse(ready=request.name == "digits")

    def RepositoryModelLoad(
        self, request: oip.RepositoryModelLoadRequest, context: grpc.ServicerContext
    ) -> oip.RepositoryModelLoadResponse:
        self._enter(request, context)
        return oip.RepositoryModelLoadResponse()

    def RepositoryModelUnload(
        self, request: oip.RepositoryModelUnloadRequest, context: grpc.ServicerContext
    ) -> oip.RepositoryModelUnloadResponse:
        self._enter(request, context)
        return oip.RepositoryModelUnloadResponse()

    def ModelMetadata(
        self, request: oip.ModelMetadataRequest, context: grpc.ServicerContext
    ) -> oip.ModelMetadataResponse:
        self._enter(request, context)
        response = oip.ModelMetadataResponse(name=request.name)
        for name, datatype, shape in self.declared:
            response.inputs.add(name=name, datatype=datatype, shape=shape)
        if len(self.declared) == 1:
            response.properties["inputs"] = f"{self.declared[0][0]},image"
        return response

    def ModelInfer(self, request: oip.ModelInferRequest, context: grpc.ServicerContext) -> oip.ModelInferResponse:
        self._enter(request, context)
        response = oip.ModelInferResponse(model_name=request.model_name, model_version="1")
        response.parameters["mode"].string_param = request.parameters["mode"].string_param or "xla"
        for stage in ("decode_s", "queue_s", "gather_s", "execute_s", "total_s"):
            response.parameters[stage].double_param = 0.25
        tensor, raw = request.inputs[0], request.raw_input_contents[0]
        count = tensor.shape[0]
        if tensor.datatype == "BYTES":
            classes = [raw[4]] * count
        else:
            dtype = {"UINT8": "u1", "FP32": "<f4", "INT32": "<i4"}[tensor.datatype]
            classes = [int(row.flat[0]) for row in np.frombuffer(raw, dtype).reshape(tensor.shape)]
        if self.levels is not None:
            response.outputs.add(name="image", datatype="UINT8", shape=[count, *self.levels.shape])
            response.raw_output_contents.append(self.levels.tobytes() * count)
            return response
        response.outputs.add(name="scores", datatype="FP32", shape=[count, CLASSES])
        response.raw_output_contents.append(np.eye(CLASSES, dtype="<f4")[classes].tobytes())
        return response

    def Classify(self, request: vision.ClassifyRequest, context: grpc.ServicerContext) -> vision.ClassifyResponse:
        self._enter(request, context)
        return vision.ClassifyResponse(
            classifications=[
                vision.Classification(
                    categories=[
                        vision.Category(index=image[0] + rank, label=f"class {image[0] + rank}", score=1 / (rank + 1))
                        for rank in range(request.top_k)
                    ]
                )
                for image in images_of(request)
            ],
            **about(request),
        )

    def Detect(self, request: vision.DetectRequest, context: grpc.ServicerContext) -> vision.DetectResponse:
        self._enter(request, context)
        return vision.DetectResponse(
            results=[
                vision.Detections(
                    detections=[
                        vision.Detection(
                            index=image[0],
                            label=f"class {image[0]}",
                            score=0.5,
                            box=vision.Box(x_min=1, y_min=2, x_max=4, y_max=8),
                        )
                    ]
                    * (image[0] > 0),
                    height=10,
                    width=20,
                )
                for image in images_of(request)
            ],
            **about(request),
        )

    def Segment(self, request: vision.SegmentRequest, context: grpc.ServicerContext) -> vision.SegmentResponse:
        self._enter(request, context)
        return vision.SegmentResponse(
            maps=[
                vision.ClassMap(
                    height=2, width=3, run_lengths=np.array(self.runs or [0, 3, image[0], 3], "<u4").tobytes()
                )
                for image in images_of(request)
            ],
            labels=["nothing", "cat", "dog"],
            **about(request),
        )

    def Embed(self, request: vision.EmbedRequest, context: grpc.ServicerContext) -> vision.EmbedResponse:
        self._enter(request, context)
        vectors = [vision.Embedding(values=[0.5] * 5 + [image[0]]) for image in images_of(request)]
        return vision.EmbedResponse(embeddings=vectors, **about(request))

    def Transcribe(self, request: vision.TranscribeRequest, context: grpc.ServicerContext) -> vision.TranscribeResponse:
        self._enter(request, context)
        found = [
            vision.Transcription(
                text=f"class {image[0]}",
                score=0.5,
                categories=[vision.Category(index=image[0], label=f"class {image[0]}", score=0.75)],
            )
            for image in images_of(request)
        ]
        return vision.TranscribeResponse(transcriptions=found, **about(request))

    def Locate(self, request: vision.LocateRequest, context: grpc.ServicerContext) -> vision.LocateResponse:
        self._enter(request, context)
        results = [
            vision.Keypoints(
                keypoints=[
                    vision.Keypoint(index=image[0], label=f"class {image[0]}", score=0.5, x=1, y=2),
                    vision.Keypoint(index=9, label="9", x=-1, y=4),
                ],
                height=10,
                width=20,
            )
            for image in images_of(request)
        ]
        return vision.LocateResponse(results=results, **about(request))

    def ListModels(self, request: vision.ListModelsRequest, context: grpc.ServicerContext) -> vision.ListModelsResponse:
        self._enter(request, context)
        bucket = vision.Bucket(batch=8, height=32, width=32)
        return vision.ListModelsResponse(
            models=[
                vision.Model(
                    name="digits",
                    version="1",
                    state=vision.Model.STATE_READY,
                    source="builtin:digits",
                    weights="built in",
                    task="classification",
                    modes=["xla", "graph"],
                    default_mode="xla",
                    buckets=[bucket],
                    programs=[vision.Program(mode="xla", bucket=bucket, trace_s=0.1, compile_s=0.2, run_s=0.01)],
                    programs_total=1,
                    compile_s=0.3,
                    precision="float32",
                    warnings=["it is served in batches of one"],
                ),
                vision.Model(name="broken", version="2", state=vision.Model.STATE_FAILED, reason="no such file"),
                *self.more_models,
            ]
        )


@contextmanager
def running_puppet(credentials: grpc.ServerCredentials | None = None) -> Iterator[Puppet]:
    servicer = Puppet()  # type: ignore[abstract]  # gRPC answers UNIMPLEMENTED for the other methods
    with ThreadPoolExecutor(16) as pool:
        server = grpc.server(pool, options=[("grpc.max_receive_message_length", -1)])
        oip_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
        vision_grpc.add_VisionServicer_to_server(servicer, server)
        address = "127.0.0.1:0"
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
        servicer.target = f"127.0.0.1:{port}"
        servicer.kill = lambda: server.stop(grace=None)
        server.start()
        yield servicer
        if servicer.hold is not None:
            servicer.hold.set()
        server.stop(grace=None).wait()


@pytest.fixture
def puppet() -> Iterator[Puppet]:
    with running_puppet() as puppet:
        yield puppet


@pytest.fixture
def closed_port() -> Iterator[str]:
    """A target that refuses connections: bound, and not listening."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(params=CLIENTS)
def make_client(request: pytest.FixtureRequest) -> MakeClient:
    return CLIENTS[request.param]


@pytest.fixture
def service() -> Iterator[NameService]:
    with name_service() as service:
        yield service


@pytest.fixture
def start_puppet() -> Iterator[StartPuppet]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(running_puppet())


@pytest.fixture
def puppets(start_puppet: StartPuppet, service: NameService) -> list[Puppet]:
    """Three servers, which are listed."""
    puppets = [start_puppet() for _ in range(3)]
    service.publish(*(puppet.target for puppet in puppets))
    return puppets
