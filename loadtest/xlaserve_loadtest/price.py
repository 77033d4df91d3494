"""The price of compiling, and when it has paid for itself."""

from __future__ import annotations

from dataclasses import dataclass

from xlaserve_loadtest.record import LedgerEntry


@dataclass(frozen=True, slots=True)
class Price:
    """What an arm's programs cost to make."""

    arm: str
    programs: tuple[LedgerEntry, ...]
    """Of one server, smallest bucket first."""
    trace_s: float
    compile_s: float
    extra_s: float | None
    """Tracing and compiling over those of the baseline; None without one."""
    gain_ms_per_image: float | None
    """What the arm saves for each image over the baseline; below 0 where it is slower."""
    break_even_images: float | None
    """Images after which `extra_s` is paid back; 0 where there is nothing to pay, infinity where it never is; None
    where that can't be said."""
    text: str
    """The same in words."""
