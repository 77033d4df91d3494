"""What a model has taken in and not yet answered: bounded, and counted until the last request has left."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from xlaserve.errors import InvalidArgument, ModelNotReady, QueueFull


@dataclass(eq=False)
class ImageAdmission:
    """Bounds the requests of `model` that are decoded, wait or run. All methods run on the event loop."""

    model: str
    max_images: int
    max_bytes: int
    images: int = 0
    size_bytes: int = 0
    """Bytes of those images, encoded and decoded."""
    is_closed: bool = False
    """Whether it takes no more."""

    def __post_init__(self) -> None:
        self._emptied = asyncio.Event()

    def admit(self, images: int, size_bytes: int) -> None:
        """Accepts `images` that take `size_bytes` in all, until `leave`. Raises ModelNotReady, QueueFull, or
        InvalidArgument for more than it ever takes."""
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
                f" {self.images} are in flight"
            )
        if self.size_bytes + size_bytes > self.max_bytes:
            raise QueueFull(
                f"model {self.model}: {size_bytes} more bytes exceed max_queue_bytes {self.max_bytes};"
                f" {self.size_bytes} are in flight"
            )
        self.images += images
        self.size_bytes += size_bytes

    def leave(self, images: int, size_bytes: int) -> None:
        """Ends what `admit` began."""
        self.images -= images
        self.size_bytes -= size_bytes
        if self.is_closed and not self.images:
            self._emptied.set()

    async def emptied(self) -> None:
        """Returns once every request has left, where it is closed."""
        if self.images:
            await self._emptied.wait()
