"""A runtime of MLServer around OpenVINO, both with their defaults; MLServer imports it, in its own environment."""

from __future__ import annotations

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from bench.peers.compiled import compile_saved, run


class OpenVino(MLModel):  # type: ignore[misc] # which has types in its own environment
    """Answers images with their scores. Its `uri` is a SavedModel."""

    async def load(self) -> bool:
        """Compiles the model."""
        self._compiled = compile_saved(self.settings.parameters.uri, -1)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Returns the scores."""
        scores = run(self._compiled, NumpyCodec.decode_input(payload.inputs[0]))
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("scores", scores)])
