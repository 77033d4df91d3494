"""The part of a model's settings that is about its inputs: images on their way to its pixels, and their names."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from xlaserve.config.base import Frozen
from xlaserve.config.image_settings import (
    MAX_GREY16,
    Border,
    Color,
    Decoding,
    Depth,
    Fit,
    Grey16,
    Layout,
    PixelRange,
    Window,
)
from xlaserve.config.preprocess_settings import NamedPreprocess, ScalingSettings
from xlaserve.config.resize_settings import ResizeLibrary, ResizeSettings


class PixelSettings(Frozen):
    """How images become a model's pixels, and how clients name its inputs."""

    preprocess: Literal["auto", NamedPreprocess] | ScalingSettings = Field(
        "auto", examples=["unit", {"divisor": 255, "mean": [0.485, 0.456, 0.406], "deviation": [0.229, 0.224, 0.225]}]
    )
    """Preprocessing of pixels from 0 to 255 inside the compiled program: `tf` scales to -1..1, `unit` to 0..1,
    `torch` RGB to 0..1 and then by ImageNet's mean and deviation, `caffe` reorders RGB to BGR and subtracts ImageNet's
    mean, `standardize` brings each image to a mean of 0 and a deviation of 1 (`tf.image.per_image_standardization`),
    `none` passes 0..255. A mapping has numbers of one's own: `(level / divisor - mean) / deviation`, such as
    `{mean: 127, deviation: 128}`. `auto` is what Keras, KerasCV or KerasHub define for the family or the preset, and
    `none` for other sources."""
    input_size: tuple[int, int] | None = Field(None, examples=[[224, 224]])
    """Height and width, for a model that takes several; the model's own by default."""
    fit: Fit | None = None
    """How encoded images come to have the model's size: `resize` stretches them, `letterbox` keeps their aspect ratio,
    centred on grey, `pad` puts them at the top left on black and never enlarges them, `crop` cuts their middle to the
    model's aspect ratio before it is resized, `center_crop` resizes them to `shorter_side` and cuts the middle of that,
    `reject` refuses another size. By default `letterbox` for detection, segmentation, keypoints and image, whose
    answers are of shapes and places, else what the training did, where the source tells it (a preset of KerasHub,
    Teachable Machine, the published weights of Keras Applications), or `resize`."""
    shorter_side: int | None = Field(None, ge=1, le=65_536, examples=[256])
    """For `fit: center_crop`: the pixels of an image's shorter side before its middle is cut out; 256 for each 224 of
    the model's own by default. No less than the model's size."""
    border: Border | None = Field(None, examples=[[114, 114, 114]])
    """For `letterbox` and `pad`: what an image does not cover, as a level from 0 to 255 or as `[red, green, blue]`; 114
    for `letterbox` (with `depth: 16` the same grey, 29298 of 65535) and 0 for `pad` by default."""
    resize: ResizeSettings | None = Field(None, examples=[{"library": "tensorflow", "filter": "bilinear"}])
    """How encoded images are resized: `library`, `filter` and `antialias`. Write what resized the images in training:
    a model that has seen sharp pixels answers worse to smoothed ones. By default what the source tells of its training:
    TensorFlow's `bilinear` for models that Keras has saved, a preset's own for KerasHub's, else Pillow's `bilinear`.
    The log says which, and why."""
    decode: Decoding | None = None
    """How JPEG images are decoded. `exact` decodes every pixel, as Pillow does. `tensorflow` does so with the less
    accurate transform of `tf.io.decode_jpeg`, about a level apart; it is the default for models that Keras has saved,
    where the package simplejpeg is installed, and `exact` otherwise. `fast` has the decoder halve the sides of large
    ones as long as they are at least twice what `fit` brings them to, which takes less time and memory; pixels then
    differ by a few levels, and warm-up measures how far the answers do. Only images with at least four times the
    model's height and width gain: for 224x224, 1280x960 does and 500x375 does not. Boxes and maps are in the original's
    pixels all the same. PNG, WebP and pictures that answers are drawn into are always decoded exactly."""
    grey16: Grey16 | Window | None = None
    """How grey PNG files of 16 bits become levels from 0 to 255. `high_byte` takes the upper 8 bits, which leaves
    levels 0 to 15 of values up to 4095, as X-ray devices and microscopes write them. `largest` makes the largest value
    of each image white. `[low, high]` is a window: values up to `low` become black, those from `high` on white. Unset,
    the upper 8 bits are taken, and the answer to such an image has a warning. PNG files of 16 bits in colour or with
    transparency always keep the upper 8."""
    color: Color | None = None
    """The channels of the model's pixels, to which encoded images are converted: `grey` (luma, as Pillow's mode L),
    `rgb`, `bgr` and `yuv` (both as OpenCV has them) or `rgba`. By default by their number: `grey` for one channel,
    `rgb` for three, `rgba` for four; a model of another number takes only pixels. Pixels in requests are the model's
    own already and stay as they are."""
    equalize: bool = False
    """Whether the histogram of each encoded image is equalized once it has the model's size and before its border, as
    `cv2.equalizeHist` does; for models of grey images. Pixels in requests stay as they are."""
    layout: Layout | None = None
    """Where the image input of a file or SavedModel has its channels: `channels_last` or `channels_first`. By default
    first where there are 1, 3 or 4 and both other sides are longer, else last. Requests to a model with its channels
    first may send pixels in either layout. `none` is for inputs that have the shape of images and hold none, such as
    sequences `[n, 50, 32]` or feature maps: they are tensors, of the model's own type, passed as they come."""
    depth: Depth | None = None
    """The depth of the model's pixels: `8`, whole numbers from 0 to 255; `16`, from 0 to 65535; or `float`, any
    float32, such as heights or temperatures. By default `16` for models that declare uint16, else `8`. With `16` and
    `float`, numbers in requests reach the model as they are, of any type that holds them, and so does what encoded
    images hold: 0 to 65535 of grey PNG files of 16 bits, for which `grey16` is not needed then, 0 to 255 of all others.
    With `float` and TensorFlow's `resize`, pixels are not rounded. `preprocess` computes as with 8 bits: `unit` divides
    by 255."""
    pixel_range: PixelRange = PixelRange.LEVELS
    """The range of FP16 and FP32 pixels in requests, with `depth: 8`: `0..255` or `0..1`. A request says otherwise with
    the parameter `pixel_range`. Other types and encoded images are from 0 to 255 always."""
    metadata_input: Literal["pixels", "image"] = "pixels"
    """The input that metadata and configuration show to clients of KServe and Triton, many of which fill every input
    that they find there. Requests may send the other one all the same."""
    input_name: str = Field("", max_length=128)
    """The input's name for clients of the Open Inference Protocol and of TensorFlow Serving that were written for
    another server: metadata show it, and requests may use it in place of `pixels` or, with encoded images, of
    `image`."""
    output_name: str = Field("", max_length=128)
    """The output's name for the same clients, where a model has only one, in place of `scores`, `class_map`,
    `embedding` or `image`."""
    strict_parameters: bool = False
    """Refuse requests with parameters that this server does not know, for finding misspelled ones. Otherwise they are
    ignored, as clients send those of other servers."""

    @field_validator("grey16", mode="before")
    @classmethod
    def _check_grey16(cls, value: Any) -> Any:
        is_window = isinstance(value, (list, tuple)) and len(value) == 2 and all(type(one) is int for one in value)
        if value is None or value in [*Grey16] or (is_window and 0 <= value[0] < value[1] <= MAX_GREY16):
            return value
        raise ValueError(f"expected {' or '.join(Grey16)}, or a window [low, high] from 0 to {MAX_GREY16}")

    @field_validator("border")
    @classmethod
    def _check_border(cls, value: Border | None) -> Border | None:
        levels = value if isinstance(value, tuple) else () if value is None else (value,)
        if not all(0 <= level <= 255 for level in levels):
            raise ValueError("expected a level from 0 to 255, or [red, green, blue]")
        return value

    @field_validator("input_size")
    @classmethod
    def _check_input_size(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and not all(1 <= side <= 65_536 for side in value):
            raise ValueError("expected height and width to be from 1 to 65536")
        return value

    @model_validator(mode="after")
    def _check_pixels(self) -> Self:
        """Raises ValueError for fields that don't go together whatever the model is; a load checks them with it."""
        if self.shorter_side is not None and self.fit not in (None, Fit.CENTER_CROP):
            raise ValueError(f"shorter_side: expected fit: center_crop with it, got {self.fit}")
        if self.depth in (None, 8):
            return self
        if self.resize is not None and self.resize.library is ResizeLibrary.OPENCV:
            raise ValueError(f"resize: expected tensorflow or pillow with depth: {self.depth}, got opencv")
        if self.pixel_range is not PixelRange.LEVELS:
            raise ValueError(f"pixel_range: expected none with depth: {self.depth}, got {self.pixel_range}")
        if self.equalize:
            raise ValueError(f"equalize: expected none with depth: {self.depth}, as it is for levels of 8 bits")
        return self
