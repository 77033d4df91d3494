"""The part of a model's settings that says which model it is, and which of its versions answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from xlaserve.config import sources
from xlaserve.config.base import Frozen, OrPath, Pairs
from xlaserve.config.output_settings import (
    TaskName,
)
from xlaserve.config.version_names import LATEST, Label, Number, Percentage, VersionOrLabel


class NamedSettings(Frozen):
    """The name, the source, the task and the versions of a model."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$", examples=["resnet-50"])
    """The model's name in requests."""
    source: Annotated[str, OrPath(sources.looks_like_path)]
    """Where it comes from: `keras.applications:<Name>`, `keras_cv:<Backbone>`, `keras_cv:<Head>-<Backbone>`,
    `keras_hub:<Class>`, the path of a `.keras` or `.h5` file, of a `.pb` file (a frozen graph of TensorFlow 1), of a
    `.onnx` or `.tflite` file, of a `.jax` file (what `jax.export` wrote) or of a SavedModel folder, or of a folder that
    holds one of these and no other, `kagglehub:<handle>` (one of these, fetched from Kaggle and kept),
    `builtin:digits`, `builtin:shapes-detector`, `builtin:shapes-segmenter`, or `builtin:noop`."""
    task: Literal["auto", TaskName] = "auto"
    """The meaning of the outputs. `tensors` reads nothing: clients get the model's own outputs, by their own names, of
    any shape and type but text. `regression` is numbers, such as an age; `sequence` is a class for each step, such as
    the letters of a text; `keypoints` are places, such as joints; `image` is an image made of the image, such as one
    without its noise. `auto` tells by the source, or by the outputs' names, shapes and values, and takes `tensors`
    where these are of no task for certain; the log and the metadata say what it took, and why. `embedding` makes Keras
    Applications, KerasCV's backbones and KerasHub's classifiers give their pooled features."""
    version: Number = Field("1", examples=[2])
    """The version's number, by which requests may choose it. Models of one name are its versions, which serve at
    the same time."""
    versions: str | tuple[Number, ...] | None = None
    """Where the source is a folder of versions, `1/`, `2/` and so on, with a SavedModel or a file each: those to
    serve, as `latest 2`, `all` or a list such as `[1, 3]`; `latest 1` by default. Those that `version_labels` or
    `routing` name are served as well."""
    version_labels: Pairs[Label, Number] = Field((), examples=[{"stable": 2, "canary": 3}])
    """Names of versions, which requests may use in place of numbers: `{stable: 2, canary: 3}`. `stable` answers
    requests without a version; where there is none or it is not ready, the highest version that is ready does. For all
    versions of the model: set at one of them. Labels move without a reload."""
    routing: Pairs[VersionOrLabel, Percentage] = Field((), examples=[{"canary": 5}])
    """Percentages of the requests without a version that labels or versions answer: `{canary: 5}`. Requests with the
    same id go to the same version. For all versions of the model, as `version_labels`."""
    weights: Annotated[str | None, OrPath(sources.is_weights_path)] = None
    """For `keras.applications`: `imagenet` (the default: Keras's own download and cache), `random`, or the path of a
    weights file. For `keras_cv`, whose published weights lie on a hub: `random` or the path of a file that
    `save_weights` wrote. For `keras_hub`: the same, or a preset, which brings its own architecture and preprocessing:
    a name such as `resnet_50_imagenet`, a handle such as `kaggle://...` or `hf://...`, both of which KerasHub downloads
    and keeps, or the path of a folder that `save_to_preset` wrote, as `./folder`. For `.jax` files of functions that
    take their weights: the path of a `.npz` file of these, in JAX's order. Other sources hold their own weights."""
    classes: int | None = Field(None, ge=1)
    """How many classes `keras.applications`, `keras_cv` and `keras_hub` are built for; those of the published weights
    by default. For outputs that name classes by their numbers: how many there are, if no labels say it."""

    @field_validator("versions", mode="before")
    @classmethod
    def _check_versions(cls, value: Any) -> Any:
        is_policy = isinstance(value, str) and (value == "all" or LATEST.fullmatch(value))
        if value is not None and not is_policy and not (isinstance(value, (list, tuple)) and value):
            raise ValueError("expected latest 2 or another number, all, or a list of versions")
        return value

    @field_validator("routing")
    @classmethod
    def _check_routing(cls, value: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
        if sum(share for _, share in value) > 100:
            raise ValueError("expected percentages of 100 together at most")
        return value
