"""JPEG files as Pillow opens them, and the reduction of an image while it is decoded."""

from __future__ import annotations

import struct

from PIL.JpegImagePlugin import JpegImageFile

from xlaserve.images.frame import Region

_LONGEST_SCAN_HEADER = 14  # of four components
_MAX_COMPONENTS = 4


class JpegFile(JpegImageFile):
    """A JPEG whose header is read."""

    def _open(self) -> None:
        super()._open()
        assert self.fp is not None
        end = self.fp.tell()  # of the first scan's header
        self.fp.seek(max(0, end - _LONGEST_SCAN_HEADER))
        header = self.fp.read(_LONGEST_SCAN_HEADER)
        self.fp.seek(end)
        in_scan = [number for number in range(1, _MAX_COMPONENTS + 1) if _is_scan_header(header, number)]
        self.has_several_scans = "progressive" in self.info or in_scan[:1] != [self.layers]
        """Whether the decoder keeps the coefficients of the whole image until it has read all scans, as libjpeg does
        where the first one lacks components."""
        # Where that header has the first coefficient, 0, a lossless one has its predictor, from 1 on. Such an image
        # can't be reduced: libjpeg-turbo refuses to, or writes rows of the whole width into Pillow's shorter ones.
        self._has_coefficients = header[-3:-2] == b"\0"

    def _read_dpi_from_exif(self) -> None:
        """Does nothing: the DPI is not needed, and the TIFF parser writes warnings about a client's data."""

    def shrink_on_load(self, width: int, height: int) -> Region | None:
        """Has the decoder halve both sides as long as at least `width` x `height` pixels remain, three times at most.

        Returns the part of the decoded pixels that is the image, as sides are rounded up to whole pixels. None where
        the decoder can't reduce such an image.
        """
        drafted = self.draft(None, (width, height)) if self._has_coefficients else None
        return drafted[1] if drafted else None


def _is_scan_header(header: bytes, components: int) -> bool:
    """Returns whether `header` ends with the header of a scan of this many components."""
    length = 6 + 2 * components
    return header[-length:].startswith(struct.pack(">HB", length, components))
