"""One model's settings."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_serializer, field_validator, model_validator

from xlaserve.config import sources
from xlaserve.config.answer_settings import AnswerSettings
from xlaserve.config.base import OrPath, Pairs
from xlaserve.config.bucket_settings import AutoBuckets, BucketSettings, shown
from xlaserve.config.example_settings import ExampleSettings
from xlaserve.config.modes import Lowering, Mode, Precision
from xlaserve.config.named_settings import NamedSettings
from xlaserve.config.pixel_settings import PixelSettings
from xlaserve.config.shadow_settings import ShadowSettings
from xlaserve.config.version_names import SHARED

AUTO: Final = "auto"


class ModelSettings(AnswerSettings, PixelSettings, NamedSettings):
    """One model to serve. Fields are documented and shown in the order of the classes, from the last one on."""

    input_tensor: str | tuple[str, ...] | None = Field(None, min_length=1, examples=["input:0", ["left:0", "right:0"]])
    """For frozen graphs (`.pb`): the name of the tensor that takes the images, the only placeholder that can by
    default, or a list of the placeholders of all inputs. Outputs are those that nothing in the graph reads, or the
    tensors that `output_names` names."""
    signature: str | None = None
    """For SavedModels: the signature to run; `serving_default` or the only one by default."""
    function: str | None = Field(None, examples=["detect"])
    """For SavedModels without signatures: the function of the model to run; `__call__` or the only one of one image
    input by default."""
    architecture: Annotated[str | None, OrPath(sources.is_architecture_path)] = Field(
        None, examples=["my_package.my_module:build"]
    )
    """For `.keras` and `.h5` files: the model that takes the file's weights, where the file has none or one that can't
    be read. A function without arguments that returns a Keras model, as `package.module:function`, or the path of a
    `.json` file that `model.to_json()` wrote. Importing a module runs it."""
    custom_objects: Pairs[str, str] = Field((), examples=[{"Patches": "my_package.layers:Patches"}])
    """For `.keras` and `.h5` files: where the classes and functions that Keras doesn't know are, as
    `{Name: package.module:Name}`. The name of a Lambda layer gives it that function, in place of the code in the file.
    Importing a module runs it."""
    safe_mode: bool = True
    """For `.keras` and `.h5` files: whether to refuse those that hold Python code. `false` runs it: only for files that
    you trust."""
    modes: tuple[Mode, ...] = Field((Mode.XLA,), min_length=1, examples=[["xla", "graph"]])
    """The modes that it offers; each is compiled and warmed for every bucket. `auto` also has `xla`, `graph` and,
    where it is installed, `openvino` compiled, and runs each bucket in the fastest."""
    precision: Precision = Precision.FLOAT32
    """The type that a Keras model computes in: `float32`, `bfloat16` or `float16`. Weights, preprocessing and outputs
    stay float32. Warm-up measures how far the answers then are from those in float32."""
    openvino_precision: Precision | None = None
    """The type that the mode `openvino` computes in, for models from any source; `precision` by default. Warm-up
    measures how far the answers then are from those in float32. `int8` needs a `calibration`."""
    calibration: Path | None = None
    """For `openvino_precision: int8`: the folder that `xlaserve calibrate` wrote for this very model."""
    verification: Literal["refuse", "warn", "off"] = "refuse"
    """Warm-up compares every program's answers to a few images with those that TensorFlow gives operation by operation.
    A program that is off by more than a thousandth of the largest number gets a warning. With `refuse`, a model fails
    if XLA or OpenVINO made one that is off by more than a hundredth, which rounding in float32 does not explain; `warn`
    serves it, `off` compares nothing. Narrower precisions, and the modes `graph` and `eager`, are never refused."""
    examples: ExampleSettings | None = Field(None, examples=[{"folder": "photos"}])
    """Images with the outputs that a notebook gave. Warm-up compares them with the model's own, from the decoder to the
    task, in every mode, and a model that is further off does not become ready: `folder`, `max_difference` and
    `min_agreement` (0.95). `VisionClient.save_examples` makes the folder."""
    batch_dependence: Literal["single", "refuse", "allow"] = "single"
    """Treatment of a model whose answer to an image depends on the other images of its batch, such as one that takes a
    mean over the batch: `single` serves it in batches of one, `refuse` fails it, `allow` serves it as any other."""
    disable_lowerings: tuple[Lowering, ...] = Field((), examples=[["winograd"]])
    """On a CPU, XLA runs some operations of models in another form, which is faster and gives the same result up to
    rounding: `float32` (of models that compute in less), `depthwise`, `grouped`, `stem`, `pointwise`, `small`,
    `winograd`, `normalization`, `pooling`, `resize` and `micro_batches`. Those named here are left as they are."""
    default_mode: Mode | None = None
    """The mode of a request that names none; the first of `modes` by default."""
    buckets: tuple[BucketSettings, ...] = Field(
        (*map(BucketSettings, (1, 2, 4, 8, 16)),), examples=[[1, 4, [1, 224, 224]]]
    )
    """The input shapes to compile: batch sizes such as `8`, or `[batch, height, width]`. Requests are padded to the
    cheapest of them, or split. `auto` measures candidates at warm-up, in the default mode, and keeps the set with the
    least expected cost."""
    auto_buckets: AutoBuckets = Field(AutoBuckets(), examples=[{"max_batch": 16}])
    """How `buckets: auto` chooses: `max_batch` (16), `max_buckets` (6), `max_compile_s` (300), `max_memory_mib` and
    `demand`."""
    resolutions: tuple[tuple[int, int], ...] = Field((), examples=[[[224, 224]]])
    """Heights and widths that plain batch sizes and `auto` are compiled for, where the model takes several; instead of
    `input_size`."""
    unmatched: Literal["reject", "background"] = "reject"
    """Treatment of pixels of a resolution without buckets: `reject` refuses them. `background`, where the network
    takes several sizes, runs them in graph mode while their buckets compile beside the traffic, and then in those."""
    max_background_resolutions: int = Field(4, ge=1, le=256)
    """Most resolutions that compile so, as long as the model is loaded, in each engine. Others are refused."""
    max_queue_delay_ms: float = Field(0.0, ge=0, le=10_000)
    """How long an incomplete batch may wait for more images while a lane is free. 0: an idle device never waits. Raise
    it only where throughput at low load matters more than latency."""
    shadow: ShadowSettings | None = Field(None, examples=[{"version": "canary", "share": 0.01}])
    """Runs a share of the requests in another version or mode as well, once they are answered and while the device is
    idle, and compares answers and latency: `version`, `mode` and `share` (0.01). `loadtest compare-versions` shows what
    was found."""
    max_queue_images: int | None = Field(None, ge=1)
    """Overrides the server's `max_queue_images`; no less than its largest bucket."""

    @field_validator("buckets", mode="before")
    @classmethod
    def _allow_auto_and_plain_batch_sizes(cls, value: Any) -> Any:
        if value == AUTO:
            return ()
        if not isinstance(value, (list, tuple)) or not value:
            raise ValueError(f"expected {AUTO}, or a list of batch sizes and of [batch, height, width]")
        return tuple((item,) if isinstance(item, int) else item for item in value)

    @field_serializer("buckets")
    def _show_buckets(self, value: tuple[BucketSettings, ...]) -> object:
        return [bucket.batch if bucket.height is None else bucket for bucket in value] or AUTO

    @field_validator("buckets")
    @classmethod
    def _check_buckets(cls, value: tuple[BucketSettings, ...]) -> tuple[BucketSettings, ...]:
        for bucket in value:
            if (bucket.height is None) != (bucket.width is None):
                raise ValueError("expected each bucket to be a batch size or [batch, height, width]")
            if any(side is not None and not 1 <= side <= 65_536 for side in bucket):
                raise ValueError("expected every number of a bucket to be from 1 to 65536")
        return value

    @field_validator("resolutions")
    @classmethod
    def _check_resolutions(cls, value: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        if not all(1 <= side <= 65_536 for size in value for side in size):
            raise ValueError("expected heights and widths to be from 1 to 65536")
        return value

    @field_validator("modes", "buckets", "resolutions", "disable_lowerings")
    @classmethod
    def _check_repeated(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if repeated := [shown(item) for item, number in Counter(value).items() if number > 1]:
            raise ValueError(f"expected each once, {', '.join(repeated)} is repeated")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.default_mode is not None and self.default_mode not in self.modes:
            raise ValueError(f"default_mode: expected one of modes ({', '.join(self.modes)}), got {self.default_mode}")
        if self.resolutions and self.input_size:
            raise ValueError("input_size and resolutions are both set; expected one of them")
        if self.outputs and self.task not in ("auto", "tensors"):
            raise ValueError(f"outputs: expected each to have its task there, and no other, got task {self.task}")
        self._check_int8()
        if self.max_queue_images is not None:
            self.check_queue(self.max_queue_images)
        if self.shadow is not None:
            self.shadow.check(self.version, self.modes)
        return self

    def _check_int8(self) -> None:
        is_int8 = self.openvino_precision is Precision.INT8
        if self.precision is Precision.INT8:
            raise ValueError("precision: expected float32, bfloat16 or float16; int8 is for openvino_precision alone")
        if is_int8 and self.calibration is None:
            raise ValueError(
                "openvino_precision int8 needs a calibration: the folder that xlaserve calibrate wrote for the model"
            )
        if self.calibration is not None and not is_int8:
            raise ValueError(f"calibration: expected openvino_precision: int8 with it, got {self.openvino_precision}")
        if is_int8 and self.precision is not Precision.FLOAT32:
            raise ValueError(
                f"openvino_precision int8 is made of float32: expected that precision, got {self.precision}"
            )

    def check_queue(self, max_images: int) -> None:
        """Raises ValueError where too few images may wait to fill the largest bucket."""
        if "buckets" in self.model_fields_set and max_images < self.largest_batch:
            raise ValueError(
                f"max_queue_images: expected at least {self.largest_batch}, the largest bucket of model {self.name},"
                f" got {max_images}"
            )

    @property
    def title(self) -> str:
        """The model's name in messages, with its version unless none is configured."""
        return f"{self.name} version {self.version}" if "version" in self.model_fields_set else self.name

    @property
    def alone(self) -> ModelSettings:
        """The same for another process, without what refers to other versions."""
        return self.model_copy(update={**SHARED, "shadow": None})

    @property
    def largest_batch(self) -> int:
        """The batch size of the largest bucket; with `buckets: auto` of the largest candidate."""
        return max((bucket.batch for bucket in self.buckets), default=self.auto_buckets.max_batch)

    @property
    def most_programs(self) -> int:
        """How many programs warm-up compiles; with `buckets: auto`, at most."""
        sized = sum(bucket.height is not None for bucket in self.buckets)
        plain = len(self.buckets or self.auto_buckets.candidates) - sized
        return len(self.compiled_modes) * (sized + plain * max(1, len(self.resolutions)))

    @property
    def only_size(self) -> tuple[int, int] | None:
        """The height and width of the images, without those of its buckets; None where it names none or several."""
        return self.resolutions[0] if len(self.resolutions) == 1 else self.input_size

    @property
    def has_auto_buckets(self) -> bool:
        """Whether `buckets` is `auto`: then the tuple of that name is empty."""
        return not self.buckets

    @property
    def compiled_modes(self) -> tuple[Mode, ...]:
        """The modes to compile: those offered, and those that `auto` chooses from."""
        choice = chain.from_iterable(mode.traits.choice for mode in self.modes)
        return tuple(mode for mode in dict.fromkeys((*self.modes, *choice)) if not mode.traits.choice)

    def needs(self, mode: Mode) -> bool:
        """Returns whether the model is to fail where a mode that is compiled for it does: `auto` does without."""
        return mode in self.modes

    def precision_in(self, mode: Mode) -> Precision:
        """Returns what the programs of a mode compute in."""
        own = self.openvino_precision if mode is Mode.OPENVINO else None
        return own or self.precision

    @property
    def effective_default_mode(self) -> Mode:
        """The mode of a request that names none."""
        return self.default_mode or self.modes[0]
