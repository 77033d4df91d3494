"""Checks of model files by their content: files that are damaged, or were not copied whole, are refused."""

from __future__ import annotations

import re
import shlex
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from xlaserve.config import onnx_weights, sources
from xlaserve.errors import ModelFailed
from xlaserve.models.sources import content_kinds

HEAD_BYTES: Final = 512
LFS: Final = b"version https://git-lfs.github.com/spec/"
HDF5: Final = b"\x89HDF\r\n\x1a\n"
ZIP: Final = b"PK\x03\x04"
GZIP: Final = b"\x1f\x8b"
HTML: Final = re.compile(rb"\s*(<!--.*?-->\s*)*<(!doctype\s+html|html|head)\b", re.IGNORECASE | re.DOTALL)
TEXT_GRAPH: Final = re.compile(rb"\s*(#.*\n\s*)*(node|library|versions)\s*\{")
"""The beginning of a graph that TensorFlow wrote as text."""
VARIABLE: Final = re.compile(rb'^\s*op: "(VarHandleOp|Variable|VariableV2)"', re.MULTILINE)
SAVED_MODEL: Final = "saved_model.pb"
VARIABLES: Final = "variables"
"""The name of the folder of a SavedModel's weights, and of the files in it."""
_SIZE: Final = re.compile(rb"^size (\d+)$", re.MULTILINE)


def check(path: Path) -> None:
    """Raises ModelFailed where the file at `path`, or one in the SavedModel there, is no model but stands for one.

    That is: no regular file or folder, a pointer of Git LFS, a web page, an empty file, a graph as text, a zip archive
    that was cut off, a SavedModel whose variables are not in their folder, a file of another kind than its name says,
    or an ONNX file whose weights are in files that are not in its folder. Raises OSError.
    """
    if not path.is_file() and not path.is_dir():  # reading a pipe may never end
        raise ModelFailed(
            f"source: expected a file or folder, got {path.name}, a pipe, socket or device; look at it:"
            f" ls -l {shlex.quote(path.name)}"
        )
    if (path / SAVED_MODEL).is_file() and not has_variables(path) and (path / f"{VARIABLES}.index").is_file():
        raise ModelFailed(
            f"source: the weights of {path.name} lie beside {SAVED_MODEL}, and TensorFlow looks for them in a folder"
            f" {VARIABLES}; move them there: cd {shlex.quote(path.name)} && mkdir {VARIABLES} &&"
            f" mv {VARIABLES}.* {VARIABLES}/"
        )
    for file in _files(path):
        size = file.stat().st_size
        with file.open("rb") as opened:
            head = opened.read(HEAD_BYTES)
        name = file.name if file == path else f"{path.name}/{file.relative_to(path)}"
        if not size:
            raise ModelFailed(f"source: {name} is empty; {_again(file)}")
        _check_pointer(file, name, head)
        if HTML.match(head):
            raise ModelFailed(
                f"source: {name} is a web page and not a model; download the file itself, which on GitHub is"
                f" curl -LO https://github.com/OWNER/REPOSITORY/raw/BRANCH/{file.name}"
            )
        if TEXT_GRAPH.match(head):
            raise _as_text(file)
        if head.startswith(GZIP):
            raise ModelFailed(f"source: {name} is compressed with gzip; unpack it: tar -xzf {file.name}")
        if head.startswith(ZIP) and not zipfile.is_zipfile(file):
            raise cut_off(file)
    if path.is_file() and path.suffix.lower() in sources.FILES:
        content_kinds.check_name(path)
    if path.suffix.lower() == onnx_weights.SUFFIX:
        for name in onnx_weights.names(path):
            _check_weights(path, name)


def _check_weights(model: Path, name: str) -> None:
    """Raises ModelFailed where a file that an ONNX file lists is not in its folder. Raises OSError."""
    shown = name if name.isprintable() else repr(name)
    has = f"source: {model.name} has its weights in another file"
    if not onnx_weights.is_inside(name):
        raise ModelFailed(
            f"{has} that is not named as in its own folder, {PurePosixPath(shown).name or repr(name)}, and is not read;"
            f' write both again where the model is: onnx.save_model(model, "{model.name}", save_as_external_data=True,'
            f' location="{model.name}.data")'
        )
    file = model.parent / name
    if not file.is_file():
        raise ModelFailed(f"{has}, {shown}, which is missing; copy that beside {model.name}")
    if not file.resolve().is_relative_to(model.parent.resolve()):
        raise ModelFailed(
            f"{has}, {shown}, a link out of the model's folder, which is not read; put a copy in its place:"
            f' cp --remove-destination "$(readlink -f {shlex.quote(name)})" {shlex.quote(name)}'
        )
    with file.open("rb") as opened:
        _check_pointer(file, shown, opened.read(HEAD_BYTES))


def _check_pointer(file: Path, name: str, head: bytes) -> None:
    """Raises ModelFailed where a file that begins with `head` is a pointer of Git LFS."""
    if head.startswith(LFS):
        whole = _SIZE.search(head)
        of = f", of {int(whole[1]):,} bytes" if whole else ""
        raise ModelFailed(
            f"source: {name} is a pointer of Git LFS and not the file itself{of};"
            f" fetch that: git lfs pull --include '*{file.name}'"
        )


def cut_off(file: Path) -> ModelFailed:
    """Returns the error of a file that ends too early."""
    return ModelFailed(f"source: {file.name} has been cut off at {file.stat().st_size:,} bytes; {_again(file)}")


def _as_text(file: Path) -> ModelFailed:
    """Returns the error of a graph that was written as text. Raises OSError."""
    name = file.name
    if variables := len(VARIABLE.findall(file.read_bytes())):
        return ModelFailed(
            f"source: {name} is the graph of a training as text, without its weights, of which there are {variables};"
            " where the weights are, in a session that has restored them, freeze it: tf.io.write_graph("
            "tf.compat.v1.graph_util.convert_variables_to_constants(session, session.graph_def, [OUTPUT]),"
            f' ".", "{name}", as_text=False)'
        )
    return ModelFailed(
        f"source: {name} is a graph as text; write it in binary form: from google.protobuf import text_format;"
        f' tf.io.write_graph(text_format.Parse(tf.io.read_file("{name}").numpy(), tf.compat.v1.GraphDef()), ".",'
        f' "{name}", as_text=False)'
    )


def has_variables(folder: Path) -> bool:
    """Returns whether a SavedModel has its weights where TensorFlow looks for them."""
    return (folder / VARIABLES / f"{VARIABLES}.index").is_file()


def without_variables(folder: Path) -> ModelFailed:
    """Returns the error of a SavedModel that was copied without its weights."""
    return ModelFailed(
        f"source: {folder.name} has no folder {VARIABLES}, which has its weights: {VARIABLES}.index and"
        f" {VARIABLES}.data-*; copy it too, from where {SAVED_MODEL} is from"
    )


def is_hdf5(file: Path) -> bool:
    """Returns whether a file begins as HDF5 does. Raises OSError."""
    with file.open("rb") as opened:
        return opened.read(len(HDF5)) == HDF5


def _again(file: Path) -> str:
    return f"copy it once more, and compare both: sha256sum {file.name}"


def _files(path: Path) -> Iterator[Path]:
    """Yields the file at `path`, or those of a SavedModel that TensorFlow reads."""
    if path.is_file():
        yield path
    elif path.is_dir():
        for pattern in (SAVED_MODEL, f"{VARIABLES}/{VARIABLES}*"):
            yield from sorted(path.glob(pattern))
