"""Models as the Open Inference Protocol describes them: pure functions from a version to messages."""

from __future__ import annotations

from typing import Final

from xlaserve.model.version import Served, Version
from xlaserve.pipeline import CHANNELS
from xlaserve.rpc.infer_message import IMAGE, PIXELS
from xlaserve.runtimes.tf.device import Device
from xlaserve.telemetry.model import Duration, Statistics
from xlaserve_proto import open_inference_pb2 as pb

Tensor = pb.ModelMetadataResponse.TensorMetadata
ANY: Final = -1
MODEL_DATATYPE: Final = {"FP32": pb.TYPE_FP32, "INT32": pb.TYPE_INT32, "UINT8": pb.TYPE_UINT8}


def metadata(served: Served) -> pb.ModelMetadataResponse:
    """Returns the metadata of a model."""
    height, width = _pixel_size(served)
    return pb.ModelMetadataResponse(
        name=served.settings.name,
        versions=[served.settings.version],
        platform=_platform(served),
        inputs=[
            Tensor(name=PIXELS, datatype="UINT8", shape=(ANY, height, width, CHANNELS)),
            Tensor(name=IMAGE, datatype="BYTES", shape=(ANY,)),
        ],
        outputs=[
            Tensor(name=output.name, datatype=output.datatype, shape=output.shape)
            for output in served.model.task.outputs
        ],
        properties=_properties(served),
    )


def config(served: Served, device: Device) -> pb.ModelConfig:
    """Returns the configuration of a model in Triton's terms."""
    height, width = _pixel_size(served)
    batches = sorted({bucket.batch for bucket in served.model.buckets})
    return pb.ModelConfig(
        name=served.settings.name,
        platform=_platform(served),
        backend=served.model.program.platform,
        max_batch_size=batches[-1],
        input=[
            pb.ModelInput(
                name=PIXELS,
                data_type=pb.TYPE_UINT8,
                format=pb.ModelInput.FORMAT_NHWC,
                dims=(height, width, CHANNELS),
                optional=True,
            ),
            pb.ModelInput(name=IMAGE, data_type=pb.TYPE_STRING, dims=(1,), optional=True),
        ],
        output=[
            pb.ModelOutput(name=output.name, data_type=MODEL_DATATYPE[output.datatype], dims=output.shape[1:])
            for output in served.model.task.outputs
        ],
        instance_group=[
            pb.ModelInstanceGroup(
                name="lanes",
                count=device.lanes // max(1, len(device.gpus)),  # on each GPU
                kind=pb.ModelInstanceGroup.KIND_GPU if device.kind == "gpu" else pb.ModelInstanceGroup.KIND_CPU,
                gpus=device.gpus,
            )
        ],
        dynamic_batching=pb.ModelDynamicBatching(
            preferred_batch_size=batches,
            max_queue_delay_microseconds=round(served.settings.max_queue_delay_ms * 1000),
        ),
        parameters={key: pb.ModelParameter(string_value=value) for key, value in _properties(served).items()},
    )


def statistics(version: Version) -> pb.ModelStatistics:
    """Returns what a model did since it was loaded."""
    counts = version.telemetry.statistics
    return pb.ModelStatistics(
        name=version.name,
        version=version.settings.version,
        last_inference=counts.last_at_ms,
        inference_count=counts.images,
        execution_count=counts.batches,
        inference_stats=pb.InferStatistics(
            success=_duration(counts.success),
            fail=_duration(counts.fail),
            queue=_duration(counts.queue),
            compute_input=_duration(counts.input),
            compute_infer=_duration(counts.infer),
            compute_output=_duration(counts.output),
            cache_hit=pb.StatisticDuration(),
            cache_miss=pb.StatisticDuration(),
        ),
        batch_stats=_batch_statistics(counts),
    )


def index(version: Version) -> pb.RepositoryIndexResponse.ModelIndex:
    """Returns a model's line of the repository's index."""
    return pb.RepositoryIndexResponse.ModelIndex(
        name=version.name, version=version.settings.version, state=version.state, reason=version.progress
    )


def _batch_statistics(counts: Statistics) -> list[pb.InferBatchStatistics]:
    return [
        pb.InferBatchStatistics(
            batch_size=size,
            compute_input=_duration(counts.gather_by_size[size]),
            compute_infer=_duration(counts.infer_by_size[size]),
            # A response is made for a request, not for a batch.
            compute_output=pb.StatisticDuration(),
        )
        for size in sorted(counts.infer_by_size)
    ]


def _duration(duration: Duration) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=duration.count, ns=round(duration.seconds * 1e9))


def _platform(served: Served) -> str:
    platform = served.model.program.platform
    return f"{platform}_xla" if platform == "tensorflow" else platform


def _pixel_size(served: Served) -> tuple[int, int]:
    if served.background is not None:
        height, width = (ANY if side is None else side for side in served.model.size)
        return height, width
    return next(iter(served.sizes)) if len(served.sizes) == 1 else (ANY, ANY)


def _properties(served: Served) -> dict[str, str]:
    return {
        "source": source_name(served.settings.source),
        "weights": served.model.weights,
        "task": served.model.task.name,
        "fit": served.model.fit,
        "pixel_range": served.settings.pixel_range,
        "precision": served.version.precision_text,
        "modes": ",".join(served.settings.modes),
        "default_mode": served.settings.effective_default_mode,
        "buckets": ",".join(map(str, served.model.buckets)),
        **({"auto": auto} if (auto := served.version.auto_text) else {}),
        **({"lowerings": served.model.lowerings} if served.model.lowerings else {}),
    }


def source_name(source: str) -> str:
    """Returns a source as clients may see it: a path loses its folders."""
    return source.rstrip("/").rpartition("/")[2]
