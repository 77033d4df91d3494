"""The Open Inference Protocol over a real socket: every method, every way to send a tensor."""

from __future__ import annotations

import io
import queue
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from tests.integration.conftest import MakeRequest, Server
from tests.required import required

from xlaserve import __version__
from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto.open_inference_pb2_grpc import GRPCInferenceServiceStub

STAGES = {"decode_s", "queue_s", "gather_s", "execute_s", "encode_s", "total_s"}
DTYPES = {"UINT8": ("uint_contents", "u1"), "INT32": ("int_contents", "<i4"), "FP32": ("fp32_contents", "<f4")}


def pixels(png: bytes) -> np.ndarray:
    """The image `[32, 32, 3]` as the server's decoder fits it to the model."""
    image = Image.open(io.BytesIO(png)).resize((32, 32), Image.Resampling.BILINEAR)
    return np.asarray(image.convert("RGB"))


def scores(response: pb.ModelInferResponse) -> np.ndarray:
    (output,) = response.outputs
    assert (output.name, output.datatype) == ("scores", "FP32")
    if response.raw_output_contents:
        assert not output.HasField("contents")
        return np.frombuffer(response.raw_output_contents[0], "<f4").reshape(output.shape)
    return np.array(output.contents.fp32_contents, np.float32).reshape(output.shape)


def elements(response: pb.ModelInferResponse) -> list[str]:
    """The elements of a BYTES output."""
    (output,) = response.outputs
    assert output.datatype == "BYTES"
    if not response.raw_output_contents:
        return [element.decode() for element in output.contents.bytes_contents]
    data, found = response.raw_output_contents[0], []
    while data:
        size = struct.unpack_from("<I", data)[0]
        found.append(data[4 : 4 + size].decode())
        data = data[4 + size :]
    return found


def digits_request(images: np.ndarray, datatype: str = "UINT8", raw: bool = True) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="digits")
    tensor = request.inputs.add(name="pixels", datatype=datatype, shape=images.shape)
    field, dtype = DTYPES[datatype]
    if raw:
        request.raw_input_contents.append(images.astype(dtype).tobytes())
    else:
        getattr(tensor.contents, field).extend(images.astype(dtype).ravel().tolist())
    return request


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), required(caught.value.details())


# Inference.


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("datatype", DTYPES)
def test_pixels_of_every_type_give_the_right_digits_in_the_form_they_came(
    oip: GRPCInferenceServiceStub, scans: dict[str, bytes], datatype: str, raw: bool
) -> None:
    images = np.stack([pixels(png) for png in scans.values()])
    response = oip.ModelInfer(digits_request(images, datatype, raw))
    assert bool(response.raw_output_contents) is raw
    assert scores(response).shape == (10, 10)
    assert [str(row.argmax()) for row in scores(response)] == list(scans)


@pytest.mark.parametrize("shape", [[10], [10, 1]])
@pytest.mark.parametrize("raw", [True, False])
def test_encoded_images_give_the_same_answer_as_their_pixels(
    oip: GRPCInferenceServiceStub, scans: dict[str, bytes], raw: bool, shape: list[int]
) -> None:
    request = pb.ModelInferRequest(model_name="digits")
    tensor = request.inputs.add(name="image", datatype="BYTES", shape=shape)
    if raw:
        request.raw_input_contents.append(b"".join(struct.pack("<I", len(png)) + png for png in scans.values()))
    else:
        tensor.contents.bytes_contents.extend(scans.values())
    response = oip.ModelInfer(request)
    assert bool(response.raw_output_contents) is raw
    images = np.stack([pixels(png) for png in scans.values()])
    np.testing.assert_allclose(scores(response), scores(oip.ModelInfer(digits_request(images))), atol=1e-5)


def test_an_answer_has_its_id_version_mode_and_stage_times(oip: GRPCInferenceServiceStub, valid: MakeRequest) -> None:
    request = valid("image")
    request.id = "my id, ünïcode and all"
    response = oip.ModelInfer(request)
    assert (response.model_name, response.model_version, response.id) == ("digits", "1", request.id)
    assert response.parameters["mode"].string_param == "xla"
    times = {key: value.double_param for key, value in response.parameters.items() if key != "mode"}
    assert set(times) == STAGES
    assert all(seconds >= 0 for seconds in times.values())
    assert times["decode_s"] > 0
    assert sum(times.values()) - times["total_s"] <= times["total_s"] < 30


