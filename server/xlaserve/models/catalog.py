"""The catalog of models: builds a `Model` from the source in its settings."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from xlaserve.config import Bucket, Color, Decoding, Fit, ModelSettings, ResizeLibrary, ResizeSettings
from xlaserve.config import sources as kinds
from xlaserve.config.sources import Source
from xlaserve.engine.program import IsLowered, MayBeNarrow
from xlaserve.errors import InvalidArgument, ModelFailed
from xlaserve.images import tensorflow_jpeg
from xlaserve.images.frame import Frame, Placing, place
from xlaserve.models import class_names
from xlaserve.models.load_failure import explain, short_name
from xlaserve.models.network_settings import (
    buckets_of,
    check_decode,
    check_depth,
    check_equalize,
    check_fit,
    check_output_name,
    check_unmatched,
    effective_fit,
)
from xlaserve.models.networks.network import Network
from xlaserve.models.sources import content_kinds, file_content, noop
from xlaserve.models.sources.conversions import Conversions
from xlaserve.models.task import Task, WithClasses

if TYPE_CHECKING:
    from xlaserve.programs.tf.device_replicas import Replicas

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Model(Network):
    """A network as it is configured, loaded and not yet compiled."""

    settings: ModelSettings
    buckets: tuple[Bucket, ...]
    """The configured buckets with the model's own height and width filled in, sorted. With `buckets: auto` all the
    candidates, until warm-up has chosen from them."""

    @property
    def fit(self) -> Fit:
        """The fit of encoded images to the model's size."""
        return effective_fit(self.settings, self.task, self.preparation.fit)

    def place(self, size: tuple[int, int], height: int, width: int) -> Frame:
        """Returns where an image of `height` x `width` pixels goes in an input of `size`. Raises what `frame.place`
        raises."""
        return place(height, width, input_height=size[0], input_width=size[1], **self.placing._asdict())

    @property
    def placing(self) -> Placing:
        """The placing of images in an input."""
        settings, cuts_pixels = self.settings, self.resize.library is not ResizeLibrary.PILLOW
        return Placing(self.fit, settings.shorter_side, settings.border, cuts_pixels)

    @property
    def resize(self) -> ResizeSettings:
        """The resizing of encoded images."""
        return self.settings.resize or self.preparation.resize

    @property
    def decode(self) -> Decoding:
        """The decoding of JPEG images."""
        if self.settings.decode is not None:
            return self.settings.decode
        own = self.preparation.decode
        return own if own is not Decoding.TENSORFLOW or tensorflow_jpeg.is_available() else Decoding.EXACT

    @property
    def resize_reason(self) -> str:
        """The reason for the resizing, and for a fit that is not the task's usual one; empty where the settings, or
        nothing, say it."""
        return "" if self.settings.resize else self.preparation.reason

    @property
    def pixels(self) -> str:
        """The pixels that it takes, in words: `[n, 224, 224, 3] rgb`; of several images the first, `none` without."""
        if not self.image.channels:
            return "none"
        sizes = {bucket[1:] for bucket in self.buckets}
        text = self.image.text(*sizes.pop()) if len(sizes) == 1 else self.image.text()
        of_depth = f" {self.image.dtype}" if self.image.is_deep else ""
        return f"{text} {self.image.color or 'as they are'}{of_depth}"

    @property
    def color(self) -> Color:
        """The colours that encoded images are converted to. Raises InvalidArgument where it takes only pixels."""
        if self.image.color is None:
            raise self.no_pictures(0)
        return self.image.color

    def no_pictures(self, place: int) -> InvalidArgument:
        """Returns the error for encoded images of an input that takes none."""
        spec, image = self.inputs[place], (self.image, *self.others)[place]
        if image is None or not image.channels:
            sides = ", ".join(map(str, spec.shape))
            return InvalidArgument(spec.name, f"{spec.dtype} [n, {sides}], as it holds no images", "an encoded image")
        name = "image" if self.is_of_one_image else spec.name
        return InvalidArgument(name, f"pixels {image.text()}, as the model takes no pictures", "an encoded image")


def uses_tensorflow(settings: ModelSettings) -> bool:
    """Returns whether loading the model imports TensorFlow, which must then be configured first."""
    kind = kinds.kind_of_name(settings.source)
    return kind is None or kind.value.needs_tensorflow


