from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.saved_model import revived_types

from xlaserve.config import Bucket, BucketSettings, Mode, ModelSettings
from xlaserve.errors import ModelFailed
from xlaserve.inspection.model_file import formats
from xlaserve.models import catalog
from xlaserve.models.task import Classification, Detection, Embedding, Segmentation

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 6, 5, 3), np.uint8)
FLOAT32 = tf.TensorSpec((None, 6, 5, 3), tf.float32, name="photo")


class Sums(tf.Module):
    """Scores are the channels' sums, scaled by a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = tf.Variable(0.5)

    @tf.function(autograph=False)
    def sums(self, photo: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"sums": self.scale * tf.reduce_sum(tf.cast(photo, tf.float32), axis=(1, 2))}

    @tf.function(autograph=False)
    def two_inputs(self, photo: tf.Tensor, mask: tf.Tensor) -> dict[str, tf.Tensor]:
        return dict(self.sums(photo * mask))

    @tf.function(autograph=False)
    def two_outputs(self, photo: tf.Tensor) -> dict[str, tf.Tensor]:
        return {**self.sums(photo), "photo": photo}


def export(folder: Path, *specs: tf.TensorSpec, function: str = "sums", signature: str = "serving_default") -> str:
    module = Sums()
    concrete = getattr(module, function).get_concrete_function(*specs)
    tf.saved_model.save(module, str(folder), signatures={signature: concrete})
    return str(folder)


def load_scores(model: ModelSettings) -> NDArray[Any]:
    (scores,) = catalog.load(model).program.compile(Mode.GRAPH, Bucket(2, 6, 5)).executable(PIXELS)
    return scores


def settings(source: str, **fields: Any) -> ModelSettings:
    return ModelSettings(name="it", source=source, **({"buckets": (BucketSettings(2),)} | fields))


@pytest.mark.parametrize("dtype", [tf.float32, tf.uint8])
@pytest.mark.parametrize("mode", [mode for mode in Mode if mode is not Mode.AUTO])
def test_a_saved_model_gets_pixels_from_0_to_255_as_it_takes_them(tmp_path: Path, dtype: tf.DType, mode: Mode) -> None:
    source = export(tmp_path / "sums", tf.TensorSpec((None, 6, 5, 3), dtype, name="photo"))
    model = catalog.load(settings(source))
    assert model.weights == "sums"
    assert isinstance(model.task, Classification)
    assert model.task.classes == 3
    assert model.buckets == (Bucket(2, 6, 5),)
    (scores,) = model.program.compile(mode, Bucket(2, 6, 5)).executable(PIXELS)
    np.testing.assert_allclose(scores, PIXELS.sum(axis=(1, 2)) * 0.5, rtol=1e-6)


class Adam(tf.Module):
    """Is saved as Keras 2 saves its optimizers, with a slot of each variable."""

    def __init__(self, *variables: tf.Variable) -> None:
        super().__init__()
        slots = {variable.ref(): tf.Variable(tf.ones_like(variable)) for variable in variables}
        self.get_slot = lambda var, slot_name: slots[var.ref()]

    def get_slot_names(self) -> list[str]:
        return ["m"]

    def _create_or_restore_slot_variable(self, *args: object) -> None: ...


def test_a_saved_model_of_keras_2_loads_without_its_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = Sums()
    module.optimizer = Adam(module.scale)
    registration = revived_types.VersionedTypeRegistration(
        lambda proto: Adam(), version=1, min_producer_version=1, min_consumer_version=1
    )
    registration.identifier = "optimizer"
    with monkeypatch.context() as keras_2:
        known = revived_types._REVIVED_TYPE_REGISTRY
        keras_2.setitem(known, "optimizer", (lambda one: isinstance(one, Adam), [registration]))
        keras_2.setattr(revived_types, "_TYPE_IDENTIFIERS", [*known])
        tf.saved_model.save(module, str(tmp_path / "sums"), signatures=module.sums.get_concrete_function(FLOAT32))
    np.testing.assert_allclose(load_scores(settings(str(tmp_path / "sums"))), PIXELS.sum(axis=(1, 2)) * 0.5, rtol=1e-6)
    gc.collect()  # TensorFlow warns of what it has not restored when it forgets the file
    assert not [record for record in caplog.records if "checkpoint" in str(record.msg)]


class Counting(tf.Module):
    """Scores are how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = tf.Variable(0.0)

    @tf.function(autograph=False, input_signature=[FLOAT32])
    def count(self, photo: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"runs": tf.reduce_sum(0.0 * photo, axis=(1, 2)) + self.runs.assign_add(1.0)}


