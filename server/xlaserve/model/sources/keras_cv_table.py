"""The architectures of KerasCV, as the arguments of its generic classes.

KerasCV's own named constructors and presets ask a hub for these numbers, even without weights. They come from the
papers that KerasCV's classes name, and give as many parameters as KerasCV states for its presets, with exceptions: for
EfficientNetV1 and Lite it states those of an older class, which expanded the first stack too, for MiT those with a head
of ten classes, for DenseNet none. DenseNet, EfficientNetV1 and MobileNetV3 have as many as in Keras Applications.

All of these backbones scale pixels from 0..255 to 0..1 themselves (`include_rescaling`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Backbone:
    """One architecture."""

    constructor: str
    """A class of `keras_cv.models`."""
    side: int
    """Pixels of its own input size, which is square."""
    arguments: Mapping[str, Any]
    fixed_size: bool = False
    """Whether it must be built for one input size."""
    multiple: int = 1
    """What height and width have to be multiples of."""


@dataclass(frozen=True)
class Head:
    """What is put on a backbone for a task."""

    constructor: str
    """A class of `keras_cv.models`."""
    task: str
    classes: int
    """The default number of classes: that of the data set that its published weights were trained on."""
    side: int
    backbones: tuple[str, ...]
    """The backbones that the catalog lists for it."""
    arguments: Mapping[str, Mapping[str, Any]]
    """Arguments in addition to the common ones, by backbone."""


def _resnet(constructor: str, ending: str) -> dict[str, Backbone]:
    common = {"stackwise_filters": [64, 128, 256, 512], "stackwise_strides": [1, 2, 2, 2]}
    depths = {
        18: ("basic_block", [2, 2, 2, 2]),
        34: ("basic_block", [3, 4, 6, 3]),
        50: ("block", [3, 4, 6, 3]),
        101: ("block", [3, 4, 23, 3]),
        152: ("block", [3, 8, 36, 3]),
    }
    return {
        f"ResNet{depth}{ending}": Backbone(
            constructor, 224, {**common, "block_type": block, "stackwise_blocks": blocks}
        )
        for depth, (block, blocks) in depths.items()
    }


def _darknet(
    constructor: str, prefix: str, side: int, multiple: int, variants: Mapping[str, tuple[list[int], list[int]]]
) -> dict[str, Backbone]:
    return {
        prefix + name: Backbone(
            constructor, side, {"stackwise_channels": channels, "stackwise_depth": depths}, multiple=multiple
        )
        for name, (channels, depths) in variants.items()
    }


_MBCONV: Final = {
    "stackwise_kernel_sizes": [3, 3, 5, 3, 5, 5, 3],
    "stackwise_num_repeats": [1, 2, 2, 3, 3, 4, 1],
    "stackwise_input_filters": [32, 16, 24, 40, 80, 112, 192],
    "stackwise_output_filters": [16, 24, 40, 80, 112, 192, 320],
    "stackwise_expansion_ratios": [1, 6, 6, 6, 6, 6, 6],
    "stackwise_strides": [1, 2, 2, 2, 1, 2, 1],
}
_EFFICIENTNET_SCALES: Final = (
    (1.0, 1.0),
    (1.0, 1.1),
    (1.1, 1.2),
    (1.2, 1.4),
    (1.4, 1.8),
    (1.6, 2.2),
    (1.8, 2.6),
    (2.0, 3.1),
)
"""Width and depth, B0 to B7."""


def _scaled(constructor: str, prefix: str, sides: tuple[int, ...], common: Mapping[str, Any]) -> dict[str, Backbone]:
    # Built for one size: with an unknown one it pads as if every feature map had even sides.
    return {
        f"{prefix}B{number}": Backbone(
            constructor,
            side,
            {**common, "width_coefficient": width, "depth_coefficient": depth},
            fixed_size=True,
        )
        for number, (side, (width, depth)) in enumerate(zip(sides, _EFFICIENTNET_SCALES, strict=False))
    }


def _efficientnet_v2(repeats: list[int], filters: list[int], width: float = 1.0, depth: float = 1.0) -> dict[str, Any]:
    """`filters`: the stem's and then each stack's."""
    fused, unfused = 3, len(repeats) - 3
    return {
        "stackwise_kernel_sizes": [3] * len(repeats),
        "stackwise_num_repeats": repeats,
        "stackwise_input_filters": filters[:-1],
        "stackwise_output_filters": filters[1:],
        "stackwise_expansion_ratios": [1, 4, 4, 4, 6, 6, 6][: len(repeats)],
        "stackwise_squeeze_and_excite_ratios": [0.0] * fused + [0.25] * unfused,
        "stackwise_strides": [1, 2, 2, 2, 1, 2, 1][: len(repeats)],
        "stackwise_conv_types": ["fused"] * fused + ["unfused"] * unfused,
        "width_coefficient": width,
        "depth_coefficient": depth,
    }


_V2_B: Final = ([1, 2, 2, 3, 5, 8], [32, 16, 32, 48, 96, 112, 192])
_EFFICIENTNET_V2: Final = {
    "S": (384, _efficientnet_v2([2, 4, 4, 6, 9, 15], [24, 24, 48, 64, 128, 160, 256])),
    "M": (480, _efficientnet_v2([3, 5, 5, 7, 14, 18, 5], [24, 24, 48, 80, 160, 176, 304, 512])),
    "L": (480, _efficientnet_v2([4, 7, 7, 10, 19, 25, 7], [32, 32, 64, 96, 192, 224, 384, 640])),
    "B0": (224, _efficientnet_v2(*_V2_B)),
    "B1": (240, _efficientnet_v2(*_V2_B, 1.0, 1.1)),
    "B2": (260, _efficientnet_v2(*_V2_B, 1.1, 1.2)),
    "B3": (300, _efficientnet_v2(*_V2_B, 1.2, 1.4)),
}

_MOBILENET_V3: Final = {
    "Small": {
        "stackwise_expansion": [1, 72 / 16, 88 / 24, 4, 6, 6, 3, 3, 6, 6, 6],
        "stackwise_filters": [16, 24, 24, 40, 40, 40, 48, 48, 96, 96, 96],
        "stackwise_kernel_size": [3, 3, 3] + [5] * 8,
        "stackwise_stride": [2, 2, 1, 2, 1, 1, 1, 1, 2, 1, 1],
        "stackwise_se_ratio": [0.25, None, None] + [0.25] * 8,
        "stackwise_activation": ["relu"] * 3 + ["hard_swish"] * 8,
    },
    "Large": {
        "stackwise_expansion": [1, 4, 3, 3, 3, 3, 6, 2.5, 2.3, 2.3, 6, 6, 6, 6, 6],
        "stackwise_filters": [16, 24, 24, 40, 40, 40, 80, 80, 80, 80, 112, 112, 160, 160, 160],
        "stackwise_kernel_size": [3, 3, 3, 5, 5, 5, 3, 3, 3, 3, 3, 3, 5, 5, 5],
        "stackwise_stride": [1, 2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1],
        "stackwise_se_ratio": [None] * 3 + [0.25] * 3 + [None] * 4 + [0.25] * 5,
        "stackwise_activation": ["relu"] * 6 + ["hard_swish"] * 9,
    },
}

_MIT: Final = {
    "B0": ([2, 2, 2, 2], [32, 64, 160, 256]),
    "B1": ([2, 2, 2, 2], [64, 128, 320, 512]),
    "B2": ([3, 4, 6, 3], [64, 128, 320, 512]),
    "B3": ([3, 4, 18, 3], [64, 128, 320, 512]),
    "B4": ([3, 8, 27, 3], [64, 128, 320, 512]),
    "B5": ([3, 6, 40, 3], [64, 128, 320, 512]),
}

BACKBONES: Final[Mapping[str, Backbone]] = {
    **_resnet("ResNetBackbone", ""),
    **_resnet("ResNetV2Backbone", "V2"),
    **_darknet(
        "CSPDarkNetBackbone",
        "CSPDarkNet",
        224,
        2,  # its first layer takes every other pixel
        {
            "Tiny": ([48, 96, 192, 384], [1, 3, 3, 1]),
            "S": ([64, 128, 256, 512], [1, 3, 3, 1]),
            "M": ([96, 192, 384, 768], [2, 6, 6, 2]),
            "L": ([128, 256, 512, 1024], [3, 9, 9, 3]),
            "XL": ([170, 340, 680, 1360], [4, 12, 12, 4]),
        },
    ),
    **{
        f"DenseNet{depth}": Backbone("DenseNetBackbone", 224, {"stackwise_num_repeats": repeats})
        for depth, repeats in {121: [6, 12, 24, 16], 169: [6, 12, 32, 32], 201: [6, 12, 48, 32]}.items()
    },
    **_scaled(
        "EfficientNetV1Backbone",
        "EfficientNetV1",
        (224, 240, 260, 300, 380, 456, 528, 600),
        {**_MBCONV, "stackwise_squeeze_and_excite_ratios": [0.25] * 7},
    ),
    **{
        f"EfficientNetV2{name}": Backbone("EfficientNetV2Backbone", side, arguments)
        for name, (side, arguments) in _EFFICIENTNET_V2.items()
    },
    **_scaled("EfficientNetLiteBackbone", "EfficientNetLite", (224, 240, 260, 280, 300), _MBCONV),
    **{
        f"MobileNetV3{name}": Backbone("MobileNetV3Backbone", 224, arguments)
        for name, arguments in _MOBILENET_V3.items()
    },
    **{
        f"MiT{name}": Backbone(
            "MiTBackbone", 224, {"depths": depths, "embedding_dims": dimensions}, fixed_size=True, multiple=32
        )
        for name, (depths, dimensions) in _MIT.items()
    },
    **_darknet(
        "YOLOV8Backbone",
        "YOLOV8",
        640,
        1,
        {
            "XS": ([32, 64, 128, 256], [1, 2, 2, 1]),
            "S": ([64, 128, 256, 512], [1, 2, 2, 1]),
            "M": ([96, 192, 384, 576], [2, 4, 4, 2]),
            "L": ([128, 256, 512, 512], [3, 6, 6, 3]),
            "XL": ([160, 320, 640, 640], [3, 6, 6, 3]),
        },
    ),
}
"""By the name that follows `keras_cv:`; KerasCV's own constructors have `Backbone` after it."""