def can_be_kept(settings: ModelSettings) -> bool:
    """Returns whether the settings tell what the model is, so that a compile cache can know it again.

    The code of custom objects, the files behind a handle of Kaggle or a preset's name, and the files that code in a
    model file reads, such as the SavedModel of a TFSMLayer, may change.
    """
    kind = kinds.kind_of_name(settings.source)
    is_fixed = kind is None or (kind.value.is_fixed and not (kind.value.has_presets and _may_change(settings.weights)))
    is_file = settings.architecture is None or kinds.is_architecture_path(settings.architecture)
    return settings.safe_mode and not settings.custom_objects and is_file and is_fixed


def _may_change(weights: str | None) -> bool:
    """Returns whether weights are named on a hub without the version that is meant."""
    named = weights is not None and weights not in kinds.NAMED_WEIGHTS and kinds.is_handle(weights)
    return named and re.fullmatch(r"kaggle://.+/\d+", weights or "") is None


Cached = Callable[[ModelSettings, Callable[[], Network]], Network]
"""Returns the network of a model from the compile cache, or calls its builder."""


def load(
    settings: ModelSettings,
    cached: Cached = lambda settings, build: build(),
    conversions: Conversions = Conversions(),  # noqa: B008 - which does not change
) -> Model:
    """Builds the model and its weights; blocks. Raises ModelFailed with the reason and its remedy."""
    try:
        network = cached(settings, partial(_lowered, settings, conversions))
        buckets = buckets_of(settings, network)
        check_unmatched(settings, network)
        task = _labelled(network.task, settings)
        check_output_name(settings, task)
        check_fit(settings, task, network.preparation.fit)
        check_decode(settings)
        check_depth(settings, network)
        check_equalize(settings, network)
    except ModelFailed:
        raise
    except Exception as error:
        raise ModelFailed(explain(settings, error)) from error
    if network.reason:
        _log.info("model %s: %s", settings.title, reading(task, network.reason))
    if network.weights == "random":
        _log.warning("model %s has random weights: its answers mean nothing", settings.title)
    if network.batch is not None and network.batch > 1:
        _log.warning(
            "model %s: its file is for batches of %d images alone, so one takes as long as %d, and buckets are [%d];"
            " where the model is, export it with a batch of any size: None",
            *(settings.title, network.batch, network.batch, network.batch),
        )
    model = Model(**{**vars(network), "task": task}, settings=settings, buckets=buckets)
    if settings.resize is None and model.image.color is not None:
        _log.info("model %s: %s", settings.title, preparation(model))
    return model


def preparation(model: Model) -> str:
    """Returns in words how encoded images are fitted and resized by default, why, and how to have another."""
    reason = f", as {model.resize_reason}" if model.resize_reason else ""
    what = (
        f"encoded images are fitted by {model.fit} and resized as {model.resize}{reason}, and JPEGs decoded by"
        f" {model.decode}"
    )
    if reason or not kinds.is_of_file(model.settings.source):
        return f"{what}; set fit, resize and decode if its training did otherwise"
    return (
        f"{what}; the file does not say how its training did: set fit, resize and decode, which `xlaserve match` finds"
        " from the outputs of a notebook"
    )


def reading(task: Task, reason: str) -> str:
    """Returns in words which task `auto` chose, why, and how to have another."""
    return f"task {task.name}, as {reason}; set task for another reading"


def load_replicated(settings: ModelSettings, replicas: Replicas) -> Model:
    """Builds the model once on each device, with its weights there; blocks. Raises ModelFailed.

    Built again rather than copied, which works however a source holds its variables. Random weights are drawn from the
    same seed each time.
    """
    from xlaserve.programs.tf.device_replicas import ReplicatedProgram  # noqa: PLC0415 - imports TensorFlow

    models = []
    for index in range(len(replicas.devices)):
        with replicas.on(index):
            models.append(load(settings))
    return replace(models[0], program=ReplicatedProgram([model.program for model in models], replicas))


def _lowered(settings: ModelSettings, conversions: Conversions) -> Network:
    """Builds the network that the settings name, and finds its lowerings for XLA and whether it is narrow."""
    network = _network(settings.source, settings, conversions)
    first, *_ = buckets_of(settings, network)
    lowerings = network.program.lowerings(first) if isinstance(network.program, IsLowered) else ""
    if lowerings:
        _log.info("model %s: lowered for XLA on a CPU: %s", settings.name, lowerings)
    program = network.program
    is_narrow = network.is_narrow or (isinstance(program, MayBeNarrow) and program.is_narrow(first))
    scale = _pixel_scale(settings, network, first)
    return replace(network, lowerings=lowerings, is_narrow=is_narrow, pixel_scale=scale)


