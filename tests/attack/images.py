"""Images that no camera made."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tests.attack import http1, samples
from tests.attack.client import VISION, Client
from tests.attack.fuzz import Window
from tests.attack.http_requests import NOOP
from tests.attack.registry import BUSY, OK, Round, attack

from xlaserve_proto import vision_pb2 as vision

XMP: Final = "XML:com.adobe.xmp"
ALLOWED: Final = frozenset({OK, "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"})


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Returns an image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, pixels: bytes, *extra: bytes, depth: int = 8, kind: int = 2) -> bytes:
    """Returns a PNG whose header states a size, which its pixels may not have."""
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    parts = (_chunk(b"IHDR", header), *extra, _chunk(b"IDAT", pixels), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _exif(orientation: int, *, order: str = "<", kind: int = 3, count: int = 1, offset: int = 8) -> bytes:
    value = struct.pack(
        f"{order}I" if kind == 4 else f"{order}HH", *((orientation,) if kind == 4 else (orientation, 0))
    )
    entry = struct.pack(f"{order}HHI", 0x0112, kind, count) + value
    start = b"II*\0" if order == "<" else b"MM\0*"
    return b"Exif\0\0" + start + struct.pack(f"{order}I", offset) + struct.pack(f"{order}H", 1) + entry + bytes(4)


def _behind_damage(orientation: int) -> bytes:
    """Returns EXIF whose table no reader has to follow up to the orientation: a value before it lies behind the end."""
    entries = ((0x011A, 5, 1, 0xFFFF), (0x0112, 3, 1, orientation))
    table = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(entries)) + table + bytes(4)


def _profile(exif: bytes) -> str:
    """Returns EXIF as ImageMagick writes it into a PNG."""
    return f"\nexif\n{len(exif):8}\n{exif.hex()}\n"


def _without_adobe(jpeg: bytes) -> bytes:
    """Returns a JPEG without the marker that says that its CMYK is inverted, as Adobe's programs write it."""
    at = jpeg.index(b"\xff\xee")
    (length,) = struct.unpack_from(">H", jpeg, at + 2)
    return jpeg[:at] + jpeg[at + 2 + length :]


def _text(key: str, value: str) -> PngInfo:
    """Returns a text for a PNG: packed as EXIF is, and not as XMP is."""
    info = PngInfo()
    if key == XMP:
        info.add_itxt(key, value)
    else:
        info.add_text(key, value, zip=True)
    return info


def same_digit(digit: int) -> Iterator[tuple[str, bytes]]:
    """Gives files that show a digit, each as a kind of image that is rare but right."""
    scan = Image.open(io.BytesIO(samples.digit_files()[digit])).convert("RGB")
    grey = scan.convert("L")
    yield "grey", encode(grey)
    yield "palette", encode(scan.quantize(64))
    yield "palette with transparency", encode(scan.quantize(64), transparency=bytes(range(16)))
    yield "RGBA", encode(scan.convert("RGBA"))
    yield "16 bits", encode(Image.fromarray(np.asarray(grey).astype(np.uint16) << 8))
    cmyk = encode(scan.convert("CMYK"), "JPEG", quality=95)
    yield "CMYK JPEG", cmyk
    yield "CMYK JPEG without Adobe's marker", _without_adobe(cmyk)
    yield "progressive JPEG", encode(scan, "JPEG", quality=95, progressive=True)
    yield "grey JPEG", encode(grey, "JPEG", quality=95)
    yield "lossless WebP", encode(scan, "WEBP", lossless=True)
    yield (
        "animated WebP",
        encode(scan, "WEBP", lossless=True, save_all=True, append_images=[Image.new("RGB", scan.size)]),
    )
    yield "animated PNG", encode(scan, save_all=True, append_images=[Image.new("RGB", scan.size)])
    yield "garbage behind", samples.digit_files()[digit] + b"\0garbage" * 1000
    yield "enlarged", encode(scan.resize((700, 700), Image.Resampling.BICUBIC))
    for turn, way in ((3, Image.Transpose.ROTATE_180), (6, Image.Transpose.ROTATE_90)):
        turned, said = scan.transpose(way), f'<rdf:Description tiff:Orientation="{turn}"/>'
        yield (
            f"EXIF {turn} in a PNG's text",
            encode(turned, pnginfo=_text("Raw profile type exif", _profile(_exif(turn)))),
        )
        yield f"XMP {turn} in a PNG", encode(turned, pnginfo=_text(XMP, said))
        yield f"XMP {turn} in a JPEG", encode(turned, "JPEG", quality=95, xmp=said.encode())
        yield f"XMP {turn} in a WebP", encode(turned, "WEBP", lossless=True, xmp=said.encode())
    for turn, way in ((3, Image.Transpose.ROTATE_180), (6, Image.Transpose.ROTATE_90), (8, Image.Transpose.ROTATE_270)):
        yield f"EXIF {turn}", encode(scan.transpose(way), "JPEG", quality=95, exif=_exif(turn))
        yield f"EXIF {turn}, big-endian", encode(scan.transpose(way), "JPEG", quality=95, exif=_exif(turn, order=">"))
        yield f"EXIF {turn} behind damage", encode(scan, "JPEG", quality=95, exif=_behind_damage(turn))


