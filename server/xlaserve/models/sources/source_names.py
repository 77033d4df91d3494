"""The sources that have names, for all that serve or check each of them."""

from __future__ import annotations

from typing import assert_never

from xlaserve.config.sources import Source


def names() -> tuple[str, ...]:
    """Returns every source that has a name: all that `keras.applications:`, `keras_cv:`, `keras_hub:` (where it is
    installed) and `builtin:` offer.

    Imports Keras.
    """
    return tuple(kind.value.prefix + name for kind in Source for name in kind.value.names or _listed(kind))


def _listed(kind: Source) -> tuple[str, ...]:
    """Returns the names of a kind that only Keras can list; none where names are handles or paths."""
    match kind:
        case Source.APPLICATIONS:
            from xlaserve.models.sources import applications  # noqa: PLC0415

            return applications.names()
        case Source.KERAS_CV:
            from xlaserve.models.sources import keras_cv_table  # noqa: PLC0415

            return keras_cv_table.names()
        case Source.KERAS_HUB:
            from xlaserve.models.sources import keras_hub_table  # noqa: PLC0415

            return keras_hub_table.names()
        case Source.KAGGLE | Source.BUILT_IN | Source.NOOP:
            return ()
        case Source.KERAS_FILE | Source.GRAPH_FILE | Source.ONNX_TFLITE_FILE | Source.JAX_FILE | Source.SAVED_MODEL:
            return ()
        case _:
            assert_never(kind)