def _pixel_scale(settings: ModelSettings, network: Network, bucket: Bucket) -> float | None:
    """Reads the factor for pixels of a model from a file, where nothing else tells that they are scaled right."""
    is_scaled = not network.is_unscaled and settings.preprocess in ("auto", "none")
    if is_scaled or not kinds.is_of_file(settings.source):
        return None
    from xlaserve.models.networks import pixel_scale  # noqa: PLC0415 - imports TensorFlow

    return pixel_scale.of_program(network.program, bucket)


def _network(source: str, settings: ModelSettings, conversions: Conversions) -> Network:  # noqa: PLR0911, PLR0912 - one each
    """Builds the network of `source`, which is the model's source or the path of files that were fetched for it."""
    name, path = source.partition(":")[2], Path(source)
    if (kind := kinds.kind_of(source)) is not None:
        _check_fields(settings, kind)
        if kind.value.suffixes:
            file_content.check(path)
    # TensorFlow takes seconds to import, and KerasCV and KerasHub some more.
    match kind:
        case Source.APPLICATIONS:
            from xlaserve.models.sources import applications  # noqa: PLC0415

            return applications.application(name, settings)
        case Source.KERAS_CV:
            from xlaserve.models.sources import keras_cv_models  # noqa: PLC0415

            return keras_cv_models.keras_cv_model(name, settings)
        case Source.KERAS_HUB:
            from xlaserve.models.sources import keras_hub_models  # noqa: PLC0415

            return keras_hub_models.keras_hub_model(name, settings)
        case Source.KAGGLE:
            from xlaserve.models.sources import kaggle  # noqa: PLC0415

            folder = kaggle.fetch(name)
            files = [file for file in folder.iterdir() if file.is_file() and kinds.kind_of(str(file))]
            return _network(str(files[0] if len(files) == 1 else folder), settings, conversions)
        case Source.BUILT_IN:
            from xlaserve.models.sources import built_in  # noqa: PLC0415

            return built_in.network(name, settings)
        case Source.NOOP:
            return noop.network()
        case Source.KERAS_FILE:
            from xlaserve.models.sources import keras_file  # noqa: PLC0415

            return keras_file.keras_file(path, settings, conversions)
        case Source.GRAPH_FILE:
            from xlaserve.models.sources import graph_file  # noqa: PLC0415

            return graph_file.graph_file(path, settings)
        case Source.ONNX_TFLITE_FILE:
            from xlaserve.models.sources.onnx_tflite import onnx_tflite_file  # noqa: PLC0415

            return onnx_tflite_file.onnx_tflite_file(path, settings)
        case Source.JAX_FILE:
            from xlaserve.models.sources import jax_file  # noqa: PLC0415

            return jax_file.jax_file(path, settings)
        case Source.SAVED_MODEL:
            from xlaserve.models.sources import saved_model  # noqa: PLC0415

            if saved_model.is_saved_model(path):
                return saved_model.saved_model(path, settings)
        case None:
            pass
        case _:
            assert_never(kind)
    name = short_name(settings.source)
    if not path.exists():
        found = ", which does not exist"
        near = kinds.near_name(settings.source)
        step = (
            f"did you mean {near}?"
            if near
            else "paths begin at the configuration's folder, and xlaserve help models has the names"
        )
    elif path.is_dir():
        found = ", a folder that holds no model, or several"
        step = f"name the model in it: ls {name}"
    else:
        if path.is_file():
            content_kinds.check_name(path)
        found = ""
        step = f"xlaserve inspect {name} says what it is"
    raise ModelFailed(f"source: expected {kinds.NAMES}, {kinds.PATHS}, got {name}{found}; {step}")


def _check_fields(settings: ModelSettings, kind: Source) -> None:
    """Raises ModelFailed where a field was set that this kind of source does not take."""
    takes = kinds.PARTICULAR if kind.value.takes is None else kind.value.takes
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if name in kinds.PARTICULAR - takes and value != field.default:
            raise ModelFailed(
                f"{name}: {short_name(settings.source)} takes none, expected no {name}, got {short_name(str(value))};"
                f" leave {name} out"
            )


def _labelled(task: Task, settings: ModelSettings) -> Task:
    """Returns the task with the configured names, where there are any, instead of the source's own."""
    if settings.labels is None:
        return task
    if not isinstance(task, WithClasses):
        got = settings.labels.name if isinstance(settings.labels, Path) else ", ".join(settings.labels)
        raise ModelFailed(f"labels: {task.name} has no classes, expected no labels, got {got}; leave labels out")
    return task.labelled(class_names.of_task(settings.labels, task))