def _many_scans(count: int) -> bytes:
    data = encode(Image.new("RGB", (1500, 1500), (9, 99, 200)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * count + data[-2:]


HOSTILE: Final[dict[str, Callable[[random.Random], bytes]]] = {
    "nothing": lambda rng: b"",
    "noise": lambda rng: rng.randbytes(rng.choice((1, 100, 100_000))),
    "a signature alone": lambda rng: rng.choice((b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP")),
    "cut off": lambda rng: _cut(rng.choice((samples.photo(), samples.digit_files()[0])), rng),
    "damaged": lambda rng: samples.damage(rng.choice((samples.photo(), samples.digit_files()[0])), rng),
    "scrambled": lambda rng: samples.scramble(rng.choice((samples.photo(), samples.digit_files()[0])), rng),
    "a PNG bomb": lambda rng: png(7000, 7000, zlib.compress(bytes(30_000_000), 9)),
    "a PNG of huge sides": lambda rng: png(rng.choice((65_536, 2**31 - 1)), rng.choice((1, 65_536)), b"x"),
    "a PNG of no size": lambda rng: png(0, rng.choice((0, 5)), zlib.compress(b"")),
    "a PNG of fewer pixels than it says": lambda rng: png(3000, 3000, zlib.compress(b"\0" * 100)),
    "a PNG with profile bombs": lambda rng: png(
        32, 32, zlib.compress(bytes(32 * 97)), *[_chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(5_000_000)))] * 4
    ),
    "a PNG with text bombs": lambda rng: png(
        32, 32, zlib.compress(bytes(32 * 97)), *[_chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(3_000_000)))] * 30
    ),
    "a PNG with a wild profile": lambda rng: encode(
        Image.new("RGB", (16, 8)),
        pnginfo=_text("Raw profile type exif", rng.choice(("\nexif\n", "\n" * 9, "0" * 9, _profile(rng.randbytes(99)),
                                                           "\nexif\n 8\n" + "0g" * 400_000))),
    ),
    "a PNG with a profile bomb": lambda rng: encode(
        Image.new("RGB", (16, 8)), pnginfo=_text("Raw profile type exif", "\nexif\n 8\n" + "00" * 3_000_000)
    ),
    "a PNG with endless XMP": lambda rng: encode(
        Image.new("RGB", (16, 8)), pnginfo=_text(XMP, rng.choice(("tiff:Orientation=", "<tiff:Orientation>")) * 300_000)
    ),
    "16-bit grey": lambda rng: encode(
        Image.fromarray(np.full(rng.choices((1, 3000), k=2), rng.choice((0, 4095, 65_535)), np.uint16))
    ),
    "a PNG of odd kinds": lambda rng: png(
        8, 8, zlib.compress(bytes(1000)), depth=rng.choice((1, 2, 3, 4, 16, 32)), kind=rng.randrange(8)
    ),
    "a JPEG of many scans": lambda rng: _many_scans(rng.choice((50, 400, 2000))),
    "a JPEG of tiny segments": lambda rng: b"\xff\xd8" + b"\xff\xfe\0\2" * 500_000 + samples.photo()[2:],
    "a JPEG with wild EXIF": lambda rng: encode(
        Image.new("RGB", (16, 8)),
        "JPEG",
        exif=_exif(rng.choice((0, 9, 65535)), kind=rng.choice((1, 3, 4, 12)), count=rng.choice((0, 1, 2**31)),
                   offset=rng.choice((0, 8, 2**32 - 1))),
    ),
    "a WebP of another size": lambda rng: samples.scramble(encode(Image.new("RGB", (9, 9)), "WEBP")[:40], rng),
    "a huge WebP canvas": lambda rng: b"RIFF\x2a\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff" + bytes(12),
    "another format": lambda rng: encode(Image.new("RGB", (9, 9)), rng.choice(("GIF", "BMP", "TIFF", "PPM"))),
    "a page or a pointer": lambda rng: rng.choice(
        (b"<!DOCTYPE html>", b"version https://git-lfs.github.com/spec/v1\n", b"\0\0\0\x18ftypheic", b"<?xml" * 99_999)
    ),
    "a large image": lambda rng: encode(Image.new("RGB", (6000, 6000), (1, 2, 3))),
}  # fmt: skip


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