def test_a_version_may_be_named(oip: GRPCInferenceServiceStub, valid: MakeRequest) -> None:
    request = valid()
    request.model_version = "1"
    assert oip.ModelInfer(request).model_version == "1"


@pytest.mark.parametrize("mode", ["xla", "graph", "eager"])
def test_a_request_chooses_its_mode(oip: GRPCInferenceServiceStub, scans: dict[str, bytes], mode: str) -> None:
    images = np.stack([pixels(png) for png in scans.values()])
    request = digits_request(images)
    default = scores(oip.ModelInfer(request))
    request.parameters["mode"].string_param = mode
    response = oip.ModelInfer(request)
    assert response.parameters["mode"].string_param == mode
    np.testing.assert_allclose(scores(response), default, atol=1e-4)


def test_a_request_larger_than_the_largest_bucket_is_split_and_joined(
    oip: GRPCInferenceServiceStub, scans: dict[str, bytes]
) -> None:
    images = np.stack([pixels(png) for png in scans.values()] * 3)
    answer = scores(oip.ModelInfer(digits_request(images)))
    assert [str(row.argmax()) for row in answer] == list(scans) * 3


@pytest.mark.parametrize("raw", [True, False])
def test_classification_answers_score_index_and_label(
    oip: GRPCInferenceServiceStub, valid: MakeRequest, raw: bool
) -> None:
    request = valid("image", n=2, raw=raw)
    request.outputs.add(name="scores").parameters["classification"].int64_param = 3
    response = oip.ModelInfer(request)
    assert list(response.outputs[0].shape) == [2, 3]
    assert bool(response.raw_output_contents) is raw
    rows = [element.split(":") for element in elements(response)]
    assert len(rows) == 6
    assert rows[0][1:] == ["3", "3"]
    assert float(rows[0][0]) > float(rows[1][0]) >= float(rows[2][0]) >= 0
    assert rows[:3] == rows[3:]


def test_more_classes_than_there_are_gives_all_of_them(oip: GRPCInferenceServiceStub, valid: MakeRequest) -> None:
    request = valid("image")
    request.outputs.add(name="scores").parameters["classification"].int64_param = 2**62
    assert sorted(element.split(":")[1] for element in elements(oip.ModelInfer(request))) == list("0123456789")


def test_an_output_may_be_named(oip: GRPCInferenceServiceStub, valid: MakeRequest) -> None:
    request = valid()
    request.outputs.add(name="scores")
    assert scores(oip.ModelInfer(request)).shape == (1, 10)


def test_a_request_that_may_wait_no_longer_is_refused_alone(oip: GRPCInferenceServiceStub, valid: MakeRequest) -> None:
    late, fine = valid(), valid()
    late.parameters["timeout"].int64_param = 1
    fine.parameters["timeout"].int64_param = 60_000_000
    code, message = refused(lambda: oip.ModelInfer(late))
    assert (code, message.startswith("model digits: ")) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)
    assert oip.ModelInfer(fine).outputs


def test_priorities_are_those_of_triton(oip: GRPCInferenceServiceStub, valid: MakeRequest) -> None:
    batching = oip.ModelConfig(pb.ModelConfigRequest(name="digits")).config.dynamic_batching
    assert (batching.priority_levels, batching.default_priority_level) == (3, 2)
    for priority in range(batching.priority_levels + 1):
        for kind in ("int64_param", "uint64_param"):
            request = valid()
            setattr(request.parameters["priority"], kind, priority)
            assert oip.ModelInfer(request).outputs
    for wrong in (pb.InferParameter(uint64_param=4), pb.InferParameter(string_param="high")):
        request = valid()
        request.parameters["priority"].CopyFrom(wrong)
        code, message = refused(partial(oip.ModelInfer, request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "parameters.priority" in message


# What is not spoken here.


def parameter(key: str, **value: Any) -> Callable[[pb.ModelInferRequest], None]:
    return lambda request: request.parameters[key].MergeFrom(pb.InferParameter(**value))


def in_shared_memory(request: pb.ModelInferRequest) -> None:
    del request.raw_input_contents[:]
    request.inputs[0].parameters["shared_memory_region"].string_param = "region"


def output_to_shared_memory(request: pb.ModelInferRequest) -> None:
    request.outputs.add(name="scores").parameters["shared_memory_region"].string_param = "region"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (parameter("sequence_id", int64_param=7), "sequence_id"),
        (parameter("sequence_start", bool_param=True), "sequence_start"),
        (in_shared_memory, "shared memory"),
        (output_to_shared_memory, "shared memory"),
    ],
)
def test_an_unsupported_extension_is_refused_by_name(
    oip: GRPCInferenceServiceStub, valid: MakeRequest, change: Callable[[pb.ModelInferRequest], None], says: str
) -> None:
    request = valid()
    change(request)
    code, message = refused(lambda: oip.ModelInfer(request))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert says in message


