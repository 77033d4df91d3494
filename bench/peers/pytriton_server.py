"""`python -m bench.peers.pytriton_server SAVED PORT`: PyTriton with its defaults around OpenVINO with its own.

In an environment of its own.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import Tensor
from pytriton.triton import Triton, TritonConfig

from bench.peers.compiled import SHAPE, compile_saved, run


def main(saved: str, port: int) -> None:
    """Serves until SIGTERM."""
    compiled = compile_saved(saved, -1)

    @batch  # type: ignore[untyped-decorator] # which has types in its own environment
    def infer(pixels: Any) -> dict[str, Any]:
        return {"scores": run(compiled, pixels)}

    config = TritonConfig(grpc_address="127.0.0.1", grpc_port=port, allow_http=False, allow_metrics=False)
    with Triton(config=config) as triton:
        triton.bind(
            "model",
            infer,
            [Tensor(name="pixels", dtype=np.uint8, shape=SHAPE)],
            [Tensor(name="scores", dtype=np.float32, shape=(-1,))],
        )
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        triton.serve()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
