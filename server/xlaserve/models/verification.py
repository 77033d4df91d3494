"""Verification of a model: its verifier, the differences found, and batches of one where images depend on others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

from xlaserve.config import Mode, Precision
from xlaserve.engine.program import Executable
from xlaserve.engine.warmup.auto_buckets import Programs, Warm
from xlaserve.engine.warmup.difference import MAX_RELATIVE, MAX_RELATIVE_INT8, Difference
from xlaserve.engine.warmup.ledger import Entry
from xlaserve.engine.warmup.verify import Verifier
from xlaserve.errors import ModelFailed, ShuttingDown
from xlaserve.models.catalog import Model

ONLY_IN_BATCHES: Final = (
    "batch_dependence: an image's answer depends on the others of its batch, and the model takes none alone; "
    "expected allow, which serves it all the same, or another model"
)


def narrow(model: Model, *, has_tf32: bool) -> dict[Mode, float]:
    """Returns the modes whose programs compute in less than float32, or whose model does so by itself, and the largest
    relative difference of each."""
    precisions = {mode: model.settings.precision_in(mode) for mode in model.settings.compiled_modes}
    return {
        mode: MAX_RELATIVE_INT8 if precision is Precision.INT8 else MAX_RELATIVE
        for mode, precision in precisions.items()
        if has_tf32 or model.is_narrow or precision is not Precision.FLOAT32
    }


def verifier(
    model: Model,
    *,
    has_tf32: bool,
    warn: Callable[[str], object],
    reference: Executable | None = None,
) -> Verifier:
    """Returns the verifier of the programs of `model`, against its own reference or another one."""
    return Verifier(
        task=model.task,
        reference=reference or model.reference,
        buckets=() if reference else model.buckets,  # another reference takes any batch
        narrow=narrow(model, has_tf32=has_tf32),
        verification=model.settings.verification,
        batch_dependence=model.settings.batch_dependence,
        inputs=model.inputs,
        warn=warn,
    )


def furthest(entries: Iterable[Entry], modes: Collection[Mode]) -> dict[Mode, Difference]:
    """Returns the difference from the reference of each of `modes`: that of its worst program."""
    worst: dict[Mode, Difference] = {}
    for entry in entries:
        found = entry.verified.difference if entry.verified and entry.mode in modes else None
        if found is not None and (entry.mode not in worst or found.badness > worst[entry.mode].badness):
            worst[entry.mode] = found
    return worst


def in_batches_of_one(programs: Programs, warm: Warm) -> Programs:
    """Returns the programs for batches of one, of the same modes and resolutions. Raises ModelFailed without such."""
    singles = {key: warmed for key, warmed in programs.items() if key[1].batch == 1}
    missing = {(mode, bucket._replace(batch=1)) for mode, bucket in programs} - singles.keys()
    if not missing:
        return singles
    try:
        return singles | warm(dict.fromkeys(mode for mode, _ in programs), {bucket for _, bucket in missing})
    except (ModelFailed, ShuttingDown):
        raise
    except Exception as error:
        raise ModelFailed(ONLY_IN_BATCHES) from error
