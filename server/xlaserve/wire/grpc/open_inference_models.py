"""All of the Open Inference Protocol but inference: messages to plain data, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from xlaserve.admission.audit import audited
from xlaserve.admission.caller import CURRENT
from xlaserve.wire.grpc.context import Context
from xlaserve.wire.grpc.infer_message import parameter_value
from xlaserve.wire.grpc.shared_memory_tensors import for_peer
from xlaserve.wire.shared.models import Models, server_metadata
from xlaserve.wire.shared.shared_memory import SharedMemory
from xlaserve.wire.shared.triton_settings import log_settings, trace_settings
from xlaserve_proto import open_inference_pb2 as pb
from xlaserve_proto import open_inference_pb2_grpc as pb_grpc

LOG_FIELDS: Final[dict[type, str]] = {bool: "bool_param", int: "uint32_param", str: "string_param"}


class OpenInferenceModels(pb_grpc.GRPCInferenceServiceServicer):
    """The methods of `inference.GRPCInferenceService` that describe and control the server and its models."""

    models: Models
    shared_memory: SharedMemory | None
    """None where it is turned off."""
    is_live: Callable[[], bool]
    """Whether no process that this one depends on hangs."""

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        """Says whether the server works, as `liveness` of the health service does."""
        return pb.ServerLiveResponse(live=self.is_live())

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        """Says whether start-up has finished and at least one model serves."""
        return pb.ServerReadyResponse(ready=self.models.directory.is_ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        """Says whether one model is ready."""
        return pb.ModelReadyResponse(ready=self.models.is_ready(request.name, request.version))

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        """Says what this server is and speaks."""
        has_shared_memory = self.shared_memory is not None
        return pb.ServerMetadataResponse(**server_metadata(has_shared_memory=has_shared_memory))

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        """Describes a model."""
        return pb.ModelMetadataResponse(**self.models.metadata(request.name, request.version))

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        """Describes a model in Triton's terms."""
        return pb.ModelConfigResponse(config=pb.ModelConfig(**self.models.config(request.name, request.version)))

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        """Counts what one model did, or all of them."""
        return pb.ModelStatisticsResponse(**await self.models.statistics(request.name, request.version))

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        """Lists the models."""
        models = self.models.index(request.repository_name, only_ready=request.ready)
        return pb.RepositoryIndexResponse(models=[pb.RepositoryIndexResponse.ModelIndex(**one) for one in models])

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        """Loads a model, or loads it again."""
        await self.models.load(request.repository_name, request.model_name, request.parameters)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        """Drains and unloads a model."""
        await self.models.unload(request.repository_name, request.model_name, request.parameters)
        return pb.RepositoryModelUnloadResponse()

    async def SystemSharedMemoryStatus(
        self, request: pb.SystemSharedMemoryStatusRequest, context: Context
    ) -> pb.SystemSharedMemoryStatusResponse:
        """Shows one registered region, or all of them."""
        regions = for_peer(self.shared_memory, context).status(request.name)
        response = pb.SystemSharedMemoryStatusResponse()
        for name, region in regions.items():
            shown = response.regions[name]
            shown.name, shown.key, shown.offset, shown.byte_size = name, region.key, region.offset, region.size_bytes
        return response

    async def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest, context: Context
    ) -> pb.SystemSharedMemoryRegisterResponse:
        """Registers a region."""
        with audited("register", request.name):
            memory = for_peer(self.shared_memory, context)
            memory.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, context: Context
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Forgets one region, or all of them."""
        with audited("unregister", request.name or "*"):
            for_peer(self.shared_memory, context).unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def TraceSetting(self, request: pb.TraceSettingRequest, context: Context) -> pb.TraceSettingResponse:
        """Says that nothing is traced."""
        if request.model_name:
            CURRENT.get().check_model(request.model_name)
            self.models.directory.find(request.model_name)
        settings = trace_settings({key: one.value for key, one in request.settings.items()})
        shown = {key: pb.TraceSettingResponse.SettingValue(value=values) for key, values in settings.items()}
        return pb.TraceSettingResponse(settings=shown)

    async def LogSettings(self, request: pb.LogSettingsRequest, context: Context) -> pb.LogSettingsResponse:
        """Says what is logged."""
        settings = log_settings({key: parameter_value(one) for key, one in request.settings.items()})
        response = pb.LogSettingsResponse()
        for key, value in settings.items():
            setattr(response.settings[key], LOG_FIELDS[type(value)], value)
        return response
