"""Models and requests as TensorFlow Serving has them: plain data, with the keys and values of its JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from xlaserve.errors import InvalidArgument, ModelFailed, UnsupportedFeature, status_of
from xlaserve.images.decoder import Encoded
from xlaserve.models.task import Category, Classification, Regression, Task, reading_of, readings_of
from xlaserve.models.version import Served, State, Version
from xlaserve.pipeline.pipeline import Answer, Render, Request
from xlaserve.wire.shared.models import Models
from xlaserve.wire.shared.objects import DEFAULT_TOP_K, task_of
from xlaserve.wire.shared.output_tensors import fits_inline

Json = dict[str, Any]

SIGNATURE: Final = "serving_default"
SIGNATURE_DEF: Final = "signature_def"
PREDICT: Final = "tensorflow/serving/predict"
DTYPES: Final = {
    "BOOL": "DT_BOOL",
    "UINT8": "DT_UINT8",
    "UINT16": "DT_UINT16",
    "UINT32": "DT_UINT32",
    "UINT64": "DT_UINT64",
    "INT8": "DT_INT8",
    "INT16": "DT_INT16",
    "INT32": "DT_INT32",
    "INT64": "DT_INT64",
    "FP16": "DT_HALF",
    "FP32": "DT_FLOAT",
    "FP64": "DT_DOUBLE",
    "BYTES": "DT_STRING",
}
"""By datatype of the Open Inference Protocol."""
ONE_NUMBER: Final = ([("FP32", (1,))], [("FP32", ())])
"""Types and shapes of rows of outputs that answer `regress`."""
STATES: Final = {
    State.LOADING: "LOADING",
    State.COMPILING: "LOADING",
    State.READY: "AVAILABLE",
    State.DRAINING: "UNLOADING",
    State.UNLOADED: "END",
    State.FAILED: "END",
}


def check_label(label: str) -> None:
    """Raises InvalidArgument for a number, which is the name of a version too, in place of a label."""
    if label.isdecimal():
        raise InvalidArgument("version_label", "a label, as numbers are versions", repr(label[:64]))


def check_signature(name: str) -> None:
    """Raises InvalidArgument for a signature that models don't have."""
    if name not in ("", SIGNATURE):
        raise InvalidArgument("signature_name", f"{SIGNATURE!r}, the only one", repr(name[:64]))


class LikeliestClasses(NamedTuple):
    """Renders an image's likeliest classes."""

    write: Callable[[Sequence[Category]], bytes]

    def renderer(self, task: Task) -> Render:
        """Returns the function that writes the classes of one image, by the wire's `write`."""
        classification = reading_of(task, Classification)
        return lambda outputs, frame: self.write(*classification.top(outputs, DEFAULT_TOP_K))


def classify(
    images: Sequence[Encoded], served: Served, deadline: float, write: Callable[[Sequence[Category]], bytes]
) -> Request:
    """Returns the request to classify images, whose classes `write` writes. Raises InvalidArgument."""
    task = task_of(served, Classification)
    is_inline = fits_inline(images, min(DEFAULT_TOP_K, task.classes), task.classes)
    return Request("", images, deadline, None if is_inline else LikeliestClasses(write))


def classified(served: Served, answer: Answer, write: Callable[[Sequence[Category]], bytes]) -> Sequence[bytes]:
    """Returns the likeliest classes of each image, as `write` writes them."""
    task = task_of(served, Classification)
    return answer.rendered or [*map(write, task.top(answer.outputs, DEFAULT_TOP_K))]


def regressed(task: Task) -> int:
    """Returns the place of the output that is one number for each image: of the only one, or of the only regression.

    Raises UnsupportedFeature for a task without.
    """
    places = [reading.at for reading in readings_of(task) if isinstance(reading, Regression)]
    if not places and len(task.outputs) == 1:
        places = [0]
    if [(task.outputs[at].datatype, task.outputs[at].shape[1:]) for at in places] not in ONE_NUMBER:
        answers = ", ".join(f"{spec.name} {[*spec.shape]}" for spec in task.outputs)
        raise UnsupportedFeature(f"regress: expected a model that answers an image with one number, this has {answers}")
    return places[0]


def metadata(models: Models, name: str, version: str) -> Json:
    """Returns what GetModelMetadata answers. Raises what `Models.metadata` raises."""
    described = models.metadata(name, version)
    signature = {
        "inputs": {one["name"]: _tensor_info(one) for one in described["inputs"]},
        "outputs": {one["name"]: _tensor_info(one) for one in described["outputs"]},
        "method_name": PREDICT,
    }
    number = models.directory.get(name, version).settings.version
    return {
        "model_spec": {"name": name, "signature_name": "", "version": number},
        "metadata": {SIGNATURE_DEF: {SIGNATURE_DEF: {SIGNATURE: signature}}},
    }


def status(models: Models, name: str, version: str) -> Json:
    """Returns what GetModelStatus answers. Raises what `Models.versions` raises."""
    return {"model_version_status": [*map(_version_status, models.versions(name, version))]}


def _version_status(version: Version) -> Json:
    code, message = "OK", ""
    if version.state is State.FAILED:
        failed, message = status_of(ModelFailed(version.reason))
        code = failed.grpc
    return {
        "version": version.settings.version,
        "state": STATES[version.state],
        "status": {"error_code": code, "error_message": message},
    }


def _tensor_info(tensor: Json) -> Json:
    shape = tensor["shape"][:1] if tensor["datatype"] == "BYTES" else tensor["shape"]
    return {
        "name": f"{tensor['name']}:0",
        "dtype": DTYPES[tensor["datatype"]],
        "tensor_shape": {"dim": [{"size": str(side), "name": ""} for side in shape], "unknown_rank": False},
    }
