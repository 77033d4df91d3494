from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from xlaserve.config import Blank, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.models import class_names
from xlaserve.models.networks import reading
from xlaserve.models.networks.heads import TensorShape
from xlaserve.models.sequences import ClassSequence
from xlaserve.models.task import Tensors, reading_of

PROBABILITIES = np.array(
    [[0.75, 0.125, 0.125], [0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]], np.float32
)
"""Of the steps of one image; the likeliest are 0, 0, 2, 0 and 1."""


@pytest.mark.parametrize(("blank", "index"), [("first", 0), ("last", -1)])
def test_decoding_is_that_of_tensorflow(blank: Blank, index: int) -> None:
    images, steps, classes = 64, 37, 5
    logits = np.random.default_rng(3).normal(size=(images, steps, classes)).astype(np.float32)
    probabilities = tf.nn.softmax(logits).numpy()
    task = ClassSequence(classes, steps=steps, blank=blank)
    lengths = np.full(images, steps, np.int32)
    (sparse,), negative = tf.nn.ctc_greedy_decoder(
        np.log(probabilities).transpose(1, 0, 2), lengths, merge_repeated=True, blank_index=index
    )
    rows = tf.RaggedTensor.from_sparse(sparse).to_list()
    found = task.transcripts((probabilities,))
    assert [[category.index for category in one.categories] for one in found] == rows
    assert len({len(row) for row in rows}) > 5
    np.testing.assert_allclose(np.log([one.score for one in found]), -negative[:, 0], rtol=1e-5)


@pytest.mark.parametrize(
    ("blank", "text", "indices", "scores"),
    [
        ("last", "0 0 1", [0, 0, 1], [0.75, 0.5, 0.5]),
        ("first", "2 1", [2, 1], [0.5, 0.5]),
        ("none", "0 0 2 0 1", [0, 0, 2, 0, 1], [0.75, 0.5, 0.5, 0.5, 0.5]),
    ],
)
def test_each_class_has_the_highest_score_of_its_steps(
    blank: Blank, text: str, indices: list[int], scores: list[float]
) -> None:
    (found,) = ClassSequence(3, steps=5, blank=blank).transcripts((PROBABILITIES[None],))
    assert (found.text, found.score) == (text, 0.75 * 0.5**4)
    assert [(one.index, one.score) for one in found.categories] == list(zip(indices, scores, strict=True))


@pytest.mark.parametrize(
    ("blank", "labels", "text"),
    [("last", ("a", "b"), "aab"), ("first", ("a", "b"), "ba"), ("none", ("a", "b", "c"), "aacab")],
)
def test_the_blank_has_no_label(blank: Blank, labels: tuple[str, ...], text: str) -> None:
    task = ClassSequence(3, steps=5, blank=blank)
    (found,) = task.labelled(class_names.of_task(labels, task)).transcripts((PROBABILITIES[None],))
    assert found.text == text
    with pytest.raises(ModelFailed, match=f"expected {len(labels)} names, one for each class.*, got 4"):
        class_names.of_task((*"abcd",), task)


def test_an_image_of_blanks_alone_has_no_text() -> None:
    (found,) = ClassSequence(2, steps=3).transcripts((np.array([[[0, 1]] * 3], np.float32),))
    assert found == ("", 1.0, ())


def head(shapes: dict[str, TensorShape], /, **fields: Any) -> Any:
    return reading.choose(shapes, ModelSettings(name="m", source="m.keras", **fields))


def test_logits_become_probabilities() -> None:
    chosen = head({"it": TensorShape([None, 5, 3], "float32")}, task="sequence", activation="softmax")
    assert chosen.task == ClassSequence(3, steps=5)
    (scores,) = chosen.finish({"it": tf.math.log(PROBABILITIES[None]) + 2.0}, tf.zeros((1, 8, 8, 1)))
    np.testing.assert_allclose(scores, PROBABILITIES[None], rtol=1e-6)


@pytest.mark.parametrize("shape", [[None, 5], [None, 5, None], [None, 5, 1], [None, 2, 5, 3]])
def test_other_shapes_are_no_sequence(shape: list[int | None]) -> None:
    with pytest.raises(ModelFailed, match=r"expected an output of scores \[None, steps, classes\]"):
        head({"it": TensorShape(shape, "float32")}, task="sequence")


def test_a_sequence_may_be_one_of_several_heads() -> None:
    shapes = {name: TensorShape([None, 5, 3], "float32") for name in ("plate", "attention")}
    chosen = head(shapes, outputs={"plate": {"task": "sequence", "blank": "first", "labels": ["a", "b"]}})
    assert isinstance(chosen.task, Tensors)
    assert reading_of(chosen.task, ClassSequence) == ClassSequence(3, ("", "a", "b"), steps=5, blank="first", at=0)
    outputs = PROBABILITIES[None], np.zeros((1, 5, 3), np.float32)
    assert chosen.task.agreement(outputs, outputs) == 1.0