def test_parameters_and_headers_of_other_servers_are_ignored(oip: GRPCInferenceServiceStub, valid: MakeRequest) -> None:
    request = valid()
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    request.parameters["my_own"].string_param = "anything"
    request.inputs[0].parameters["binary_data_size"].int64_param = 7
    request.outputs.add(name="scores").parameters["binary_data"].bool_param = True
    assert scores(oip.ModelInfer(request, metadata=(("x-request-id", "7"), ("authorization", "none")))).shape == (1, 10)


def test_trace_and_log_settings_are_shown_and_can_not_be_changed(oip: GRPCInferenceServiceStub) -> None:
    trace = oip.TraceSetting(pb.TraceSettingRequest(model_name="digits"))
    assert {key: list(one.value) for key, one in trace.settings.items()} == {
        "trace_level": ["OFF"],
        "trace_rate": ["1000"],
        "trace_count": ["-1"],
        "trace_mode": ["triton"],
        "trace_file": [""],
        "log_frequency": ["0"],
    }
    logs = oip.LogSettings(pb.LogSettingsRequest())
    assert {key: getattr(one, required(one.WhichOneof("parameter_choice"))) for key, one in logs.settings.items()} == {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 1,
        "log_format": "default",
    }
    kept, reset, changed = (pb.TraceSettingRequest() for _ in range(3))
    kept.settings["trace_level"].value.append("OFF")
    reset.settings["trace_rate"].SetInParent()
    changed.settings["trace_level"].value.append("TIMESTAMPS")
    for request in (kept, reset):
        assert oip.TraceSetting(request) == oip.TraceSetting(pb.TraceSettingRequest())
    louder = pb.LogSettingsRequest()
    louder.settings["log_verbose_level"].uint32_param = 2
    for call in (lambda: oip.TraceSetting(changed), lambda: oip.LogSettings(louder)):
        assert refused(call)[0] is grpc.StatusCode.UNIMPLEMENTED
    unknown = pb.TraceSettingRequest(model_name="nope")
    assert refused(lambda: oip.TraceSetting(unknown))[0] is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("method", ["SystemSharedMemoryStatus", "CudaSharedMemoryRegister", "Nonsense"])
def test_a_method_of_an_extension_that_is_not_spoken_is_unimplemented(channel: grpc.Channel, method: str) -> None:
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
    assert refused(lambda: call(b""))[0] is grpc.StatusCode.UNIMPLEMENTED


# Streams.


def test_a_stream_is_answered_in_its_order(oip: GRPCInferenceServiceStub, scans: dict[str, bytes]) -> None:
    def requests() -> Iterator[pb.ModelInferRequest]:
        for number in range(100):
            digit = str(number % 10)
            # Of different lengths, so that later ones could overtake.
            request = digits_request(np.stack([pixels(scans[digit])] * (number % 7 + 1)))
            request.id = f"{number}"
            yield request

    responses = list(oip.ModelStreamInfer(requests()))
    assert [response.error_message for response in responses] == [""] * 100
    assert [response.infer_response.id for response in responses] == [str(number) for number in range(100)]
    assert all(one.infer_response.parameters["triton_final_response"].bool_param for one in responses)
    for number, response in enumerate(responses):
        assert (scores(response.infer_response).argmax(axis=1) == number % 10).all()


