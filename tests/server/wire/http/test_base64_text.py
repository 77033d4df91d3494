from __future__ import annotations

import base64
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Final

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xlaserve.errors import InvalidArgument
from xlaserve.wire.http import base64_text
from xlaserve.wire.http.base64_text import NotBase64, decoded, most_bytes
from xlaserve.wire.http.json_numbers import find_long, loads
from xlaserve.wire.http.json_tensors import image, images

FILE: Final = np.random.default_rng(0).bytes(700_001)
"""More than two steps, and of a length that is padded."""


def standard(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_safe(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()


def wrapped(text: str, width: int = 76, end: str = "\n") -> str:
    """Base64 as `base64` and MIME write it, with a line break behind the last line."""
    return "".join(text[start : start + width] + end for start in range(0, len(text), width))


FORMS: Final[dict[str, Callable[[bytes], str]]] = {
    "standard": standard,
    "url-safe": url_safe,
    "url-safe without padding": lambda data: url_safe(data).rstrip("="),
    "standard without padding": lambda data: standard(data).rstrip("="),
    "wrapped": lambda data: wrapped(standard(data)),
    "wrapped as MIME has it": lambda data: wrapped(standard(data), end="\r\n"),
    "wrapped as PEM has it, url-safe": lambda data: wrapped(url_safe(data), 64),
    "a data: URI": lambda data: "data:image/jpeg;base64," + standard(data),
    "a data: URI with parameters": lambda data: "data:image/png;charset=utf-8;BASE64," + standard(data),
    "a data: URI without a type, wrapped": lambda data: "data:;base64," + wrapped(standard(data)),
    "a data: URI, url-safe": lambda data: "DATA:image/webp;base64," + url_safe(data).rstrip("="),
}
WRITERS: Final[dict[str, Callable[[str], str]]] = {
    "Python": json.dumps,
    "PHP": lambda text: json.dumps(text).replace("/", "\\/"),
    ".NET": lambda text: json.dumps(text).replace("+", "\\u002B").replace("=", "\\u003D"),
    "other .NET": lambda text: json.dumps(text).replace("+", "\\u002b").replace("\\n", "\\u000a"),
}


@pytest.mark.parametrize("size_bytes", [0, 1, 2, 3, 50, 5000, 262_144 // 4 * 3, len(FILE)])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_base64_is_read(form: str, size_bytes: int) -> None:
    data = FILE[:size_bytes]
    assert bytes(decoded(FORMS[form](data).encode())) == data
    assert bytes(image(FORMS[form](data), "image")) == data


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("form", FORMS)
def test_long_base64_is_read_however_its_json_is_written(form: str, writer: str) -> None:
    text = f'{{"image": [{WRITERS[writer](FORMS[form](FILE))}, "short"], "top_k": 3}}'
    found = find_long(text.encode())
    assert len(found.rest) < 100
    assert len(FILE) <= found.decoded_bytes
    body = found.read()
    assert isinstance(body["image"][0], memoryview)
    assert bytes(body["image"][0]) == FILE
    assert (body["image"][1], body["top_k"]) == ("short", 3)


@given(data=st.binary(max_size=400), step=st.integers(1, 9), form=st.sampled_from([*FORMS]))
@example(data=FILE[:50], step=1, form="wrapped as MIME has it")
def test_steps_may_end_anywhere(data: bytes, step: int, form: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base64_text, "_STEP_BYTES", 4 * step)
        text = FORMS[form](data).encode()
        assert bytes(decoded(text)) == data
        assert (
            bytes(decoded(text.replace(b"\r", b"\\r").replace(b"\n", b"\\n").replace(b"/", b"\\/"))) == data or step < 2
        )


@given(st.text(max_size=60) | st.text("QUJD-_+/=\n \\", max_size=60))
def test_any_text_is_read_as_base64_says_or_refused(text: str) -> None:
    letters = text.translate(str.maketrans("-_", "+/", " \t\r\n"))
    try:
        data = bytes(decoded(text.encode("latin-1", "replace")))
    except NotBase64 as error:
        assert str(error).isprintable()
        return
    if "\\" not in text:
        assert data == base64.b64decode(letters + "=" * (-len(letters) % 4), validate=True)


def test_blanks_hold_the_interpreter_no_longer_than_other_text() -> None:
    text = memoryview(b'"' + b" " * 2**24 + b'"')
    began = time.thread_time()
    assert base64_text.string_begin(text, 1, len(text) - 1) is None
    assert time.thread_time() - began < 0.02


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("QUJ%QUJD", "'%' as character 4"),
        ("QUJDé", "'é' as character 5"),
        ("data:;base64,QU%D", "'%' as character 16"),
        ("QUJDQ", "text that ends within a byte"),
        ("QUJDRA==QUJD", "goes on behind its padding"),
        ("QUJDRA==\nQUJD", "goes on behind its padding"),
        ("====", "goes on behind its padding"),
        ("data:image/png,%89PNG", "a data: URI without ;base64,"),
        ("data:image/png;base64", "a data: URI without ;base64,"),
        ("/tmp/cat.jpg", "'.' as character 9"),
    ],
)
def test_what_is_not_base64_is_refused_with_its_place(text: str, got: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        images(["QUJD", text], "image")
    assert refusal.value.field == "image[1]"
    assert got in str(refusal.value)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ('{"image": ["%s"]}', "image[0]"),
        ('{"inputs": [{"name": "image", "data": ["QUJD", "%s"]}]}', "inputs[0].data[1]"),
        ('{"instances": [{"b64": "QUJD"}, {"b64": "%s"}]}', "instances[1].b64"),
        ('["%s"]', "[0]"),
        ('"%s"', "body"),
    ],
)
def test_long_text_that_is_not_base64_is_refused_with_its_place(body: str, field: str) -> None:
    text = standard(FILE)
    with pytest.raises(InvalidArgument) as refusal:
        loads((body % (text[:300_000] + "\\u0025" + text[300_000:])).encode())
    assert refusal.value.field == field
    assert "got '%' as character 300001" in str(refusal.value)


def test_long_base64_that_is_interrupted_is_refused_with_the_byte() -> None:
    text = standard(FILE)
    for head, letter in (("", "%"), ("data:image/png;base64,", "."), ("", "\u00e9")):
        body = json.dumps({"image": [text, f"{head}{text[:400_000]}{letter}{text[400_000:]}"]}, ensure_ascii=False)
        place = len(body[: body.index(letter, len(text))].encode()) + 1
        with pytest.raises(InvalidArgument, match=rf"; base64 is interrupted by .* at byte {place}$"):
            loads(body.encode())


@pytest.mark.parametrize(
    "text",
    [
        "a sentence without any punctuation " * 60,
        "\u4f60\u597d" * 600,  # which JSON escapes
        "caf\u00e9 " * 300,
        'says "' + "A" * 2000,
        "A" * 2000 + '" says',
        "data:image/svg+xml," + "A" * 2000,
    ],
)
def test_long_text_that_is_no_base64_stays_text(text: str) -> None:
    for is_ascii in (True, False):
        assert loads(json.dumps({"note": text}, ensure_ascii=is_ascii).encode()) == {"note": text}


def test_reading_takes_little_more_memory_than_what_is_read() -> None:
    data = FILE * 20
    for form in ("standard", "wrapped", "url-safe without padding"):
        text = json.dumps([FORMS[form](data)]).encode()
        found = find_long(text)
        tracemalloc.start()
        try:
            (read,) = found.read()
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert bytes(read) == data
        assert peak_bytes < found.decoded_bytes + (4 << 20)


@pytest.mark.parametrize("letters", ["=", "\\u002b", "\\n", "\\", "AAAA\\n", "-", " ", "A="])
def test_hostile_text_is_read_or_refused_soon(letters: str) -> None:
    text = ("A" * 20 + letters * (4_000_000 // len(letters))).encode()
    started = time.perf_counter()
    try:
        decoded(text)
    except NotBase64 as error:
        assert len(str(error)) < 100
    assert time.perf_counter() - started < 3


def test_the_bound_on_memory_holds_for_what_is_decoded() -> None:
    assert [most_bytes(letters) for letters in (0, 2, 3, 4, 8)] == [0, 1, 2, 3, 6]
