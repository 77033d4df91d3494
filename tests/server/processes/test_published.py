from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.server.models.house import House

from xlaserve.config import Bucket, Fit, Mode, ModelSettings
from xlaserve.engine.batching.unmatched import Unmatched
from xlaserve.engine.buckets.planner import Cost
from xlaserve.engine.inputs import pixels
from xlaserve.images.image_input import ImageInput
from xlaserve.models.task import Classification, Detection, Embedding, Segmentation, Task, Tensors, TensorSpec
from xlaserve.models.version import Served, State
from xlaserve.processes.published import Publisher, described, snapshot


@pytest.mark.parametrize(
    ("task", "wanted"),
    [
        (Classification(1000), [4000]),
        (Embedding(3), [12]),
        (Detection(80, max_detections=10), [160, 40, 40, 4]),
        (Segmentation(21), [6 * 4]),
        (Segmentation(300), [6 * 4 * 4]),
        (Tensors((TensorSpec("kept", "BOOL", (-1, 5)), TensorSpec("sums", "FP64", (-1,)))), [5, 8]),
    ],
)
def test_the_bytes_of_an_images_outputs_are_known(task: Task, wanted: list[int]) -> None:
    assert [*described(task, 6, 4)] == wanted


async def test_each_loading_has_its_own_number_and_is_pickled_once(house: House) -> None:
    publisher = Publisher(house.repository)
    await house.repository.load_all()
    (first,) = publisher.catalogue().loadings
    (again,) = publisher.catalogue().loadings
    assert again.facts is first.facts
    await house.repository.load("a")
    (second,) = publisher.catalogue().loadings
    assert (first.number, second.number) == (1, 2)
    assert [snapshot.id for snapshot, _ in publisher.serving()] == [2]


async def test_fingerprints_differ_once_something_is_to_be_told(house: House) -> None:
    publisher = Publisher(house.repository)
    await house.repository.load_all()
    before = publisher.fingerprint()
    assert publisher.fingerprint() == before
    (version,) = house.repository.index()
    version.warnings.append("bfloat16 is slow here")
    assert publisher.fingerprint() != before
    (loading,) = publisher.catalogue().loadings
    assert pickle.loads(loading.facts).warnings == ("bfloat16 is slow here",)
    before = publisher.fingerprint()
    entry = next(iter(version.ledger))
    version.ledger.correct(entry.mode, entry.bucket, Cost(0.25, 0.5))
    assert publisher.fingerprint() != before
    (loading,) = publisher.catalogue().loadings
    assert Cost(0.25, 0.5) in [one.cost for one in pickle.loads(loading.facts).entries]
    before = publisher.fingerprint()
    batcher = house.repository.find("a").batcher
    assert batcher is not None
    batcher.add({(Mode.GRAPH, Bucket(1, 3, 3)): next(iter(batcher._programs.values()))})
    assert publisher.fingerprint() != before


def test_fronts_are_told_what_they_need_to_run_a_model() -> None:
    settings = ModelSettings(name="m", source="fake", version="3")
    task = Classification(2, ("cat", "dog"))
    admission = SimpleNamespace(max_images=10, max_bytes=20, is_closed=False)
    model = SimpleNamespace(
        buckets=(Bucket(1, 4, 6), Bucket(2, 8, 8)), task=task, fit=Fit.RESIZE, image=ImageInput(5), inputs=pixels(5)
    )
    verified = SimpleNamespace(row_bytes=(12,))
    ledger = [
        SimpleNamespace(bucket=Bucket(2, 8, 8), verified=verified),
        SimpleNamespace(bucket=Bucket(1, 4, 6), verified=None),
    ]
    version = SimpleNamespace(settings=settings, state=State.READY, ledger=ledger)
    shapes = {(Mode.XLA, 4, 6): 1, (Mode.XLA, 8, 8): 2, (Mode.GRAPH, 5, 5): 1}
    unmatched = Unmatched(sides=(None, None), max_pixels=128, max_opened=3, configured=frozenset({(4, 6), (8, 8)}))
    batcher: Any = SimpleNamespace(admission=admission, shapes=lambda: shapes, unmatched=unmatched)
    told = snapshot(Served(cast(Any, version), cast(Any, model), batcher), batcher, 7)
    assert (told.id, told.title, told.is_open, told.max_images, told.max_bytes) == (7, settings.title, True, 10, 20)
    assert told.inputs == pixels(5)
    assert told.output_bytes == {(4, 6): (8,), (5, 5): (8,), (8, 8): (12,)}
    assert (told.largest, told.unmatched) == (shapes, unmatched)
    assert pickle.loads(pickle.dumps(told)) == told
