"""`python -m bench.timed_model serve …`: xlaserve whose `builtin:noop` takes a known time and hardly a processor.

A batch takes BATCH_S and IMAGE_S for each row of its bucket, as on a device of its own.
"""

from __future__ import annotations

import time
from typing import Final

from xlaserve.cli import main
from xlaserve.config import Bucket, Mode
from xlaserve.engine.inputs import Images
from xlaserve.engine.program import Compilation, Outputs
from xlaserve.models.sources import noop
from xlaserve.models.sources.noop import NoopProgram

BATCH_S: Final = 0.020
IMAGE_S: Final = 0.010


class TimedProgram(NoopProgram):
    """`builtin:noop`, slower."""

    def compile(self, mode: Mode, bucket: Bucket) -> Compilation:
        """Returns an executable that sleeps."""
        executable = super().compile(mode, bucket).executable

        def run(images: Images) -> Outputs:
            time.sleep(BATCH_S + IMAGE_S * bucket.batch)
            return executable(images)

        return Compilation(run, trace_s=0.0, compile_s=0.0)


def install() -> None:
    """Has this process run `TimedProgram` as `builtin:noop`."""
    noop.NoopProgram = TimedProgram  # type: ignore[misc]


if __name__ == "__main__":
    install()
    main()
