"""Modes that a model can run in, the precisions that it can compute in, and the lowerings of XLA on a CPU."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple


class ModeTraits(NamedTuple):
    """Properties of a mode's programs."""

    uses_compiler: bool = False
    """A compiler makes them or parts of them: those that compute something other than their model are refused."""
    is_jit: bool = False
    """XLA compiles each as one program: several at a time, with lowerings, and, where a compile cache is filled, in
    `models.networks.cached_program`."""
    is_kept: bool = False
    """The compile cache keeps what they are made of, so that a later start need not build the model."""
    choice: tuple[Mode, ...] = ()
    """The modes of which it runs each bucket in the fastest, in the first unless another is clearly faster; it then has
    no programs of its own."""
    is_checked: bool = True
    """Whether `xlaserve check` runs it without being asked to."""


class Mode(StrEnum):
    """How a model is run. What the server knows of a mode is its row in `TRAITS`, and mypy asks for its programs in
    `programs.tf.tensorflow_program`; CONTRIBUTING.md says what else names it."""

    __hash__ = str.__hash__  # that of Enum is a function in Python, and each request looks up its mode

    EAGER = "eager"
    """Operation by operation, from Python."""
    GRAPH = "graph"
    """A frozen graph, without XLA."""
    XLA = "xla"
    """A `tf.function` with `jit_compile=True`."""
    AUTOCLUSTER = "autocluster"
    """A frozen graph of which TensorFlow gives XLA the parts, the clusters, that XLA can compile."""
    OPENVINO = "openvino"
    """The frozen graph, compiled by OpenVINO for a CPU."""
    AUTO = "auto"
    """Each bucket in the mode that warm-up measured to be the fastest."""

    @property
    def traits(self) -> ModeTraits:
        """Its row of the table."""
        return TRAITS[self]


TRAITS: Final = {
    Mode.EAGER: ModeTraits(),
    Mode.GRAPH: ModeTraits(is_kept=True),
    Mode.AUTOCLUSTER: ModeTraits(uses_compiler=True, is_checked=False),
    Mode.XLA: ModeTraits(uses_compiler=True, is_jit=True, is_kept=True),
    Mode.OPENVINO: ModeTraits(uses_compiler=True, is_kept=True, is_checked=False),
    Mode.AUTO: ModeTraits(choice=(Mode.XLA, Mode.GRAPH, Mode.OPENVINO)),
}


class Precision(StrEnum):
    """The type that a model computes in; its outputs are always float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    """Half the bits, with float32's range: faster where the device multiplies it (AVX512-BF16, AMX, newer GPUs)."""
    FLOAT16 = "float16"
    """Half the bits, with more digits and a small range: for GPUs. Large activations overflow."""
    INT8 = "int8"
    """A quarter of the bits, in ranges that `xlaserve calibrate` found: for the mode `openvino` alone."""


class Lowering(StrEnum):
    """Another way to compute some operations, for XLA on a CPU; docs/lowering.md says what each brings."""

    FLOAT32 = "float32"
    """Models that compute in less, in float32: XLA on a CPU converts to it and back at each operation otherwise."""
    DEPTHWISE = "depthwise"
    """Depthwise and separable convolutions as sums of shifted products."""
    GROUPED = "grouped"
    """Convolutions with groups as sums or as fewer convolutions."""
    STEM = "stem"
    """Convolutions of a few channels, such as a network's first, as sums of shifted outer products."""
    POINTWISE = "pointwise"
    """1 x 1 convolutions with strides as matrix products of the pixels that they read."""
    SMALL = "small"
    """Convolutions of images smaller than the kernel, without what of it meets nothing but padding."""
    WINOGRAD = "winograd"
    """3 x 3 convolutions by Winograd's minimal filtering."""
    NORMALIZATION = "normalization"
    """Batch normalization with its scale and offset computed ahead, layer normalization of what was computed once."""
    POOLING = "pooling"
    """Maximum and average pooling over small windows as shifted images, over all pixels as sums of slices."""
    RESIZE = "resize"
    """Bilinear resizing as means of gathered rows and columns."""
    MICRO_BATCHES = "micro_batches"
    """Batches computed two images at a time, where each lane has one thread."""
