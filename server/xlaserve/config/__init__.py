"""Frozen settings, checked once.

One YAML file, overridden by environment variables (`XLASERVE_GRPC_PORT=9001`), overridden by flags
(`--grpc-port 9001`). Without a file the built-in configuration serves `builtin:digits`. The text under each field is
its documentation; the command's help prints it, and `xlaserve config --show` the values in force.
"""

from __future__ import annotations

from xlaserve.config.box_decoding_settings import BoxDecoding
from xlaserve.config.bucket_settings import AutoBuckets, Bucket, BucketSettings
from xlaserve.config.built_in_models import BUILTIN_MODELS
from xlaserve.config.example_settings import ExampleSettings
from xlaserve.config.files import CONFIG_FILE_VARIABLE, ENV_PREFIX, check_files, dump, load
from xlaserve.config.image_settings import CUTS, Border, Color, Decoding, Depth, Fit, Grey16, Layout, PixelRange, Window
from xlaserve.config.model_settings import ModelSettings
from xlaserve.config.modes import Lowering, Mode, Precision
from xlaserve.config.output_settings import (
    Activation,
    Blank,
    BoxFormat,
    KeypointFormat,
    OutputRange,
    OutputRole,
    OutputSettings,
    TaskName,
)
from xlaserve.config.preprocess_settings import OF_RGB, Preprocess, ScalingSettings
from xlaserve.config.resize_settings import (
    PILLOW_BILINEAR,
    TENSORFLOW_BILINEAR,
    ResizeFilter,
    ResizeLibrary,
    ResizeSettings,
)
from xlaserve.config.server_settings import MIB, PerformanceHint, Settings
from xlaserve.config.shadow_settings import ShadowSettings
from xlaserve.config.yaml_text import parse

__all__ = [
    "BUILTIN_MODELS",
    "CONFIG_FILE_VARIABLE",
    "CUTS",
    "ENV_PREFIX",
    "MIB",
    "OF_RGB",
    "PILLOW_BILINEAR",
    "TENSORFLOW_BILINEAR",
    "Activation",
    "AutoBuckets",
    "Blank",
    "Border",
    "BoxDecoding",
    "BoxFormat",
    "Bucket",
    "BucketSettings",
    "Color",
    "Decoding",
    "Depth",
    "ExampleSettings",
    "Fit",
    "Grey16",
    "KeypointFormat",
    "Layout",
    "Lowering",
    "Mode",
    "ModelSettings",
    "OutputRange",
    "OutputRole",
    "OutputSettings",
    "PerformanceHint",
    "PixelRange",
    "Precision",
    "Preprocess",
    "ResizeFilter",
    "ResizeLibrary",
    "ResizeSettings",
    "ScalingSettings",
    "Settings",
    "ShadowSettings",
    "TaskName",
    "Window",
    "check_files",
    "dump",
    "load",
    "parse",
]
