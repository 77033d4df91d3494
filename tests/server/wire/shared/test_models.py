from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.fakes import of_one_image

from xlaserve.config import PILLOW_BILINEAR, Bucket, Color, Fit, Mode, ModelSettings
from xlaserve.images.image_input import RGB, ImageInput
from xlaserve.models.task import Classification
from xlaserve.models.version import Served, State
from xlaserve.programs.tf.device import Device
from xlaserve.wire.shared.models import Models, source_name
from xlaserve_proto import open_inference_pb2 as pb


def models(served: Served, device: Device | None = None) -> Models:
    directory = SimpleNamespace(get=lambda name, version: served, versions=lambda name: [served.version])
    backend = SimpleNamespace(directory=directory, device=device or Device("cpu", "CPU", 1, 1))
    return Models(cast(Any, backend), has_model_control=False, max_message_bytes=4096)


def served(*buckets: Bucket, image: ImageInput = RGB) -> Served:
    settings = ModelSettings(
        name="cats", source="/models/v2/cats.keras", modes=(Mode.GRAPH, Mode.XLA), max_queue_delay_ms=1.5
    )
    model = SimpleNamespace(
        program=SimpleNamespace(platform="tensorflow"),
        lowerings="",
        reason="",
        buckets=buckets,
        task=Classification(2, ("cat", "other")),
        **of_one_image(image),
        pixels="[n, height, width, 3] rgb",
        fit=Fit.PAD,
        resize=PILLOW_BILINEAR,
        resize_reason="",
        weights="cats.keras",
    )
    sizes = frozenset((bucket.height, bucket.width) for bucket in buckets)
    return cast(
        Served,
        SimpleNamespace(
            settings=settings,
            version=SimpleNamespace(
                settings=settings,
                state=State.READY,
                auto_text="",
                precision_text="float32",
                decode_text="exact",
                examples_text="",
            ),
            model=model,
            sizes=sizes,
            takes_unmatched=False,
        ),
    )


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("builtin:digits", "builtin:digits"),
        ("keras.applications:ResNet50", "keras.applications:ResNet50"),
        ("/srv/models/cats.keras", "cats.keras"),
        ("/srv/models/saved/", "saved"),
        ("/srv/models:2/cats.keras", "cats.keras"),
        ("cats.keras", "cats.keras"),
    ],
)
def test_a_source_is_shown_without_its_folders(source: str, name: str) -> None:
    assert source_name(source) == name


def test_a_model_of_one_size_states_it_and_one_of_several_leaves_it_open() -> None:
    for buckets, side in (
        ((Bucket(1, 8, 6), Bucket(4, 8, 6)), [8, 6]),
        ((Bucket(1, 8, 6), Bucket(1, 16, 6)), [-1, -1]),
    ):
        (pixels,) = models(served(*buckets)).metadata("cats", "")["inputs"]
        assert pixels["shape"] == [-1, *side, 3]


@pytest.mark.parametrize(
    ("image", "shape", "layout"),
    [
        (ImageInput(1, Color.GREY), [8, 6, 1], "FORMAT_NHWC"),
        (ImageInput(1, Color.GREY, "NHW"), [8, 6], "FORMAT_NONE"),
        (ImageInput(3, Color.RGB, "NCHW"), [3, 8, 6], "FORMAT_NCHW"),
    ],
)
def test_metadata_and_configuration_show_the_shape_that_the_model_declares(
    image: ImageInput, shape: list[int], layout: str
) -> None:
    shown = models(served(Bucket(4, 8, 6), image=image))
    (described,), (configured,) = shown.metadata("cats", "")["inputs"], shown.config("cats", "")["input"]
    assert described["shape"] == [-1, *shape]
    assert (configured["dims"], configured["format"]) == (shape, layout)


def test_a_model_that_takes_no_pictures_shows_pixels_alone() -> None:
    of_five = served(Bucket(4, 8, 6), image=ImageInput(5, None))
    cast(Any, of_five).settings = of_five.settings.model_copy(update={"metadata_input": "image"})
    metadata = models(of_five).metadata("cats", "")
    assert [one["shape"] for one in metadata["inputs"]] == [[-1, 8, 6, 5]]
    assert metadata["properties"]["inputs"] == "pixels"


def test_with_background_sizes_only_the_networks_fixed_lengths_are_stated() -> None:
    of_any_height = served(Bucket(1, 8, 6))
    cast(Any, of_any_height).takes_unmatched = True
    cast(Any, of_any_height.model).size = (None, 6)
    (pixels,) = models(of_any_height).metadata("cats", "")["inputs"]
    assert pixels["shape"] == [-1, -1, 6, 3]


def test_the_configuration_shows_batches_lanes_and_delay() -> None:
    device = Device("gpu", "GPU", 4, 1, gpus=(1, 3))
    config = models(served(Bucket(1, 8, 6), Bucket(4, 8, 6), Bucket(4, 16, 6)), device).config("cats", "")
    assert config["max_batch_size"] == 4
    assert config["dynamic_batching"] == {
        "preferred_batch_size": [1, 4],
        "max_queue_delay_microseconds": 1500,
        "priority_levels": 3,
        "default_priority_level": 2,
    }
    (group,) = config["instance_group"]
    assert (group["kind"], group["count"], group["gpus"]) == ("KIND_GPU", 2, [1, 3])
    assert config["parameters"]["source"] == {"string_value": "cats.keras"}
    assert config["parameters"]["default_mode"] == {"string_value": "graph"}


@pytest.mark.parametrize(("shown", "shape", "dims"), [("pixels", [-1, 8, 6, 3], [8, 6, 3]), ("image", [-1, 1], [1])])
def test_metadata_and_configuration_show_the_one_input_of_the_settings(
    shown: str, shape: list[int], dims: list[int]
) -> None:
    """Triton's clients fill each input of the metadata, and refuse a configuration that has others."""
    model = served(Bucket(1, 8, 6))
    cast(Any, model).settings = model.settings.model_copy(update={"metadata_input": shown})
    metadata, config = models(model).metadata("cats", ""), models(model).config("cats", "")
    assert [(one["name"], one["shape"]) for one in metadata["inputs"]] == [(shown, shape)]
    assert [(one["name"], one["dims"]) for one in config["input"]] == [(shown, dims)]
    assert not any(one.get("optional") for one in config["input"])
    assert metadata["properties"]["inputs"] == "pixels,image"
    assert metadata["properties"]["max_message_bytes"] == "4096"


def test_metadata_and_configuration_show_the_names_of_the_settings() -> None:
    model = served(Bucket(1, 8, 6))
    cast(Any, model).settings = model.settings.model_copy(update={"input_name": "input_1", "output_name": "probs"})
    metadata, config = models(model).metadata("cats", ""), models(model).config("cats", "")
    for described in (metadata["inputs"], config["input"]):
        assert [one["name"] for one in described] == ["input_1"]
    for described in (metadata["outputs"], config["output"]):
        assert [one["name"] for one in described] == ["probs"]


@pytest.mark.parametrize(("described", "message"), [("metadata", pb.ModelMetadataResponse), ("config", pb.ModelConfig)])
def test_a_description_is_json_and_has_the_fields_of_the_contract(described: str, message: Any) -> None:
    plain = getattr(models(served(Bucket(1, 8, 6))), described)("cats", "")
    assert json.loads(json.dumps(plain)) == plain
    assert message(**plain).name == "cats"