@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH])
def test_a_saved_model_that_assigns_a_variable_runs_and_says_so(tmp_path: Path, mode: Mode) -> None:
    module = Counting()
    tf.saved_model.save(module, str(tmp_path / "counting"), signatures=module.count)
    program = catalog.load(settings(str(tmp_path / "counting"))).program
    compilation = program.compile(mode, Bucket(2, 6, 5))
    run = compilation.executable
    before = float(run(PIXELS)[0][0, 0])
    assert [float(run(PIXELS)[0][0, 0]) for _ in range(2)] == [before + 1, before + 2]
    assert compilation.warnings[0].startswith("it assigns variables as it runs: its answers may depend on all")
    assert program.compile(Mode.GRAPH, Bucket(1, 6, 5)).warnings[0] == compilation.warnings[0]


def test_autocluster_says_that_it_can_not_run_what_assigns_a_variable(tmp_path: Path) -> None:
    module = Counting()
    tf.saved_model.save(module, str(tmp_path / "counting"), signatures=module.count)
    program = catalog.load(settings(str(tmp_path / "counting"))).program
    with pytest.raises(ModelFailed, match=r"modes: autocluster runs frozen graphs alone.*: it assigns variables"):
        program.compile(Mode.AUTOCLUSTER, Bucket(2, 6, 5))


def test_a_float_saved_model_may_be_preprocessed(tmp_path: Path) -> None:
    model = catalog.load(settings(export(tmp_path / "sums", FLOAT32), preprocess="unit"))
    (scores,) = model.program.compile(Mode.GRAPH, Bucket(2, 6, 5)).executable(PIXELS)
    np.testing.assert_allclose(scores, PIXELS.sum(axis=(1, 2)) * 0.5 / 255, rtol=1e-5)


def test_a_saved_model_of_any_size_takes_the_one_that_is_set(tmp_path: Path) -> None:
    source = export(tmp_path / "sums", tf.TensorSpec((None, None, None, 3), tf.float32, name="photo"))
    assert catalog.load(settings(source, input_size=(9, 8))).buckets == (Bucket(2, 9, 8),)
    with pytest.raises(ModelFailed, match="input_size: the model takes several sizes"):
        catalog.load(settings(source))


@pytest.mark.parametrize(
    ("options", "specs", "expected"),
    [
        (
            {"function": "two_outputs", "task": "classification"},
            [FLOAT32],
            "output_names: expected the name of the output to take for scores, of photo: float32 [None, 6, 5, 3]",
        ),
        (
            {},
            [tf.TensorSpec((None, None, None, 2, 3), tf.float32, name="photo")],
            "source: expected images, such as [None, height, width, channels], or numbers [None, ...] whose other "
            "sides are known, got photo: float32 [None, None, None, 2, 3]",
        ),
        (
            {},
            [tf.TensorSpec(None, tf.float32, name="photo")],
            "source: expected an input of images, such as [None, height, width, channels], of float32, float16, "
            "bfloat16, float64, uint8, uint16 or int32, got float32 of unknown rank",
        ),
    ],
)
def test_a_signature_that_does_not_fit_fails_with_what_it_is(
    tmp_path: Path, options: dict[str, str], specs: list[tf.TensorSpec], expected: str
) -> None:
    task = options.pop("task", "auto")
    source = export(tmp_path / "sums", *specs, **options)
    with pytest.raises(ModelFailed) as failure:
        catalog.load(settings(source, task=task))
    assert str(failure.value).startswith(expected)


