"""SavedModels made of other files, kept in the compile cache's folder where there is one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from xlaserve.programs.cache.environment import digest, installed, key

FOLDER: Final = "conversions"
MARK: Final = "saved_model.pb"


@dataclass(frozen=True)
class Conversions:
    """Conversions of model files to SavedModels. `root` is the compile cache's folder, None where there is none."""

    root: Path | None = None
    is_filling: bool = True
    """Whether what is made is kept; otherwise only what is there already is used."""

    @contextmanager
    def saved_model(
        self, file: Path, packages: Sequence[str], convert: Callable[[Path], None], *, is_kept: bool = True
    ) -> Iterator[Path]:
        """Yields the SavedModel of `file`, for as long as it takes to load it; `convert` makes it in a new folder.

        `packages` are distributions whose versions matter. `is_kept` says whether the file alone tells what comes of
        it. Nothing is kept where it was replaced meanwhile. Raises OSError and what `convert` raises.
        """
        kept = self._place(file, packages) if is_kept else None
        if kept is not None and (kept / MARK).is_file():
            yield kept
            return
        with tempfile.TemporaryDirectory(prefix="xlaserve-converted-") as temporary:
            made = Path(temporary, file.stem)
            convert(made)
            with suppress(OSError):  # the disk may be full, or another process faster
                # A file that was replaced since its digest would be kept as the one before it.
                if kept is not None and self.is_filling and self._place(file, packages) == kept:
                    _move(made, kept)
            yield kept if kept is not None and (kept / MARK).is_file() else made

    def _place(self, file: Path, packages: Sequence[str]) -> Path | None:
        if self.root is None:
            return None
        versions = {package: _version(package) for package in packages}
        facts = {"file": digest(file.parent, [file]), "versions": versions, "code": installed()["xlaserve"]}
        return self.root / FOLDER / key(facts)


def _move(made: Path, to: Path) -> None:
    """Moves a folder; the new one appears whole, or not at all."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as beside:
        Path(shutil.copytree(made, Path(beside, to.name))).rename(to)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
