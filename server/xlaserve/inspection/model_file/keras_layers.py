"""Layers of Keras in a model's configuration, without Keras: which there are, and which matter for serving."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from xlaserve.models.sources import keras_config, keras_lambda
from xlaserve.models.sources.keras_config import Json

SCALING: Final = ("Rescaling", "Normalization")
"""Layers that scale pixels."""
NOTED: Final = (*SCALING, "Resizing", "CenterCrop", "Lambda", "TFOpLambda", "TFSMLayer", "TrueDivide")
"""Layers that matter for serving, besides those of augmentation, whose names begin with Random."""
MODELS: Final = ("Functional", "Model", "Sequential")
_BUILT_IN: Final = """
    Activation ActivityRegularization AdaptiveAveragePooling1D AdaptiveAveragePooling2D AdaptiveAveragePooling3D
    AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D Add AdditiveAttention AlphaDropout Attention
    AugMix AutoContrast Average AveragePooling1D AveragePooling2D AveragePooling3D BatchNormalization
    BatchNormalizationV1 BatchNormalizationV2 Bidirectional CategoryEncoding CenterCrop Concatenate
    ContrastLimitedAdaptiveHistogramEqualization Conv1D Conv1DTranspose Conv2D Conv2DTranspose Conv3D
    Conv3DTranspose ConvLSTM1D ConvLSTM2D ConvLSTM3D Convolution2D Cropping1D Cropping2D Cropping3D CutMix Dense
    DepthwiseConv1D DepthwiseConv2D Discretization Dot Dropout ELU EinsumDense Embedding Equalization Flatten GRU
    GRUCell GaussianDropout GaussianNoise GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D
    GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D GroupNormalization GroupedQueryAttention
    HashedCrossing Hashing Identity InputLayer IntegerLookup LSTM LSTMCell Lambda LayerNormalization LeakyReLU
    Masking MaxNumBoundingBoxes MaxPooling1D MaxPooling2D MaxPooling3D Maximum MelSpectrogram Minimum MixUp
    MultiHeadAttention Multiply Normalization PReLU Permute Pipeline RMSNormalization RNN RandAugment ReLU
    RepeatVector Rescaling Reshape Resizing ReversibleEmbedding STFTSpectrogram SeparableConv1D SeparableConv2D
    SimpleRNN SimpleRNNCell SlicingOpLambda Softmax Solarization SpatialDropout1D SpatialDropout2D SpatialDropout3D
    SpectralNormalization StackedRNNCells StringLookup Subtract SyncBatchNormalization TFOpLambda TFSMLayer
    TextVectorization ThresholdedReLU TimeDistributed UnitNormalization UpSampling1D UpSampling2D UpSampling3D
    ZeroPadding1D ZeroPadding2D ZeroPadding3D
"""
BUILT_IN: Final = frozenset(_BUILT_IN.split())
"""Classes of layers of Keras 2 and 3. Files of Keras 2 say of no class whether it is Keras's own."""


def layers(model: Json) -> Iterator[Json]:
    """Yields the layers of a model, and those of the models and wrappers within it."""
    config = model.get("config")
    if not isinstance(config, dict):
        return
    inner = config.get("layers")
    for one in [*(inner if isinstance(inner, list) else ()), config.get("layer")]:
        if isinstance(one, dict) and isinstance(one.get("class_name"), str):
            yield one
            yield from layers(one)


def is_custom(layer: Json) -> bool:
    """Returns whether a layer, or a model, is of a class that is not Keras's own."""
    name = layer["class_name"]
    registered, module = layer.get("registered_name"), layer.get("module")
    if isinstance(registered, str) and ">" in registered:
        return not registered.startswith(("keras_cv", "keras_hub"))
    if isinstance(module, str):
        return module.partition(".")[0] not in ("keras", "tf_keras", "keras_cv", "keras_hub", "tensorflow")
    return ">" in name or (name not in BUILT_IN and name not in MODELS and not name.startswith("Random"))


def own(layer: Json) -> Json:
    """Returns the arguments of a layer, or the layers of a model; none where it was saved without."""
    config = layer.get("config")
    if isinstance(config, list):  # of a Sequential model of Keras 2.2.2 and before
        return {"layers": config}
    return config if isinstance(config, dict) else {}


def name(layer: Json) -> str:
    """Returns the name of a layer."""
    return str(layer.get("name") or own(layer).get("name") or layer["class_name"])


def title(layer: Json) -> str:
    """Returns the class of a layer with the arguments that matter for serving: `Rescaling(1/255)`."""
    kind, config = layer["class_name"], own(layer)
    match kind:
        case "Rescaling":
            return f"Rescaling({_scaling(config.get('scale'), config.get('offset'))})"
        case "Resizing" | "CenterCrop" | "RandomCrop":
            return f"{kind}({config.get('height')}x{config.get('width')})"
        case "Lambda":
            code = "".join(map(keras_lambda.uses, keras_config.code(layer).values()))
            of_code = " of Python code" if keras_config.holds_code(config.get("function")) else ""
            return f"Lambda {name(layer)}{of_code}{f' that uses {code}' if code else ''}"
        case "TFOpLambda":
            return f"TFOpLambda({config.get('function')})"
    return str(kind)


def is_noted(layer: Json) -> bool:
    """Returns whether a layer matters for serving."""
    return layer["class_name"] in NOTED or layer["class_name"].startswith("Random") or is_custom(layer)


def activation(config: Json) -> str:
    """Returns the name of a layer's activation: `softmax`, `linear`; empty where it is written in another form."""
    value = config.get("activation", "linear")
    if value is None:
        return "linear"
    if isinstance(value, dict):
        inner = value.get("config")
        value = inner if isinstance(inner, str) else value.get("class_name")
    return str(value).removesuffix("_v2").lower() if isinstance(value, str) else ""


def plain(value: Any) -> Any:
    """Returns a value with the tuples that Keras 2 writes as objects as lists."""
    if isinstance(value, dict):
        if value.get("class_name") in ("__tuple__", "TypedTuple") and isinstance(value.get("items"), list):
            return plain(value["items"])
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def _scaling(scale: object, offset: object) -> str:
    if isinstance(scale, (int, float)) and scale:
        inverse = 1 / scale
        text = f"1/{inverse:.6g}" if abs(inverse) > 1 and abs(round(inverse, 1) - inverse) < 1e-4 else f"{scale:.6g}"
    else:
        text = "by channel" if isinstance(scale, list) else str(scale)
    return f"{text}, offset {offset:g}" if isinstance(offset, (int, float)) and offset else text
