"""The calls of the typed API: pure functions that build a request and the function that reads its response."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from xlaserve_client import images as image_arguments
from xlaserve_client.call import STAGES, Call, Method
from xlaserve_client.errors import InvalidReply
from xlaserve_client.images import Images
from xlaserve_client.results import (
    Box,
    Bucket,
    Category,
    Classification,
    ClassifyResult,
    ClassMap,
    Detection,
    Detections,
    DetectResult,
    EmbedResult,
    Keypoint,
    Keypoints,
    LocateResult,
    Model,
    ModelInput,
    Program,
    SegmentResult,
    Timings,
    TranscribeResult,
    Transcription,
)
from xlaserve_proto import vision_pb2 as vision

_SERVICE: Final = vision.DESCRIPTOR.services_by_name["Vision"]
METHODS: Final = {
    method.name: Method(_SERVICE.full_name, method.name, getattr(vision, method.output_type.name))
    for method in _SERVICE.methods
}
"""The methods of this API by their names; all are idempotent."""


def classify(images: Images, *, model: str, top_k: int, mode: str | None) -> Call[ClassifyResult]:
    """Names what is in `images`."""
    if top_k < 1:
        raise ValueError(f"top_k: expected at least 1, got {top_k}")
    request = vision.ClassifyRequest(model=model, top_k=top_k, mode=mode or "", **_images(images))
    return Call(METHODS["Classify"], request, _read_classify)


def detect(
    images: Images, *, model: str, min_score: float, max_detections: int | None, mode: str | None
) -> Call[DetectResult]:
    """Finds the objects in `images`."""
    if max_detections is not None and max_detections < 1:
        raise ValueError(f"max_detections: expected at least 1, or None for all, got {max_detections}")
    request = vision.DetectRequest(
        model=model,
        min_score=min_score,
        max_detections=max_detections or 0,
        mode=mode or "",
        **_images(images),
    )
    return Call(METHODS["Detect"], request, _read_detect)


def segment(images: Images, *, model: str, mode: str | None) -> Call[SegmentResult]:
    """Names the pixels of `images`. Requests run lengths, which NumPy reads without another library."""
    encoding = vision.SegmentRequest.ENCODING_RUN_LENGTHS
    request = vision.SegmentRequest(model=model, encoding=encoding, mode=mode or "", **_images(images))
    return Call(METHODS["Segment"], request, _read_segment)


def embed(images: Images, *, model: str, mode: str | None) -> Call[EmbedResult]:
    """Makes vectors of `images`."""
    request = vision.EmbedRequest(model=model, mode=mode or "", **_images(images))
    return Call(METHODS["Embed"], request, _read_embed)


def transcribe(images: Images, *, model: str, mode: str | None) -> Call[TranscribeResult]:
    """Reads the sequences of classes in `images`."""
    request = vision.TranscribeRequest(model=model, mode=mode or "", **_images(images))
    return Call(METHODS["Transcribe"], request, _read_transcribe)


def locate(images: Images, *, model: str, min_score: float, mode: str | None) -> Call[LocateResult]:
    """Finds the keypoints in `images`."""
    request = vision.LocateRequest(model=model, min_score=min_score, mode=mode or "", **_images(images))
    return Call(METHODS["Locate"], request, _read_locate)


def models() -> Call[tuple[Model, ...]]:
    """Lists the configured models."""
    return Call(METHODS["ListModels"], vision.ListModelsRequest(), _read_models)


def _images(images: Images) -> dict[str, Any]:
    loaded = image_arguments.load(images)
    if isinstance(loaded, list):
        return {"images": loaded}
    count, height, width, _ = loaded.shape
    levels = image_arguments.whole_levels(loaded)
    return {"pixels": vision.Pixels(images=count, height=height, width=width, rgb=levels.tobytes())}


def _answer(response: Any) -> dict[str, Any]:
    """Returns the fields that every answer has."""
    has_timings = response.HasField("timings")
    return {
        "model": response.model,
        "version": response.version,
        "mode": response.mode,
        "timings": Timings(**{stage: getattr(response.timings, stage) for stage in STAGES}) if has_timings else None,
    }


def _read_classify(response: vision.ClassifyResponse) -> ClassifyResult:
    return ClassifyResult(
        classifications=tuple(Classification(_categories(item)) for item in response.classifications),
        **_answer(response),
    )


def _categories(item: vision.Classification | vision.Transcription) -> tuple[Category, ...]:
    return tuple(Category(entry.index, entry.label, entry.score) for entry in item.categories)


def _read_detect(response: vision.DetectResponse) -> DetectResult:
    return DetectResult(
        results=tuple(
            Detections(
                tuple(
                    Detection(
                        found.index,
                        found.label,
                        found.score,
                        Box(found.box.x_min, found.box.y_min, found.box.x_max, found.box.y_max),
                    )
                    for found in item.detections
                ),
                item.height,
                item.width,
            )
            for item in response.results
        ),
        **_answer(response),
    )


def _read_segment(response: vision.SegmentResponse) -> SegmentResult:
    labels = tuple(response.labels)
    return SegmentResult(maps=tuple(ClassMap(_classes(item), labels) for item in response.maps), **_answer(response))


def _classes(item: vision.ClassMap) -> NDArray[Any]:
    data = item.run_lengths
    runs = np.frombuffer(data[: len(data) // 8 * 8], "<u4").reshape(-1, 2)
    pixels = item.height * item.width
    if len(data) % 8 or int(runs[:, 1].sum(dtype=np.uint64)) != pixels:
        raise InvalidReply(f"expected run lengths of {item.height} x {item.width} pixels, got {len(data)} other bytes")
    dtype = np.uint8 if runs[:, 0].max(initial=0) <= np.iinfo(np.uint8).max else np.uint16
    return np.repeat(runs[:, 0].astype(dtype), runs[:, 1]).reshape(item.height, item.width)


def _read_embed(response: vision.EmbedResponse) -> EmbedResult:
    vectors = [np.array(embedding.values, np.float32) for embedding in response.embeddings]
    if len({len(vector) for vector in vectors}) != 1:
        raise InvalidReply(f"expected vectors of one length, got {sorted({len(vector) for vector in vectors})}")
    return EmbedResult(vectors=np.stack(vectors), **_answer(response))


def _read_transcribe(response: vision.TranscribeResponse) -> TranscribeResult:
    return TranscribeResult(
        transcriptions=tuple(
            Transcription(item.text, item.score, _categories(item)) for item in response.transcriptions
        ),
        **_answer(response),
    )


def _read_locate(response: vision.LocateResponse) -> LocateResult:
    return LocateResult(
        results=tuple(
            Keypoints(tuple(map(_keypoint, item.keypoints)), item.height, item.width) for item in response.results
        ),
        **_answer(response),
    )


def _keypoint(found: vision.Keypoint) -> Keypoint:
    return Keypoint(found.index, found.label, found.score if found.HasField("score") else None, found.x, found.y)


def _read_models(response: vision.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(
        Model(
            name=model.name,
            version=model.version,
            state=_state(model.state),
            reason=model.reason,
            source=model.source,
            weights=model.weights,
            task=model.task,
            fit=model.fit,
            modes=tuple(model.modes),
            default_mode=model.default_mode,
            buckets=tuple(map(_bucket, model.buckets)),
            programs=tuple(
                Program(
                    mode=program.mode,
                    bucket=_bucket(program.bucket),
                    trace_s=program.trace_s,
                    compile_s=program.compile_s,
                    run_s=program.run_s,
                    run_loaded_s=program.run_loaded_s,
                    from_cache=program.from_cache,
                )
                for program in model.programs
            ),
            programs_total=model.programs_total,
            compile_s=model.compile_s,
            precision=model.precision,
            decode=model.decode,
            pixels=model.pixels,
            warnings=tuple(model.warnings),
            inputs=tuple(ModelInput(one.name, one.datatype, tuple(one.shape), one.is_image) for one in model.inputs),
        )
        for model in response.models
    )


def _state(state: int) -> str:
    known = vision.Model.State.values()
    return vision.Model.State.Name(state).removeprefix("STATE_").lower() if state in known else str(state)  # type: ignore[arg-type]


def _bucket(bucket: vision.Bucket) -> Bucket:
    return Bucket(bucket.batch, bucket.height, bucket.width)
