from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from xlaserve.config import Bucket, BucketSettings, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models import catalog

HANDLE = "someone/flowers/tensorFlow2/default"
SETTINGS = ModelSettings(name="it", source=f"kagglehub:{HANDLE}", buckets=(BucketSettings(1),))


class Flowers(tf.Module):
    @tf.function(autograph=False, input_signature=[tf.TensorSpec((None, 4, 4, 3), tf.float32)])
    def scores(self, photo: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(photo, axis=(1, 2))


def test_a_handle_becomes_the_model_that_kagglehub_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(handle: str) -> str:
        asked.append(handle)
        return str(tmp_path)

    monkeypatch.setattr("kagglehub.model_download", download)
    module = Flowers()
    tf.saved_model.save(module, str(tmp_path), signatures=module.scores.get_concrete_function())
    assert catalog.load(SETTINGS).buckets == (Bucket(1, 4, 4),)
    assert asked == [HANDLE]


def test_without_a_network_a_handle_fails_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGGLEHUB_CACHE", str(tmp_path))
    monkeypatch.setenv("KAGGLE_API_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(ModelFailed) as failure:
        catalog.load(SETTINGS)
    text = str(failure.value)
    assert text.startswith(f"source: kagglehub:{HANDLE} could not be fetched: ")
    assert text.endswith("and set KAGGLEHUB_CACHE, or name the folder itself")
    assert "\n" not in text


def test_a_handle_that_is_none_says_so() -> None:
    with pytest.raises(ModelFailed, match="source: kagglehub:flowers could not be fetched: Invalid model handle"):
        catalog.load(SETTINGS.model_copy(update={"source": "kagglehub:flowers"}))