def test_a_signature_of_two_images_takes_both_by_name(tmp_path: Path) -> None:
    mask = tf.TensorSpec((None, 6, 5, 3), tf.float32, name="mask")
    model = catalog.load(settings(export(tmp_path / "sums", FLOAT32, mask, function="two_inputs")))
    assert sorted(model.names) == ["mask", "photo"]
    given = {"photo": PIXELS, "mask": PIXELS % 2}
    for mode in (Mode.GRAPH, Mode.XLA, Mode.OPENVINO):
        executable = model.program.compile(mode, Bucket(2, 6, 5)).executable
        (scores,) = executable(*(given[name] for name in model.names))
        np.testing.assert_allclose(scores, (given["photo"] * given["mask"]).sum(axis=(1, 2)) * 0.5, rtol=1e-5)


@pytest.mark.parametrize(
    "spec", [tf.TensorSpec((None, 6, 5, 3, 1), tf.float32), tf.TensorSpec((None, 6, 5, 3), tf.int64)]
)
def test_what_has_the_shape_or_type_of_no_image_is_passed_as_it_comes(tmp_path: Path, spec: tf.TensorSpec) -> None:
    module = tf.Module()
    module.double = tf.function(lambda values: {"doubled": 2 * values}, autograph=False)
    tf.saved_model.save(module, str(tmp_path / "doubles"), signatures=module.double.get_concrete_function(spec))
    model = catalog.load(settings(str(tmp_path / "doubles")))
    assert (model.buckets, [each.is_image for each in model.inputs]) == ((Bucket(2, 0, 0),), [False])
    values = np.ones((2, *spec.shape[1:]), spec.dtype.as_numpy_dtype)
    (doubled,) = model.program.compile(Mode.GRAPH, Bucket(2, 0, 0)).executable(values)
    np.testing.assert_array_equal(doubled, 2 * values)


def test_a_broken_saved_model_fails_with_its_name_and_not_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "saved_model.pb").write_text("not a model")
    with pytest.raises(ModelFailed) as failure:
        catalog.load(settings(str(folder)))
    assert str(failure.value).startswith("source: broken can't be loaded: ")
    assert str(tmp_path) not in str(failure.value)