def test_an_error_in_a_stream_names_its_request_and_the_stream_goes_on(
    oip: GRPCInferenceServiceStub, valid: MakeRequest
) -> None:
    good, bad, unknown, last = valid(), valid(), valid(), valid("image")
    bad.inputs[0].shape[0] = 0
    unknown.model_name = "nope"
    for request, name in ((good, "good"), (bad, "bad"), (unknown, "unknown"), (last, "last")):
        request.id = name
    responses = list(oip.ModelStreamInfer(iter([good, bad, unknown, last])))
    assert [response.infer_response.id for response in responses] == ["good", "bad", "unknown", "last"]
    assert all(one.infer_response.parameters["triton_final_response"].bool_param for one in responses)
    errors = [response.error_message for response in responses]
    assert (errors[0], errors[3]) == ("", "")
    assert errors[1].startswith("INVALID_ARGUMENT: pixels.shape: expected ")
    assert errors[2].startswith("NOT_FOUND: no model 'nope'")


def test_bytes_that_are_no_request_do_not_end_a_stream(channel: grpc.Channel, valid: MakeRequest) -> None:
    stream: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer"
    )
    messages = [b"\xff\xff\xff", valid().SerializeToString()]
    first, second = map(pb.ModelStreamInferResponse.FromString, stream(iter(messages)))
    assert first.error_message.startswith("INVALID_ARGUMENT: message: ")
    assert second.infer_response.outputs


def test_a_stream_answers_before_it_ends(oip: GRPCInferenceServiceStub, valid: MakeRequest) -> None:
    to_send: queue.SimpleQueue[pb.ModelInferRequest | None] = queue.SimpleQueue()
    stream = oip.ModelStreamInfer(iter(to_send.get, None))
    for number in range(3):
        request = valid()
        request.id = str(number)
        to_send.put(request)
        assert next(stream).infer_response.id == str(number)
    to_send.put(None)
    assert list(stream) == []


def test_an_empty_stream_ends(oip: GRPCInferenceServiceStub) -> None:
    assert list(oip.ModelStreamInfer(iter([]))) == []


def test_a_cancelled_stream_leaves_nothing_behind(
    oip: GRPCInferenceServiceStub, valid: MakeRequest, server: Server
) -> None:
    endless = oip.ModelStreamInfer(iter(valid, None))
    assert next(endless).infer_response.outputs
    endless.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        list(endless)
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    server.wait_for(lambda: server.metric("xlaserve_in_flight_requests") == 0, "requests stayed under way")
    server.wait_for(lambda: server.metric("xlaserve_in_flight_images", model="digits") == 0, "images stayed under way")
    assert "Traceback" not in server.stderr.partition("ready: digits, noop")[2]
    assert oip.ModelInfer(valid()).outputs


def test_a_stream_ends_at_its_deadline(oip: GRPCInferenceServiceStub, valid: MakeRequest) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(oip.ModelStreamInfer(iter(valid, None), timeout=0.2))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


# Metadata.


def test_the_server_says_what_it_is(oip: GRPCInferenceServiceStub) -> None:
    assert oip.ServerLive(pb.ServerLiveRequest()).live
    assert oip.ServerReady(pb.ServerReadyRequest()).ready
    metadata = oip.ServerMetadata(pb.ServerMetadataRequest())
    assert (metadata.name, metadata.version) == ("xlaserve", __version__)
    assert {"classification", "model_repository", "statistics"} <= set(metadata.extensions)


def test_readiness_is_told_for_each_model(oip: GRPCInferenceServiceStub) -> None:
    ready = {name: oip.ModelReady(pb.ModelReadyRequest(name=name)).ready for name in ("digits", "noop", "broken")}
    assert ready == {"digits": True, "noop": True, "broken": False}
    assert oip.ModelReady(pb.ModelReadyRequest(name="digits", version="1")).ready
    for unknown in (pb.ModelReadyRequest(name="digits", version="2"), pb.ModelReadyRequest(name="nope")):
        assert not oip.ModelReady(unknown).ready


