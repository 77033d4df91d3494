"""Models as the Open Inference Protocol shows and changes them: plain data, with the keys and values of its JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from xlaserve import __version__
from xlaserve.admission.audit import audited
from xlaserve.admission.caller import CURRENT
from xlaserve.engine.request import DEFAULT_PRIORITY, WEIGHTS
from xlaserve.errors import InvalidArgument, ModelNotFound, UnsupportedFeature
from xlaserve.images.image_input import Axes, ImageInput
from xlaserve.models.task import ImageToImage, Reading, Regression, Task, TensorSpec, WithClasses, readings_of
from xlaserve.models.version import Served, State, Version
from xlaserve.telemetry.version_metrics import Duration, Statistics
from xlaserve.wire.shared import named_inputs
from xlaserve.wire.shared.backend import Backend
from xlaserve.wire.shared.inference import outputs_of
from xlaserve.wire.shared.input_tensors import IMAGE, PIXELS

Json = dict[str, Any]

EXTENSIONS: Final = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
)
SHARED_MEMORY_EXTENSION: Final = "system_shared_memory"
FORMATS: Final[dict[Axes, str]] = {"NHWC": "FORMAT_NHWC", "NCHW": "FORMAT_NCHW", "NHW": "FORMAT_NONE"}
"""Triton's names of layouts; its others have three axes."""
ANY: Final = -1


def server_metadata(*, has_shared_memory: bool = False) -> Json:
    """Returns what this server is and speaks."""
    extensions = (*EXTENSIONS, SHARED_MEMORY_EXTENSION) if has_shared_memory else EXTENSIONS
    return {"name": "xlaserve", "version": __version__, "extensions": [*extensions]}