@pytest.mark.parametrize(
    ("is_beside", "said"), [(True, "&& mkdir variables && mv"), (False, "has no folder variables")]
)
def test_weights_that_are_not_in_their_folder_are_missed(tmp_path: Path, is_beside: bool, said: str) -> None:
    class Scaled(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = tf.Variable(tf.ones(3))

        @tf.function(input_signature=[FLOAT32])
        def scores(self, images: tf.Tensor) -> tf.Tensor:
            return tf.reduce_sum(images * self.scale, axis=(1, 2))

    folder, module = tmp_path / "net", Scaled()
    tf.saved_model.save(module, str(folder), module.scores)
    for file in (folder / "variables").iterdir():
        file.rename((folder if is_beside else tmp_path) / file.name)
    for read in (lambda: catalog.load(settings(str(folder))), lambda: formats.describe(folder)):
        with pytest.raises(ModelFailed, match=said):
            read()


def test_a_signature_is_taken_by_its_name_or_because_it_is_the_only_one(tmp_path: Path) -> None:
    only = export(tmp_path / "only", FLOAT32, signature="predict")
    assert load_scores(settings(only)).shape == (2, 3)
    module = Sums()
    functions = {name: module.sums.get_concrete_function(FLOAT32) for name in ("predict", "score")}
    tf.saved_model.save(module, str(tmp_path / "both"), signatures=functions)
    assert load_scores(settings(str(tmp_path / "both"), signature="score")).shape == (2, 3)
    for signature, got in ((None, "nothing named and no serving_default"), ("other", "other")):
        with pytest.raises(ModelFailed, match=f"signature: expected one of predict, score, got {got}"):
            catalog.load(settings(str(tmp_path / "both"), signature=signature))


def test_of_several_outputs_the_one_that_is_named_is_taken(tmp_path: Path) -> None:
    source = export(tmp_path / "two", FLOAT32, function="two_outputs")
    scores = load_scores(settings(source, output_names={"scores": "sums"}))
    np.testing.assert_allclose(scores, PIXELS.sum(axis=(1, 2)) * 0.5, rtol=1e-6)
    model = catalog.load(settings(source, output_names={"class_map": "photo"}))
    assert isinstance(model.task, Segmentation)
    with pytest.raises(ModelFailed, match=r"output_names: expected scores to be one of photo: .*, got others"):
        catalog.load(settings(source, output_names={"scores": "others"}))


def test_outputs_mean_what_the_task_says(tmp_path: Path) -> None:
    source = export(tmp_path / "sums", FLOAT32)
    assert catalog.load(settings(source, task="embedding")).task == Embedding(3)
    with pytest.raises(ModelFailed, match=r"source: expected an output of scores .*or of whole numbers"):
        catalog.load(settings(source, task="segmentation"))


def test_pixels_come_in_half_precision_where_it_takes_that(tmp_path: Path) -> None:
    source = export(tmp_path / "half", tf.TensorSpec((None, 6, 5, 3), tf.float16, name="photo"))
    np.testing.assert_allclose(
        load_scores(settings(source, preprocess="unit")), PIXELS.sum(axis=(1, 2)) * 0.5 / 255, rtol=1e-2
    )


PAIR = tf.TensorSpec((2, 6, 5, 3), tf.float32, name="photo")


class Paired(tf.Module):
    """Scores of pairs of images; `rows` has a shape of its own for them, `mean` needs both."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = tf.Variable(0.5)

    @tf.function(autograph=False)
    def rows(self, photo: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"sums": self.scale * tf.reduce_sum(tf.reshape(photo, (2, -1, 3)), axis=1)}

    @tf.function(autograph=False)
    def mean(self, photo: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"sums": tf.reduce_sum(photo - tf.reduce_mean(photo, axis=0), axis=(1, 2)) * self.scale}

    @tf.function(autograph=False)
    def fixed(self, photo: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"sums": tf.reduce_sum(photo, axis=(1, 2)) + tf.constant([[1.0], [2.0]])}


@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH, Mode.EAGER])
def test_what_was_exported_for_one_batch_size_runs_in_others_too(tmp_path: Path, mode: Mode) -> None:
    module = Paired()
    tf.saved_model.save(module, str(tmp_path / "pair"), signatures=module.rows.get_concrete_function(PAIR))
    model = catalog.load(settings(str(tmp_path / "pair"), buckets=(BucketSettings(3),)))
    assert model.batch is None
    images = np.concatenate([PIXELS, PIXELS[:1]])
    (scores,) = model.program.compile(mode, Bucket(3, 6, 5)).executable(images)
    np.testing.assert_allclose(scores, images.sum(axis=(1, 2)) * 0.5, rtol=1e-6)
    assert model.reference is not None
    np.testing.assert_allclose(model.reference(images)[0], scores, rtol=1e-6)


@pytest.mark.parametrize("batch", [2, None])
def test_several_inputs_of_one_batch_size_take_others_too(tmp_path: Path, batch: int | None) -> None:
    @tf.function(autograph=False, input_signature=[PAIR, tf.TensorSpec((batch, 1), tf.float32, name="age")])
    def scaled(photo: tf.Tensor, age: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"sums": age * tf.reduce_sum(tf.reshape(photo, (2, -1, 3)), axis=1)}

    module = tf.Module()
    module.scaled = scaled
    tf.saved_model.save(module, str(tmp_path / "pair"), signatures=scaled)
    model = catalog.load(settings(str(tmp_path / "pair"), buckets=(BucketSettings(3),)))
    assert model.batch is None
    images, ages = np.concatenate([PIXELS, PIXELS[:1]]), np.array([[1], [2], [3]], np.float32)
    values = [{"photo": images, "age": ages}[each.name] for each in model.inputs]
    (sums,) = model.program.compile(Mode.XLA, Bucket(3, 6, 5)).executable(*values)
    np.testing.assert_allclose(sums, ages * images.sum(axis=(1, 2)), rtol=1e-6)


def test_a_batch_size_that_stays_is_said_with_its_cost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = Paired()
    for name, scores in (("stays", module.mean), ("goes", module.rows)):
        tf.saved_model.save(module, str(tmp_path / name), signatures=scores.get_concrete_function(PAIR))
        catalog.load(ModelSettings(name=name, source=str(tmp_path / name)))
    (said,) = [one.getMessage() for one in caplog.records if "batches of 2 images alone" in one.getMessage()]
    assert said.startswith("model stays")


@pytest.mark.parametrize("function", ["mean", "fixed"])
def test_what_answers_otherwise_in_other_batch_sizes_runs_in_its_own_only(tmp_path: Path, function: str) -> None:
    module = Paired()
    concrete = getattr(module, function).get_concrete_function(PAIR)
    tf.saved_model.save(module, str(tmp_path / "pair"), signatures=concrete)
    source = str(tmp_path / "pair")
    assert load_scores(settings(source)).shape == (2, 3)
    assert catalog.load(ModelSettings(name="it", source=source)).buckets == (Bucket(2, 6, 5),)
    with pytest.raises(ModelFailed, match=r"buckets: the model was made for batches of 2 only; write buckets: \[2\]"):
        catalog.load(settings(source, buckets=(BucketSettings(1), BucketSettings(2))))


class Hub(tf.Module):
    """A module as hubs publish them, which is a function itself."""

    @tf.function(autograph=False)
    def __call__(self, photo: tf.Tensor, training: bool = False) -> tf.Tensor:
        return tf.reduce_sum(photo, axis=(1, 2)) * (0.0 if training else 1.0)


def test_a_module_without_signatures_is_called_as_for_inference(tmp_path: Path) -> None:
    module = Hub()
    for training in (True, False):
        module.__call__.get_concrete_function(FLOAT32, training)
    tf.saved_model.save(module, str(tmp_path / "hub"))
    scores = load_scores(settings(str(tmp_path / "hub")))
    np.testing.assert_allclose(scores, PIXELS.sum(axis=(1, 2)), rtol=1e-6)
    tf.saved_model.save(tf.Module(), str(tmp_path / "empty"))
    with pytest.raises(ModelFailed, match="source: expected a signature, or a function of one image input"):
        catalog.load(settings(str(tmp_path / "empty")))


def test_of_several_functions_without_signatures_the_named_one_runs(tmp_path: Path) -> None:
    module = Sums()
    module.sums.get_concrete_function(FLOAT32)
    module.two_outputs.get_concrete_function(FLOAT32)
    tf.saved_model.save(module, str(tmp_path / "sums"))
    source = str(tmp_path / "sums")
    scores = load_scores(settings(source, function="sums"))
    np.testing.assert_allclose(scores, PIXELS.sum(axis=(1, 2)) * 0.5, rtol=1e-6)
    for fields in ({}, {"function": "others"}):
        with pytest.raises(ModelFailed, match=r"expected one of its functions (sums, two_outputs|two_outputs, sums)"):
            catalog.load(settings(source, **fields))


def test_a_function_that_was_saved_as_it_is_runs(tmp_path: Path) -> None:
    function = tf.function(lambda photo: {"sums": tf.reduce_sum(photo, axis=(1, 2))}, autograph=False)
    tf.saved_model.save(function.get_concrete_function(PAIR), str(tmp_path / "sums"))
    scores = load_scores(settings(str(tmp_path / "sums")))
    np.testing.assert_allclose(scores, PIXELS.sum(axis=(1, 2)), rtol=1e-6)


def test_a_saved_model_of_tensorflow_1_runs_with_the_graph_for_serving(tmp_path: Path) -> None:
    v1 = tf.compat.v1
    builder = v1.saved_model.Builder(str(tmp_path / "old"))
    for tags in (["serve"], ["serve", "gpu"]):
        with tf.Graph().as_default(), v1.Session() as session:
            photo = v1.placeholder(tf.float32, (None, 6, 5, 3), name="photo")
            scale = v1.get_variable("scale", initializer=0.5 if tags == ["serve"] else 0.0)
            scores = scale * tf.reduce_sum(photo, axis=(1, 2))
            session.run(v1.global_variables_initializer())
            signature = v1.saved_model.predict_signature_def({"photo": photo}, {"scores": scores})
            if tags == ["serve"]:
                builder.add_meta_graph_and_variables(session, tags, {"serving_default": signature})
            else:
                builder.add_meta_graph(tags, {"serving_default": signature})
    builder.save()
    scores = load_scores(settings(str(tmp_path / "old")))
    np.testing.assert_allclose(scores, PIXELS.sum(axis=(1, 2)) * 0.5, rtol=1e-6)


def test_a_part_of_a_saved_model_that_git_lfs_stands_for_is_named(tmp_path: Path) -> None:
    source = export(tmp_path / "sums", FLOAT32)
    (part,) = (tmp_path / "sums" / "variables").glob("*.data*")
    part.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(
        ModelFailed, match=r"sums/variables/variables\.data-.* is a pointer of Git LFS and not the file"
    ):
        catalog.load(settings(source))


class Detector(tf.Module):
    """Two boxes, as TensorFlow's Object Detection API gives them."""

    @tf.function(autograph=False)
    def detect(self, photo: tf.Tensor) -> dict[str, tf.Tensor]:
        images = tf.shape(photo)[0]
        boxes = tf.constant([[[0.0, 0.0, 0.5, 1.0], [0.5, 0.2, 1.0, 0.4], [0.0, 0.0, 0.0, 0.0]]])
        return {
            "detection_boxes": tf.tile(boxes, [images, 1, 1]),
            "detection_scores": tf.tile(tf.constant([[0.75, 0.5, 0.1]]), [images, 1]),
            "detection_classes": tf.tile(tf.constant([[1.0, 7.0, 1.0]]), [images, 1]),
            "num_detections": tf.fill([images], 3.0),
        }


@pytest.mark.parametrize("mode", [Mode.XLA, Mode.GRAPH])
@pytest.mark.parametrize("max_detections", [2, 5])
def test_a_detector_that_suppresses_by_itself_is_known_by_its_outputs(
    tmp_path: Path, mode: Mode, max_detections: int
) -> None:
    module = Detector()
    concrete = module.detect.get_concrete_function(FLOAT32)
    tf.saved_model.save(module, str(tmp_path / "detector"), signatures=concrete)
    source = settings(str(tmp_path / "detector"), bounding_box_format="rel_yxyx", max_detections=max_detections)
    with pytest.raises(ModelFailed, match="classes: expected how many there are"):
        catalog.load(source)
    model = catalog.load(source.model_copy(update={"classes": 2}))
    outputs = model.program.compile(mode, Bucket(2, 6, 5)).executable(PIXELS)
    assert isinstance(model.task, Detection)
    assert [output.shape for output in outputs] == [(2, *spec.shape[1:]) for spec in model.task.outputs]
    for found in model.task.objects(outputs):
        assert list(map(model.task.label, found.classes.tolist())) == ["1", "7"]
        assert found.scores.tolist() == [0.75, 0.5]
        np.testing.assert_allclose(found.boxes, [(0, 0, 5, 3), (1, 3, 2, 6)], atol=1e-6)