def test_a_model_describes_itself(oip: GRPCInferenceServiceStub) -> None:
    metadata = oip.ModelMetadata(pb.ModelMetadataRequest(name="digits"))
    assert (metadata.name, list(metadata.versions), metadata.platform) == ("digits", ["1"], "tensorflow_xla")
    tensors = {t.name: (t.datatype, list(t.shape)) for t in (*metadata.inputs, *metadata.outputs)}
    assert tensors == {
        "pixels": ("UINT8", [-1, 32, 32, 3]),
        "scores": ("FP32", [-1, 10]),
    }
    assert metadata.properties == {
        "source": "builtin:digits",
        "lowerings": "stem 1",
        "weights": "built in",
        "task": "classification",
        "task_reason": "scores: float32 [None, 10] may be scores of 10 classes",
        "inputs": "pixels,image",
        "pixels": "[n, 32, 32, 3] rgb",
        "fit": "resize",
        "resize": "pillow bilinear, antialiased",
        "decode": "exact",
        "pixel_range": "0..255",
        "precision": "float32",
        "modes": "xla,graph,eager",
        "default_mode": "xla",
        "buckets": "1x32x32,2x32x32,4x32x32,8x32x32",
        "max_message_bytes": str(16 * 1024 * 1024),
    }


def test_a_model_shows_its_configuration_in_tritons_terms(oip: GRPCInferenceServiceStub) -> None:
    config = oip.ModelConfig(pb.ModelConfigRequest(name="digits")).config
    assert (config.name, config.platform, config.backend) == ("digits", "tensorflow_xla", "tensorflow")
    assert config.max_batch_size == 8
    assert [(i.name, i.data_type, list(i.dims), i.optional) for i in config.input] == [
        ("pixels", pb.TYPE_UINT8, [32, 32, 3], False),
    ]
    assert [(o.name, o.data_type, list(o.dims)) for o in config.output] == [("scores", pb.TYPE_FP32, [10])]
    assert list(config.dynamic_batching.preferred_batch_size) == [1, 2, 4, 8]
    assert config.instance_group[0].count >= 1
    assert config.parameters["default_mode"].string_value == "xla"


def test_a_model_that_failed_has_no_metadata_but_a_reason(oip: GRPCInferenceServiceStub) -> None:
    for call in (
        lambda: oip.ModelMetadata(pb.ModelMetadataRequest(name="broken")),
        lambda: oip.ModelConfig(pb.ModelConfigRequest(name="broken")),
        lambda: oip.ModelInfer(pb.ModelInferRequest(model_name="broken")),
    ):
        code, message = refused(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert message.startswith("model broken failed: source: expected ")
        assert "/" not in message


# The repository.


def test_the_index_tells_the_state_of_every_model_and_why_one_failed(oip: GRPCInferenceServiceStub) -> None:
    models = {model.name: model for model in oip.RepositoryIndex(pb.RepositoryIndexRequest()).models}
    assert list(models) == ["digits", "noop", "broken"]
    assert {name: (m.version, m.state) for name, m in models.items()} == {
        "digits": ("1", "READY"),
        "noop": ("1", "READY"),
        "broken": ("1", "FAILED"),
    }
    assert models["digits"].reason == ""
    assert "broken.keras, which does not exist" in models["broken"].reason
    assert "secret" not in models["broken"].reason


def test_the_index_can_be_limited_to_what_is_ready(oip: GRPCInferenceServiceStub) -> None:
    models = oip.RepositoryIndex(pb.RepositoryIndexRequest(ready=True)).models
    assert [model.name for model in models] == ["digits", "noop"]


def test_a_model_is_unloaded_and_loaded_again(oip: GRPCInferenceServiceStub) -> None:
    request = pb.ModelInferRequest(model_name="noop")
    request.inputs.add(name="pixels", datatype="UINT8", shape=[1, 224, 224, 3])
    request.raw_input_contents.append(bytes(224 * 224 * 3))
    assert oip.ModelInfer(request).outputs
    unload = pb.RepositoryModelUnloadRequest(model_name="noop")
    unload.parameters["unload_dependents"].bool_param = False
    oip.RepositoryModelUnload(unload)
    try:
        (noop,) = (m for m in oip.RepositoryIndex(pb.RepositoryIndexRequest()).models if m.name == "noop")
        assert (noop.state, noop.reason) == ("UNLOADED", "")
        assert not oip.ModelReady(pb.ModelReadyRequest(name="noop")).ready
        assert oip.ServerReady(pb.ServerReadyRequest()).ready
        code, message = refused(lambda: oip.ModelInfer(request))
        assert (code, message) == (grpc.StatusCode.UNAVAILABLE, "model noop is unloaded")
    finally:
        oip.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="noop"))
    assert oip.ModelReady(pb.ModelReadyRequest(name="noop")).ready
    assert oip.ModelInfer(request).outputs