@dataclass(eq=False)
class Models:
    """The models as clients may query them, and change them where the server `has_model_control`.

    All that takes a name raises ModelNotFound, and PermissionDenied where its caller may not use the model; metadata
    and configuration raise ModelNotReady and ModelFailed as well.
    """

    backend: Backend
    has_model_control: bool
    max_message_bytes: int
    """The setting, which properties show: over gRPC it is not in the server's words that a client is refused."""

    def __post_init__(self) -> None:
        self.directory = self.backend.directory

    def is_ready(self, name: str, version: str) -> bool:
        """Returns whether one model is ready; of a name or version that is unknown, that it is not, as Triton does."""
        try:
            return self._find(name, version).state is State.READY
        except ModelNotFound:
            return False

    def metadata(self, name: str, version: str) -> Json:
        """Returns the metadata of a model, an image of it either as pixels or encoded: most clients fill all that are
        listed."""
        CURRENT.get().check_model(name)
        served = self.directory.get(name, version)
        return {
            "name": served.settings.name,
            "versions": [served.settings.version] if version else self._ready_versions(name),
            "platform": _platform(served),
            "inputs": [
                {"name": one.name, "datatype": one.datatype, "shape": [*one.shape]} for one in described_inputs(served)
            ],
            "outputs": [
                {"name": one.name, "datatype": one.datatype, "shape": [*one.shape]} for one in _outputs(served)
            ],
            "properties": self._properties(served),
        }

    def config(self, name: str, version: str) -> Json:
        """Returns the configuration of a model in Triton's terms, with the input of its metadata.

        Triton's clients refuse a configuration with an input that the metadata lack, optional or not.
        """
        CURRENT.get().check_model(name)
        served, device = self.directory.get(name, version), self.backend.device
        batches = sorted({bucket.batch for bucket in served.model.buckets})
        group = {"name": "lanes", "count": device.lanes // max(1, len(device.gpus)), "gpus": [*device.gpus]}  # of a GPU
        return {
            "name": served.settings.name,
            "platform": _platform(served),
            "backend": served.model.program.platform,
            "version_policy": {"specific": {"versions": sorted(map(int, self._ready_versions(name)))}},
            "max_batch_size": batches[-1],
            "input": [
                {
                    "name": one.name,
                    "data_type": f"TYPE_{'STRING' if one.datatype == 'BYTES' else one.datatype}",
                    **({} if one.image is None or one.datatype == "BYTES" else {"format": FORMATS[one.image.axes]}),
                    "dims": [*one.shape[1:]],
                }
                for one in described_inputs(served)
            ],
            "output": [
                {"name": output.name, "data_type": f"TYPE_{output.datatype}", "dims": [*output.shape[1:]]}
                for output in _outputs(served)
            ],
            "instance_group": [{"kind": "KIND_GPU" if device.kind == "gpu" else "KIND_CPU", **group}],
            "dynamic_batching": {
                "preferred_batch_size": batches,
                "max_queue_delay_microseconds": round(served.settings.max_queue_delay_ms * 1000),
                "priority_levels": max(WEIGHTS),
                "default_priority_level": DEFAULT_PRIORITY,
            },
            "parameters": {key: {"string_value": value} for key, value in self._properties(served).items()},
        }

    async def statistics(self, name: str, version: str) -> Json:
        """Counts what versions of a model did since they were loaded, or without a `name` all that are ready."""
        versions = self.versions(name, version) if name else self.visible(only_ready=True)
        await self.backend.count()
        return {"model_stats": [_statistics(one, self.backend.statistics(one)) for one in versions]}

    def index(self, repository_name: str, *, only_ready: bool) -> list[Json]:
        """Lists the models. Raises InvalidArgument where another repository is named."""
        _check_repository(repository_name)
        return [
            {"name": one.name, "version": one.settings.version, "state": str(one.state), "reason": one.progress}
            for one in self.visible(only_ready=only_ready)
        ]

    async def load(self, repository_name: str, name: str, parameters: Collection[str]) -> None:
        """Loads a model, or loads it again. Raises UnsupportedFeature, InvalidArgument and what a load raises."""
        with audited("load", name):
            self._check_control(repository_name)
            if parameters:
                raise UnsupportedFeature("parameters: models are configured in the server's file, not by clients")
            CURRENT.get().check_model(name)
            await self.backend.load(name)

    async def update(self, name: str, labels: Mapping[str, str], versions: Collection[str] = ()) -> None:
        """Updates a model; see `Repository.update`. Raises the errors of `load` as well."""
        with audited("load", name):
            self._check_control("")
            CURRENT.get().check_model(name)
            await self.backend.update(name, labels, versions)

    async def unload(self, repository_name: str, name: str, parameters: Collection[str]) -> None:
        """Drains and unloads a model. Raises UnsupportedFeature, InvalidArgument and what that raises."""
        with audited("unload", name):
            self._check_control(repository_name)
            for key in parameters:
                if key != "unload_dependents":
                    raise InvalidArgument("parameters", "unload_dependents at most", repr(key[:64]))
            CURRENT.get().check_model(name)
            await self.backend.unload(name)

    def versions(self, name: str, version: str) -> list[Version]:
        """Returns all versions of a model, or the one that is named; of two loadings of one, that which serves."""
        found = self._find(name, version)
        return [found] if version else self.directory.versions(name)

    def visible(self, *, only_ready: bool = False) -> list[Version]:
        """Returns the models that their caller may use."""
        caller = CURRENT.get()
        versions = [version for version in self.directory.index() if version.state is State.READY or not only_ready]
        return [version for version in versions if caller.may_use(version.name)]

    def _properties(self, served: Served) -> dict[str, str]:
        return {
            "source": source_name(served.settings.source),
            "weights": served.model.weights,
            "task": served.model.task.name,
            **({"task_reason": served.model.reason} if served.model.reason else {}),
            **_readings(served.model.task),
            "inputs": _input_names(served),
            "pixels": served.model.pixels,
            "fit": served.model.fit,
            "resize": str(served.model.resize),
            **({"resize_reason": served.model.resize_reason} if served.model.resize_reason else {}),
            "decode": served.version.decode_text,
            **({"examples": found} if (found := served.version.examples_text) else {}),
            **({} if served.model.image.is_deep else {"pixel_range": served.settings.pixel_range}),
            "precision": served.version.precision_text,
            "modes": ",".join(served.settings.modes),
            "default_mode": served.settings.effective_default_mode,
            "buckets": ",".join(map(str, served.model.buckets)),
            "max_message_bytes": str(self.max_message_bytes),
            **({"auto": auto} if (auto := served.version.auto_text) else {}),
            **({"lowerings": served.model.lowerings} if served.model.lowerings else {}),
        }

    def _ready_versions(self, name: str) -> list[str]:
        return [one.settings.version for one in self.directory.versions(name) if one.state is State.READY]

    def _find(self, name: str, version: str) -> Version:
        CURRENT.get().check_model(name)
        return self.directory.find(name, version)

    def _check_control(self, repository_name: str) -> None:
        _check_repository(repository_name)
        if not self.has_model_control:
            raise UnsupportedFeature("this server does not let clients load or unload models (see model_control)")


def _check_repository(name: str) -> None:
    if name:
        raise InvalidArgument("repository_name", "nothing, as there is one repository", repr(name[:64]))


def _statistics(version: Version, counts: Statistics) -> Json:
    stages = {
        "success": counts.success,
        "fail": counts.fail,
        "queue": counts.queue,
        "compute_input": counts.input,
        "compute_infer": counts.infer,
        "compute_output": counts.output,
        "cache_hit": Duration(),
        "cache_miss": Duration(),
    }
    batches = [
        {
            "batch_size": size,
            "compute_input": _duration(counts.gather_by_size[size]),
            "compute_infer": _duration(counts.infer_by_size[size]),
            "compute_output": _duration(Duration()),  # a response is made for a request, not for a batch
        }
        for size in sorted(counts.infer_by_size)
    ]
    return {
        "name": version.name,
        "version": version.settings.version,
        "last_inference": counts.last_at_ms,
        "inference_count": counts.images,
        "execution_count": counts.batches,
        "inference_stats": {stage: _duration(duration) for stage, duration in stages.items()},
        "batch_stats": batches,
    }


def _duration(duration: Duration) -> Json:
    return {"count": duration.count, "ns": round(duration.seconds * 1e9)}


def _platform(served: Served) -> str:
    platform = served.model.program.platform
    return f"{platform}_xla" if platform == "tensorflow" else platform


class DescribedInput(NamedTuple):
    """An input as metadata show it."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    """-1 is a side of any length, and the batch."""
    image: ImageInput | None
    """None where it holds no images."""


def described_inputs(served: Served) -> list[DescribedInput]:
    """Returns the inputs of a model as clients see them: images as pixels, or encoded where the settings say so."""
    model, settings = served.model, served.settings
    size = _pixel_size(served)
    described = []
    named = named_inputs.names_of(model, settings.input_name)
    for name, spec, image in zip(named, model.inputs, (model.image, *model.others), strict=True):
        if not spec.is_image or image is None:
            datatype = named_inputs.datatype_of(spec)
            described.append(DescribedInput(name, datatype, (ANY, *spec.row_shape(*size)), None))
            continue
        shows_image = settings.metadata_input == IMAGE and image.color is not None
        own = name
        if model.is_of_one_image:
            own = settings.input_name or (IMAGE if shows_image else PIXELS)
        if shows_image:
            described.append(DescribedInput(own, "BYTES", (ANY, 1), image))
        else:
            height, width, _ = spec.row_shape(*size)
            described.append(
                DescribedInput(own, named_inputs.datatype_of(spec), image.shape(ANY, height, width), image)
            )
    return described


def _input_names(served: Served) -> str:
    model = served.model
    if not model.is_of_one_image:
        return ",".join(named_inputs.names_of(model, served.settings.input_name))
    return PIXELS if model.image.color is None else f"{PIXELS},{IMAGE}"


def _outputs(served: Served) -> Sequence[TensorSpec]:
    return outputs_of(served.model.task, served.settings.output_name)


def _readings(task: Task) -> dict[str, str]:
    """Returns the properties that say in words how single outputs are read, and what numbers and channels are."""
    if isinstance(task, Regression):
        return {"values": task.text} if task.values else {}
    if isinstance(task, ImageToImage):
        return {"output_color": task.color}
    shown = [f"{task.outputs[reading.at].name}: {reading.name}{_named(reading)}" for reading in readings_of(task)]
    return {"readings": "; ".join(shown)} if shown else {}


def _named(reading: Reading) -> str:
    """Returns the names of a reading's classes or numbers, in brackets."""
    names = reading.text if isinstance(reading, Regression) else ""
    if isinstance(reading, WithClasses) and reading.labels is not None:
        names = ", ".join(reading.labels)
    return f" ({names})" if names else ""


def _pixel_size(served: Served) -> tuple[int, int]:
    if served.takes_unmatched:
        height, width = (ANY if side is None else side for side in served.model.size)
        return height, width
    return next(iter(served.sizes)) if len(served.sizes) == 1 else (ANY, ANY)


def source_name(source: str) -> str:
    """Returns a source as clients may see it: a path loses its folders."""
    return source.rstrip("/").rpartition("/")[2]
