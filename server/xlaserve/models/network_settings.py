"""Checks of settings that depend on the network: buckets, sizes without buckets, names of outputs."""

from __future__ import annotations

from xlaserve.config import (
    CUTS,
    Bucket,
    BucketSettings,
    Color,
    Decoding,
    Fit,
    ModelSettings,
    PixelRange,
    ResizeLibrary,
)
from xlaserve.engine.program import AnySize
from xlaserve.errors import ModelFailed
from xlaserve.images import tensorflow_jpeg
from xlaserve.images.image_input import PIXEL_TYPES
from xlaserve.models.networks.network import NO_SIZE, Network, Size
from xlaserve.models.networks.preparation import fit_of
from xlaserve.models.task import ImageToImage, Task, Tensors, gives_pixels


def buckets_of(settings: ModelSettings, network: Network) -> tuple[Bucket, ...]:
    """Returns the buckets to compile, in order. Raises ModelFailed where the network does not take one."""
    sides = zip(network.size, network.default_size, strict=True)
    height, width = (default if side is None else side for side, default in sides)
    field = "resolutions" if settings.resolutions else "input_size"
    own = settings.resolutions or (settings.input_size or (height, width),)
    for resolution in own:
        _check_size(field, resolution, network)
    chosen = settings.buckets or tuple(map(BucketSettings, settings.auto_buckets.candidates))
    if network.batch is not None and "buckets" not in settings.model_fields_set:
        chosen = (BucketSettings(network.batch),)
    buckets = set()
    for bucket in chosen:
        if network.batch not in (None, bucket.batch):
            only = network.batch
            raise ModelFailed(
                f"buckets: the model was made for batches of {only} only; write buckets: [{only}], got {bucket.batch}"
            )
        for height, width in own if bucket.height is None else ((bucket.height, bucket.width),):
            if height is None or width is None:
                raise ModelFailed(
                    "input_size: the model takes several sizes; set it, or resolutions, or sized buckets; write"
                    " input_size: [224, 224], with the height and width of the images that it was trained on"
                )
            _check_size("buckets", (height, width), network)
            buckets.add(Bucket(bucket.batch, height, width))
    return tuple(sorted(buckets))


def check_output_name(settings: ModelSettings, task: Task) -> None:
    """Raises ModelFailed where one name is set for several outputs."""
    if settings.output_name and len(task.outputs) > 1:
        names = ", ".join(output.name for output in task.outputs)
        raise ModelFailed(
            f"output_name: expected none, as the model has several outputs ({names}); leave output_name out"
        )


def check_decode(settings: ModelSettings) -> None:
    """Raises ModelFailed where a package for the decoding is missing."""
    if settings.decode is Decoding.TENSORFLOW and not tensorflow_jpeg.is_available():
        raise ModelFailed("decode: tensorflow needs simplejpeg; pip install 'simplejpeg>=1.8,<2'")


def check_equalize(settings: ModelSettings, network: Network) -> None:
    """Raises ModelFailed where histograms are to be equalized of images that are not grey of 8 bits."""
    image = network.image
    if settings.equalize and (image.color is not Color.GREY or image.is_deep):
        kind = image.color or image.text()
        raise ModelFailed(
            f"equalize: expected a model of grey images of 8 bits, got one of {kind}, {image.dtype}; leave equalize out"
        )


def check_depth(settings: ModelSettings, network: Network) -> None:
    """Raises ModelFailed where a depth is not that of the model's images, or where settings are for 8 bits alone."""
    image = network.image
    if settings.depth is not None and image.channels and image.dtype != PIXEL_TYPES[settings.depth]:
        raise ModelFailed(
            f"depth: expected none, as the model takes {image.dtype} pixels, got {settings.depth}; leave depth out"
        )
    if not image.is_deep:
        return
    if settings.pixel_range is not PixelRange.LEVELS:
        raise ModelFailed(
            f"pixel_range: expected none, as {image.dtype} pixels are taken as they are; leave pixel_range out"
        )
    if settings.resize is not None and settings.resize.library is ResizeLibrary.OPENCV:
        raise ModelFailed(
            f"resize: expected tensorflow or pillow for {image.dtype} pixels, got opencv; write resize: {{library:"
            " tensorflow}, or depth: 8"
        )


def effective_fit(settings: ModelSettings, task: Task, trained: Fit | None) -> Fit:
    """Returns the fit of a model: the settings' one, or one by its task and by `trained`, the fit of its training where
    its source knows it."""
    cuts_pixels = trained in CUTS and gives_pixels(task)
    return settings.fit or fit_of(task.default_fit, None if cuts_pixels else trained)


def check_fit(settings: ModelSettings, task: Task, trained: Fit | None) -> None:
    """Raises ModelFailed where a fit leaves parts of an image out for which an answer is expected, and where the
    effective fit has no shorter side."""
    fit = effective_fit(settings, task, trained)
    if settings.shorter_side is not None and fit is not Fit.CENTER_CROP:
        raise ModelFailed(f"shorter_side: expected fit: center_crop with it, got {fit}; write fit: center_crop")
    if settings.fit in CUTS and gives_pixels(task):
        kept = ", ".join(fit for fit in Fit if fit not in CUTS)
        raise ModelFailed(
            f"fit: expected one of {kept} for a model whose answer has the image's own pixels, as {settings.fit} leaves"
            f" some of them out; write fit: {task.default_fit}"
        )


def check_unmatched(settings: ModelSettings, network: Network) -> None:
    """Raises ModelFailed where sizes without buckets are to be served that the network does not take."""
    if settings.unmatched == "reject":
        return
    task = network.task
    if isinstance(task, ImageToImage | Tensors) and any(-1 in output.shape[1:] for output in task.outputs):
        # Memory for outputs is allocated beforehand.
        raise ModelFailed(
            "unmatched: expected reject, as only a run shows how large these outputs are, got background; write"
            " unmatched: reject"
        )
    if None not in network.size:
        raise ModelFailed(
            f"unmatched: expected reject, as the model's only size is {_by(network.size)}, got background; write"
            " unmatched: reject"
        )
    if not isinstance(network.program, AnySize):
        raise ModelFailed(
            "unmatched: expected reject, as this kind of model is fixed to its buckets, got background; write"
            " unmatched: reject"
        )


def _check_size(field: str, got: Size, network: Network) -> None:
    if network.size == NO_SIZE != got:
        raise ModelFailed(
            f"{field}: expected no height and width, as the model takes no images, got {_by(got)}; leave them out"
        )
    if any(wanted is not None and wanted != side for side, wanted in zip(got, network.size, strict=True)):
        raise ModelFailed(
            f"{field}: expected the model's only size, {_by(network.size)}, got {_by(got)}; leave the height and width"
            " out, or export the model with sides of None"
        )
    if any(side is not None and side % network.multiple for side in got):
        sides = ", ".join(str(-(-(side or 1) // network.multiple) * network.multiple) for side in got)
        raise ModelFailed(
            f"{field}: expected multiples of {network.multiple}, got {_by(got)}; the next ones are [{sides}]"
        )


def _by(size: Size) -> str:
    return "x".join("any" if side is None else str(side) for side in size)