def test_a_model_that_fails_again_says_so_and_stays_failed(oip: GRPCInferenceServiceStub) -> None:
    code, message = refused(lambda: oip.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="broken")))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert message.startswith("model broken failed: source: expected ")


def test_what_the_repository_does_not_support_is_refused(oip: GRPCInferenceServiceStub) -> None:
    configured = pb.RepositoryModelLoadRequest(model_name="noop")
    configured.parameters["config"].string_param = "{}"
    assert refused(lambda: oip.RepositoryModelLoad(configured))[0] is grpc.StatusCode.UNIMPLEMENTED
    unload = pb.RepositoryModelUnloadRequest(model_name="noop")
    unload.parameters["nonsense"].bool_param = True
    assert refused(lambda: oip.RepositoryModelUnload(unload))[0] is grpc.StatusCode.INVALID_ARGUMENT
    for call in (
        lambda: oip.RepositoryIndex(pb.RepositoryIndexRequest(repository_name="other")),
        lambda: oip.RepositoryModelLoad(pb.RepositoryModelLoadRequest(repository_name="other", model_name="noop")),
        lambda: oip.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(repository_name="o", model_name="noop")),
    ):
        assert refused(call)[0] is grpc.StatusCode.INVALID_ARGUMENT
    for call in (
        lambda: oip.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="nope")),
        lambda: oip.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="nope")),
    ):
        assert refused(call)[0] is grpc.StatusCode.NOT_FOUND


# Statistics.


def statistics(oip: GRPCInferenceServiceStub, name: str) -> pb.ModelStatistics:
    (found,) = oip.ModelStatistics(pb.ModelStatisticsRequest(name=name)).model_stats
    return found


def test_statistics_add_up_with_what_was_sent(oip: GRPCInferenceServiceStub, valid: MakeRequest) -> None:
    before = statistics(oip, "digits")
    for n in (1, 2, 5, 20):
        oip.ModelInfer(valid(n=n))
    oip.ModelInfer(valid("image", n=3))
    for _ in range(2):
        wrong = valid()
        wrong.inputs[0].datatype = "FP64"
        refused(partial(oip.ModelInfer, wrong))
    after = statistics(oip, "digits")
    assert (after.name, after.version) == ("digits", "1")
    assert after.inference_count - before.inference_count == 31
    assert after.last_inference > before.last_inference > 1.7e12 or not before.last_inference
    then, now = before.inference_stats, after.inference_stats
    for stage in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert getattr(now, stage).count - getattr(then, stage).count == 5, stage
        assert getattr(now, stage).ns > getattr(then, stage).ns, stage
    assert now.fail.count - then.fail.count == 2
    executions = after.execution_count - before.execution_count
    assert 5 <= executions <= 31
    counts = {stats.batch_size: stats.compute_infer.count for stats in before.batch_stats}
    ran = {s.batch_size: s.compute_infer.count - counts.get(s.batch_size, 0) for s in after.batch_stats}
    assert sum(ran.values()) == executions
    assert sum(size * count for size, count in ran.items()) == 31


def test_statistics_of_all_models_are_those_of_the_ready_ones(oip: GRPCInferenceServiceStub) -> None:
    everything = oip.ModelStatistics(pb.ModelStatisticsRequest()).model_stats
    assert [stats.name for stats in everything] == ["digits", "noop"]
    unknown = pb.ModelStatisticsRequest(name="nope")
    assert refused(lambda: oip.ModelStatistics(unknown))[0] is grpc.StatusCode.NOT_FOUND
    assert statistics(oip, "broken").inference_count == 0