HEADS: Final[Mapping[str, Head]] = {
    "YOLOV8Detector": Head(
        "YOLOV8Detector",
        "detection",
        classes=20,  # Pascal VOC
        side=640,
        backbones=("YOLOV8XS", "YOLOV8S", "YOLOV8M", "YOLOV8L", "YOLOV8XL", "CSPDarkNetS", "ResNet50"),
        # As KerasCV advises: deeper for the larger ones.
        arguments={
            "YOLOV8XS": {"fpn_depth": 1},
            "YOLOV8S": {"fpn_depth": 1},
            "YOLOV8L": {"fpn_depth": 3},
            "YOLOV8XL": {"fpn_depth": 3},
        },
    ),
    "RetinaNet": Head(
        "RetinaNet",
        "detection",
        classes=20,
        side=512,
        backbones=("ResNet18", "ResNet50", "ResNet101", "ResNet50V2", "EfficientNetV2B0", "MobileNetV3Large"),
        arguments={},
    ),
    "DeepLabV3Plus": Head(
        "DeepLabV3Plus",
        "segmentation",
        classes=21,  # Pascal VOC and the background
        side=512,
        backbones=("ResNet18V2", "ResNet50V2", "ResNet101V2", "ResNet50", "EfficientNetV2S", "MobileNetV3Large"),
        arguments={},
    ),
    "SegFormer": Head(
        "SegFormer",
        "segmentation",
        classes=19,  # Cityscapes
        side=512,
        backbones=("MiTB0", "MiTB1", "MiTB2", "MiTB3", "MiTB4", "MiTB5"),
        arguments={},
    ),
}
"""By the name that follows `keras_cv:`, before a dash and the backbone's name."""

CLASSIFIERS: Final = tuple(name for name, backbone in BACKBONES.items() if backbone.constructor != "YOLOV8Backbone")
"""The backbones that the catalog lists as classifiers."""
IMAGENET_CLASSES: Final = 1000


def names() -> tuple[str, ...]:
    """Returns every name that the catalog lists: backbones as classifiers, then `<Head>-<Backbone>`."""
    return (*CLASSIFIERS, *(f"{head}-{backbone}" for head, known in HEADS.items() for backbone in known.backbones))
