from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from xlaserve_loadtest.study import catalog


def test_the_table_names_every_model_of_keras_applications() -> None:
    spec = importlib.util.find_spec("keras")
    if spec is None or spec.origin is None:
        pytest.skip("Keras is not installed")
    # Read, not imported: that would take TensorFlow's seconds.
    tree = ast.parse((Path(spec.origin).parent / "applications" / "__init__.py").read_text())
    names = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name[0].isupper()
    }
    assert {model.name for model in catalog.applications()} == names


def test_models_are_found_by_name_family_source_and_path() -> None:
    assert len(catalog.find(["all"])) == len(catalog.applications())
    assert [model.name for model in catalog.find(["VGG"])] == ["VGG16", "VGG19"]
    assert [model.name for model in catalog.find(["ResNet50", "keras.applications:ResNet50", "VGG16"])] == [
        "ResNet50",
        "VGG16",
    ]
    digits, own = catalog.find(["builtin:digits", "models/mine.keras"])
    assert (digits.name, digits.family, digits.size) == ("digits", "other", None)
    assert (own.name, own.source) == ("mine", "models/mine.keras")


def test_a_model_that_is_none_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(ValueError, match=r"^expected all, .*, got Resnet50, did you mean ResNet50\?$"):
        catalog.find(["Resnet50"])
    with pytest.raises(ValueError, match=r"^expected all"):
        catalog.find(["m" * 300])


def test_published_figures_stand_only_beside_the_same_device() -> None:
    figures = catalog.published(["NVIDIA A100-SXM4-40GB"])
    assert figures["NASNetMobile", 224].images_per_s == pytest.approx((433.48, 433.48))
    assert figures["NASNetMobile", 224].ratio_to_eager == pytest.approx(44.69)
    assert catalog.published(["Tesla T4"])["NASNetMobile", 224].ratio_to_eager == pytest.approx(31.766)
    assert catalog.published(["NVIDIA H200"]) == catalog.published([]) == {}


def test_published_figures_with_shifted_names_are_not_used() -> None:
    names = {name for name, _ in catalog.published(["NVIDIA A100"])}
    assert names <= {model.name for model in catalog.applications()}