@attack(allowed=ALLOWED, weight=2, most_mib=1200)
def hostile_images(round: Round) -> None:
    """Bombs, cut off, damaged and odd files, among rare but valid ones, whose digit must be read as usual."""
    right = [(digit, name, data) for digit in range(10) for name, data in same_digit(digit)]
    round.random.shuffle(right)
    with Client(round.server.grpc) as client:
        window, names, number = Window(round), list(HOSTILE), 0
        while round.has_time:
            number += 1
            if right and round.random.random() < 0.3:
                digit, name, data = right[number % len(right)]
                valid = samples.classify([digit], [data])
                call = client.send(valid.method, valid.message.SerializeToString())
                window.add(call, f"image {number}: {digit} as {name}", allowed=BUSY, check=valid.check)
                continue
            name = names[number % len(names)]
            data = HOSTILE[name](round.random)
            message: Any
            if not round.has_shapes or round.random.random() < 0.7:
                message, method = vision.ClassifyRequest(model="digits", images=[data]), "Classify"
            else:
                message, method = vision.SegmentRequest(model="shapes-segmenter", images=[data]), "Segment"
            window.add(client.send(f"{VISION}{method}", message.SerializeToString()), f"image {number}: {name}")
        window.finish()


@attack(allowed={OK})
def grey_of_16_bits(round: Round) -> None:
    """Grey images of 16 and of 8 bits: answers to the former warn until somebody chose what their levels mean."""
    rng = round.random
    with http1.Client(round.server.http) as client:
        while round.has_time:
            is_deep, most = rng.random() < 0.5, rng.choice((0, 255, 4095, 65_535))
            size, dtype = (rng.randrange(1, 400), rng.randrange(1, 400)), np.uint16 if is_deep else np.uint8
            image = encode(Image.fromarray(np.full(size, most if is_deep else most & 255, dtype)))
            tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(image).decode()]}
            outcome, body, wrong = client.ask(http1.Request("POST", NOOP, {"inputs": [tensor]}))
            warning = json.loads(body).get("parameters", {}).get("warning", "") if outcome == OK else ""
            if outcome == OK and ("grey16" in warning) != is_deep:
                wrong = f"warning: {warning!r}"
            round.count(outcome, f"grey of {16 if is_deep else 8} bits up to {most}", wrong=wrong)
