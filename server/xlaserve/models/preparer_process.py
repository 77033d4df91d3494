"""Compiles a model into a compile cache: the process that `preparer` starts, with the settings on its stdin."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from xlaserve.config import Settings
from xlaserve.errors import ModelFailed, XlaserveError
from xlaserve.models import catalog, verification
from xlaserve.models.preparer import DONE, FAILED, STEP
from xlaserve.models.sources.conversions import Conversions
from xlaserve.programs.cache.compile_cache import CompileCache
from xlaserve.programs.tf import xla_executable_cache
from xlaserve.programs.tf.device import configure
from xlaserve.telemetry.logs import quiet_tensorflow


def main() -> None:
    """Compiles and verifies every bucket of the settings' only model in each mode.

    Raises any error of building and compiling, and ModelFailed where the compile cache can't hold a program.
    """
    with suppress(OSError):  # where memory runs out, this process goes, and not the server
        Path("/proc/self/oom_score_adj").write_text("1000")
    settings = Settings.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    quiet_tensorflow()
    assert settings.compile_cache
    xla_executable_cache.set_environment()
    cache = CompileCache(settings.compile_cache)
    device = configure(settings, uses_tensorflow=True)
    from xlaserve.models.networks import cached  # noqa: PLC0415 - imports TensorFlow
    from xlaserve.models.networks.cached_program import CachedProgram  # noqa: PLC0415 - imports TensorFlow

    _tell("building the model")
    model = catalog.load(settings.models[0], partial(cached.network, cache, device), Conversions(cache.root))
    verifier = verification.verifier(model, has_tf32=device.tf32, warn=lambda warning: None)
    for mode in model.settings.compiled_modes:
        try:
            for bucket in model.buckets:
                compile_one = partial(model.program.compile, mode, bucket)
                _tell(f"compiling mode {mode}, bucket {bucket}")
                compiled = compile_one()
                _tell(f"running mode {mode}, bucket {bucket}")
                verifier.verify(mode, bucket, compiled, compile_one)
        except Exception:  # its other buckets would take as long to fail
            if model.settings.needs(mode):
                raise
        if not isinstance(model.program, CachedProgram) or model.program.not_kept:
            raise ModelFailed("its programs can't be kept")
    _tell(DONE)


def _tell(step: str) -> None:
    sys.stdout.write(f"\n{STEP}{step}\n")  # on a line of its own, whatever the model has printed
    sys.stdout.flush()


def _end_with_the_server() -> None:
    while os.read(0, 1):  # not of `sys.stdin`, whose lock must be free when Python ends
        pass
    os._exit(1)


if __name__ == "__main__":
    try:
        try:
            main()
        except BaseException:  # also `sys.exit` in the model's code
            _tell(FAILED)
            raise
    except XlaserveError as error:
        sys.exit(str(error))
    except ValidationError as error:
        sys.exit(f"settings: {error.errors()[0]['msg']}")
