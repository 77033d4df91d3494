"""Requests as a protocol with JSON would give them: plain data, whatever clients wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.fakes import served_with

from xlaserve.config import PixelRange
from xlaserve.errors import InvalidArgument, UnsupportedFeature
from xlaserve.models.task import Classification, Detection, Embedding, Task
from xlaserve.wire.shared.inference import (
    InferRequest,
    Parameters,
    RequestedOutput,
    all_outputs,
    check_outputs,
    check_parameters,
    parse,
)
from xlaserve.wire.shared.input_tensors import check_count, images_of, raw_bytes


def test_parameters_are_taken_as_json_has_them() -> None:
    values = json.loads('{"mode": "xla", "timeout": 1500000, "pixel_range": "0..1", "priority": 1}')
    assert check_parameters(values.items()) == Parameters("xla", 1.5, PixelRange.UNIT, priority=1)
    assert check_parameters([]) == Parameters()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"mode": 1}, "parameters.mode: expected a string, got 1"),
        ({"mode": None}, "parameters.mode: expected a string, got nothing"),
        ({"timeout": True}, "parameters.timeout: expected an int64 of at least 1, in microseconds, got True"),
        ({"timeout": 1.0}, "parameters.timeout: expected an int64 of at least 1, in microseconds, got 1.0"),
        ({"timeout": 0}, "parameters.timeout: expected an int64 of at least 1, in microseconds, got 0"),
        ({"timeout": 10**400}, "parameters.timeout: expected an int64 of at least 1, in microseconds, got 1000"),
        ({"pixel_range": ["0..1"]}, "parameters.pixel_range: expected a string, 0..255 or 0..1, got a list"),
        (
            {"triton_enable_empty_final_response": 1},
            "parameters.triton_enable_empty_final_response: expected a boolean",
        ),
        ({"priority": 4}, "parameters.priority: expected 1 (the highest) to 3, or 0 for 2, got 4"),
        ({"priority": -1}, "parameters.priority: expected 1 (the highest) to 3, or 0 for 2, got -1"),
        ({"priority": 1.0}, "parameters.priority: expected 1 (the highest) to 3, or 0 for 2, got 1.0"),
        ({"priority": True}, "parameters.priority: expected 1 (the highest) to 3, or 0 for 2, got True"),
        ({"priority": "1"}, "parameters.priority: expected 1 (the highest) to 3, or 0 for 2, got '1'"),
        ({"priority": None}, "parameters.priority: expected 1 (the highest) to 3, or 0 for 2, got nothing"),
        ({f"{n}": n for n in range(65)}, "parameters: expected at most 64, got more"),
    ],
)
def test_wrong_parameters_are_refused_with_what_was_expected_and_what_came(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_parameters(values.items())
    assert str(refused.value).startswith(says)
    assert len(str(refused.value)) < 200


def test_unknown_parameters_are_ignored_unless_the_model_is_strict() -> None:
    parameters = check_parameters({"mode": "xla", "colour": "red", "triton_x": 1}.items())
    assert (parameters.mode, parameters.unknown) == ("xla", "triton_x")
    parameters.check_unknown(is_strict=False)
    with pytest.raises(InvalidArgument, match=r"^parameters: expected mode, .* got 'triton_x'"):
        parameters.check_unknown(is_strict=True)
    check_parameters({"mode": "xla"}.items()).check_unknown(is_strict=True)


def test_parameters_of_other_servers_without_effect_pass_strict_models() -> None:
    nothing = {
        "triton_enable_empty_final_response": True,
        "sequence_id": 0,
        "sequence_start": False,
        "sequence_end": False,
        "priority": 0,
    }
    for parameters in (nothing, {"sequence_id": ""}):
        assert check_parameters(parameters.items()) == Parameters()


@pytest.mark.parametrize(
    "values",
    [{"sequence_id": 1}, {"sequence_id": "a"}, {"sequence_start": True}],
)
def test_parameters_of_extensions_that_are_not_spoken_are_unsupported(values: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFeature):
        check_parameters(values.items())


def test_outputs_are_those_that_were_named_in_the_order_of_the_model() -> None:
    task = Detection(3, max_detections=5)
    assert [one.place for one in all_outputs(task)] == [0, 1, 2, 3]
    named = [RequestedOutput("count"), RequestedOutput("scores", is_raw=True)]
    assert [(one.place, one.is_raw) for one in check_outputs(named, task)] == [(1, True), (3, False)]


def test_at_most_all_classes_are_answered() -> None:
    for asked, classes in (([("classification", 2)], 2), ([("classification", 2**60)], 3), ([], 0)):
        (found,) = check_outputs([RequestedOutput("scores", asked)], Classification(3))
        assert found.classes == classes


def test_an_only_output_may_have_a_name_of_another_server() -> None:
    for found in (all_outputs(Embedding(4), "probs"), check_outputs([RequestedOutput("probs")], Embedding(4), "probs")):
        assert [(one.place, one.spec.name) for one in found] == [(0, "probs")]
    with pytest.raises(InvalidArgument, match="outputs: expected probs, each at most once, got 'embedding'"):
        check_outputs([RequestedOutput("embedding")], Embedding(4), "probs")
    assert all_outputs(Detection(3, max_detections=5), "probs") == all_outputs(Detection(3, max_detections=5))


@pytest.mark.parametrize(
    ("requested", "error", "says"),
    [
        ([("nope", {})], InvalidArgument, "outputs: expected embedding, each at most once, got 'nope'"),
        ([("embedding", {})] * 2, InvalidArgument, "outputs: expected embedding, each at most once"),
        ([("embedding", {"binary_data": True})], InvalidArgument, "outputs.embedding.parameters: expected shared"),
        ([("embedding", {"classification": 1})], UnsupportedFeature, "outputs.embedding.classification: the model's"),
    ],
)
def test_wrong_outputs_are_refused(requested: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^{says}"):
        check_outputs(
            [RequestedOutput(name, parameters.items()) for name, parameters in requested], Embedding(4), is_strict=True
        )


def test_unknown_parameters_of_outputs_are_ignored() -> None:
    outputs = [RequestedOutput("scores", {"binary_data": True, "classification": 2}.items())]
    assert [one.classes for one in check_outputs(outputs, Classification(3))] == [2]


def test_of_thousands_of_entries_those_after_a_refused_one_are_not_read() -> None:
    read: list[int] = []

    def counted(item: Any) -> Iterator[Any]:
        for count in range(1, 10_001):
            read.append(count)
            yield item

    many: list[tuple[Callable[[Any], object], Any]] = [
        (check_parameters, ("mode", 1)),
        (lambda outputs: check_outputs(outputs, Detection(3, max_detections=5)), RequestedOutput("scores")),
        (
            lambda parameters: check_outputs(
                [RequestedOutput("scores", parameters)], Classification(3), is_strict=True
            ),
            ("colour", 1),
        ),
        (images_of, JsonTensor(PIXELS + "}")),
    ]
    for check, item in many:
        read.clear()
        with pytest.raises(InvalidArgument):
            check(counted(item))
        assert 1 <= len(read) < 10


def test_of_thousands_of_parameters_that_are_ignored_few_are_read() -> None:
    read: list[int] = []

    def many(item: Any) -> Iterator[Any]:
        for count in range(10_000):
            read.append(count)
            yield item

    tensor = JsonTensor(PIXELS + ', "data": [0, 0, 0, 0, 0, 0]}')
    tensor.parameters = many("colour")
    for check in (
        lambda: check_parameters(many(("colour", 1))),
        lambda: check_outputs([RequestedOutput("scores", many(("colour", 1)))], Classification(3)),
        lambda: images_of([tensor]),
    ):
        read.clear()
        with pytest.raises(InvalidArgument, match="parameters: expected at most 64, got more"):
            check()
        assert len(read) == 65


class JsonTensor:
    """An input tensor of a protocol with JSON, which may have its bytes behind it."""

    bytes_field = "binary data"
    values_field = "data"
    states_datatype = True

    def __init__(self, text: str, binary: bytes | None = None) -> None:
        fields = json.loads(text)
        self.name: str = fields["name"]
        self.datatype: str = fields["datatype"]
        self.shape: Sequence[int] = fields["shape"]
        self.parameters: Iterable[str] = []
        self._data: list[Any] = fields.get("data", [])
        self._binary = binary

    def raw(self) -> memoryview | None:
        return None if self._binary is None else memoryview(self._binary)

    def values(self, shape: tuple[int, ...]) -> np.ndarray:
        check_count(len(self._data), shape, self.values_field)
        return np.array(self._data, np.float32 if self.datatype == "FP32" else np.int32).reshape(shape)

    def elements(self) -> list[Any]:
        return [element.encode() for element in self._data]

    def numbers(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        return np.array(self._data, dtype).reshape(shape)


PIXELS = '{"name": "pixels", "datatype": "UINT8", "shape": [1, 1, 2, 3]'


class Listing:
    """Lists that take no time."""

    def us_per_value(self, datatype: str) -> float:
        return 0.0

    def numbers(self, values: np.ndarray) -> list[Any]:
        return [values.tobytes()]

    def elements(self, elements: Sequence[bytes]) -> list[Any]:
        return [*elements]


def call_of(task: Task, **settings: Any) -> Any:
    served = served_with(task)
    vars(served.settings).update(settings)
    return SimpleNamespace(served=served, deadline=9.0, began=1.0)


def test_a_request_of_any_wire_is_parsed_for_its_model() -> None:
    tensor = JsonTensor(PIXELS + "}", bytes([0, 1, 2, 3, 4, 255]))
    options = check_parameters({"mode": "xla", "timeout": 500_000, "priority": 1}.items())
    sent = InferRequest([tensor], [RequestedOutput("scores", [("classification", 2)], is_raw=True)], options)
    parsed, wanted = parse(sent, call_of(Classification(3)), Listing())
    assert (parsed.mode, parsed.deadline, parsed.priority, parsed.rendering) == ("xla", 1.5, 1, None)
    assert np.asarray(parsed.images).ravel().tolist() == [0, 1, 2, 3, 4, 255]
    assert [(one.place, one.is_raw, one.classes) for one in wanted] == [(0, True, 2)]


def test_unnamed_outputs_are_all_sent_in_the_form_of_the_request() -> None:
    for is_raw in (True, False):
        tensor = JsonTensor(PIXELS + "}", bytes(6))
        _, wanted = parse(InferRequest([tensor], is_raw=is_raw), call_of(Detection(3, max_detections=5)), Listing())
        assert [(one.place, one.is_raw) for one in wanted] == [(place, is_raw) for place in range(4)]


def test_images_that_are_known_are_not_read_again() -> None:
    known = np.ones((1, 1, 2, 3), np.uint8)
    parsed, _ = parse(InferRequest((), known_images=known), call_of(Classification(3)), Listing())
    assert parsed.images is known


def test_a_strict_model_alone_refuses_unknown_parameters() -> None:
    sent = InferRequest([JsonTensor(PIXELS + "}", bytes(6))], parameters=check_parameters([("colour", "red")]))
    parse(sent, call_of(Classification(3)), Listing())
    with pytest.raises(InvalidArgument, match=r"^parameters: expected mode"):
        parse(sent, call_of(Classification(3), strict_parameters=True), Listing())


def test_a_protocol_of_its_own_gives_its_tensors_to_the_same_checks() -> None:
    listed = images_of([JsonTensor(PIXELS + ', "data": [0, 1, 2, 3, 4, 255]}')])
    binary = images_of([JsonTensor(PIXELS + "}", bytes([0, 1, 2, 3, 4, 255]))])
    np.testing.assert_array_equal(listed, binary)
    image = '{"name": "image", "datatype": "BYTES", "shape": [2]}'
    assert images_of([JsonTensor(image, raw_bytes([b"a", b"bc"]))]) == [b"a", b"bc"]


@pytest.mark.parametrize(
    ("text", "binary", "says"),
    [
        (PIXELS + "}", bytes(5), "binary data of pixels: expected 6 bytes for UINT8"),
        (PIXELS + ', "data": [1]}', None, "data of pixels: expected 6 values for"),
        (PIXELS + ', "data": [0, 0, 0, 0, 0, 256]}', None, "pixels: expected values from 0 to 255, got 256"),
        ('{"name": "image", "datatype": "BYTES", "shape": [2], "data": ["a"]}', None, "data of image: expected 2"),
    ],
)
def test_what_is_refused_is_named_as_the_protocol_names_it(text: str, binary: bytes | None, says: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{says}"):
        images_of([JsonTensor(text, binary)])
