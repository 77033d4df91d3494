"""Admission of images: a bound on the images and bytes that a model has admitted and not yet answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from xlaserve.errors import InvalidArgument, ModelNotReady, QueueFull

MIN_RETRY_S: Final = 0.01
"""The least time in seconds after which a caller that is refused for lack of room should try again."""


@dataclass(eq=False)
class ImageAdmission:
    """Bounds the requests of `model` that are decoded, wait or run. All methods run on the event loop."""

    model: str
    max_images: int
    max_bytes: int
    drain_s: Callable[[], float] = lambda: 0.0
    """Returns the seconds in which all images in flight should leave."""
    images: int = 0
    size_bytes: int = 0
    """Bytes of the images in flight, encoded and decoded."""
    is_closed: bool = False
    """Whether no more requests are admitted."""

    def __post_init__(self) -> None:
        self._emptied = asyncio.Event()

    def admit(self, images: int, size_bytes: int) -> None:
        """Admits `images` that take `size_bytes` in all, until `leave`. Raises ModelNotReady, QueueFull, or
        InvalidArgument for more than the bounds allow at all."""
        if self.is_closed:
            raise ModelNotReady(f"model {self.model} is draining")
        if images > self.max_images:
            raise InvalidArgument("images", f"at most {self.max_images} in a request (max_queue_images)", images)
        if size_bytes > self.max_bytes:
            raise InvalidArgument(
                "images", f"at most {self.max_bytes} bytes in a request (max_queue_bytes)", f"{size_bytes} bytes"
            )
        if self.images + images > self.max_images:
            raise QueueFull(
                f"model {self.model}: {images} more images exceed max_queue_images {self.max_images};"
                f" {self.images} are in flight",
                self._room_s((self.images + images - self.max_images) / self.images),
            )
        if self.size_bytes + size_bytes > self.max_bytes:
            raise QueueFull(
                f"model {self.model}: {size_bytes} more bytes exceed max_queue_bytes {self.max_bytes};"
                f" {self.size_bytes} are in flight",
                self._room_s((self.size_bytes + size_bytes - self.max_bytes) / self.size_bytes),
            )
        self.images += images
        self.size_bytes += size_bytes

    def _room_s(self, share: float) -> float:
        """Returns the seconds in which this share of the images in flight should leave."""
        return max(MIN_RETRY_S, share * self.drain_s())

    def leave(self, images: int, size_bytes: int) -> None:
        """Releases images that `admit` admitted."""
        self.images -= images
        self.size_bytes -= size_bytes
        if self.is_closed and not self.images:
            self._emptied.set()

    async def emptied(self) -> None:
        """Returns once every request has left; called after closing."""
        if self.images:
            await self._emptied.wait()
