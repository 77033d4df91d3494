"""Crashes of processes that run models: versions that may have caused them are counted, and in the end set aside."""

from __future__ import annotations

import json
from typing import Final

from xlaserve.engine.under_way import Suspect, suspects
from xlaserve.processes.supervision.parent import CRASHES, SILENCED, STOPS, exit_status
from xlaserve.processes.supervision.process import as_words
from xlaserve.processes.supervision.role import NO_USE

MOST: Final = 3
"""Number of crashes that a version may have caused before it is set aside, which means not loaded any more."""
MOST_KNOWN: Final = 100
"""Versions that are remembered, the latest ones: `text` has to fit into an environment variable (128 KiB)."""
AT_ONCE: Final = frozenset(exit_status(-number) for number in STOPS)
"""Exit statuses of a process that ended at once, at a third signal."""
AGAIN: Final = "load it again, or change its files or settings, to have it tried once more"


class Crashes:
    """The crashes of a server. `known` is the `text` of earlier ones."""

    def __init__(self, known: str = "{}") -> None:
        self._counted: dict[str, tuple[int, str]] = {
            key: (count, how) for key, (count, how) in json.loads(known).items()
        }
        """By a version's key in hexadecimal: the crashes that it may have caused, and a description of the last one."""

    @property
    def text(self) -> str:
        """All crashes as JSON, for `known` of another process."""
        return json.dumps(self._counted)

    @property
    def set_aside(self) -> dict[bytes, str]:
        """By key of a version that is not to be loaded, the reason."""
        return {
            bytes.fromhex(key): f"it was set aside: the process ended with {how}; {AGAIN}"
            for key, (count, how) in self._counted.items()
            if count >= MOST
        }

    def note(self, status: int, under_way: int, last_words: int, *, has_said_so: bool = False) -> str:
        """Counts the end of a process, if it was a crash; returns what models did that may have caused it, or "".

        `under_way` and `last_words` are the descriptors of the files that the process has left. A process that ends
        without having said so (`has_said_so`) was ended by a library, perhaps with status 0, or from outside, by a
        signal that no process ends itself with.

        A version that was loaded alone, and beside no batches, would be loaded in the same way each time: it is set
        aside after one crash, unless the process was ended for its silence (`SILENCED`). A version that ran may have
        crashed for the sake of a single request: it is set aside after `MOST` crashes, even if nothing else was under
        way. If such a version was under way at all of them, a load beside it does not count: after a crash, loads are
        always under way.
        """
        if not (_is_failure(status) if has_said_so else _is_crash(status)):
            return ""
        with open(last_words, errors="replace", closefd=False) as words:
            words.seek(0)
            found = suspects(under_way, words.read())
        ran = [key for key, suspect in found.items() if not suspect.is_load]
        is_by_batch = any(self._count(key) + 1 >= MOST for key in ran)
        for key, suspect in found.items():
            count = self._count(key)
            if suspect.is_load and len(found) == 1 and status != -SILENCED:
                count = MOST
            elif not (suspect.is_load and is_by_batch):
                count += 1
            self._counted.pop(key.hex(), None)  # the latest are the last
            self._counted[key.hex()] = count, f"{as_words(status)} while it {_how(suspect)}"
        self._counted = dict([*self._counted.items()][-MOST_KNOWN:])
        return " or ".join(f"model {suspect.title} {_how(suspect)}" for suspect in found.values())

    def _count(self, key: bytes) -> int:
        """Returns the crashes that a version may have caused."""
        count, _ = self._counted.get(key.hex(), (0, ""))
        return count


def _is_crash(status: int) -> bool:
    return -status in CRASHES or status >= 0


def _is_failure(status: int) -> bool:
    return status > 0 and status != NO_USE and status not in AT_ONCE


def _how(suspect: Suspect) -> str:
    did = "was loaded" if suspect.is_load else "ran"
    return f"{did} ({suspect.steps})" if suspect.steps else did
