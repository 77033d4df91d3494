"""XLA's refusals, read: which operation, and which line of Python made it.

TensorFlow's error names each operation without an XLA kernel with its node, and below "The op is created at:" the stack
of Python calls that made the (last) one, outermost first.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from xlaserve.config.base import Frozen
from xlaserve.engine.causes import cause
from xlaserve.errors import ModelFailed
from xlaserve.programs.openvino.openvino_program import UntranslatableGraphError

_NO_KERNEL: Final = re.compile(r"(\w+) \(No registered '\w+' OpKernel")
_NO_CUSTOM_CALL: Final = re.compile(
    r"(?:FFI handler registered for|custom call to|Custom call target) (\S+) (?:on a platform|for|is not)"
)
"""XLA's messages for a call that only another framework's XLA has, as JAX's has LAPACK's."""
_NODE: Final = re.compile(r"\{\{node ([^}]+)\}\}")
_FRAME: Final = re.compile(r'^\s*File "([^"]+)", line (\d+), in (.+)$', re.MULTILINE)
_FRAMEWORKS: Final = ("site-packages/tensorflow/", "site-packages/keras/")
_LAYERS: Final = "site-packages/keras/src/layers/"
_CALLS_A_LAYER: Final = "layers/layer.py"
_SERVER: Final = re.compile(r"(^|/)xlaserve/(engine|inspection/check|models|programs)/")
_LONGEST: Final = 300


class Refusal(Frozen):
    """Why a program could not be made or run."""

    message: str
    """One line."""
    operation: str | None = None
    """The operation that XLA has no kernel for, such as `ResizeBicubic`; several are joined by commas."""
    node: str | None = None
    """Name of the operation's node in the graph; the names of the layers around it stand before the slashes."""
    line: str | None = None
    """The line of Python that made it: `file:12 in call: code`. Lines inside TensorFlow and Keras are passed over."""

    def __str__(self) -> str:
        """`XLA has no kernel for ResizeBicubic, at layers.py:12`; the node where a SavedModel has no such line."""
        if self.line is not None:
            return f"{self.message}, at {Path(self.line.partition(' in ')[0]).name}"
        return f"{self.message}, node {self.node}" if self.node else self.message


class _Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        _, in_packages, short = self.file.rpartition("site-packages/")
        code = linecache.getline(self.file, self.line).strip()
        where = f"{short if in_packages else Path(self.file).name}:{self.line} in {self.function}"
        return f"{where}: {code}" if code else where


def explain(error: BaseException) -> Refusal:
    """Returns the refusal that an error in making or running a program describes."""
    if isinstance(error, ModelFailed):  # its message is written for users
        unknown = error.operations if isinstance(error, UntranslatableGraphError) else None
        return Refusal(message=str(error), operation=unknown)
    text = str(error)
    found = _FRAME.findall(text)
    root = _root([file for file, _, _ in found])
    frames = [_Frame(str(root / file), int(line), function) for file, line, function in found]
    operations = list(dict.fromkeys((*_NO_KERNEL.findall(text), *_NO_CUSTOM_CALL.findall(text))))
    node = _NODE.search(text)
    if operations:
        message = f"XLA has no kernel for {', '.join(operations)}"
    else:
        name = type(error).__name__
        message = (f"{name}: {cause(error)}" if text.strip() else name)[:_LONGEST]
    return Refusal(
        message=message,
        operation=", ".join(operations) or None,
        node=node.group(1) if node else None,
        line=str(_maker(frames)) if frames else None,
    )


def _root(files: Sequence[str]) -> Path:
    """Returns the folder of `files`: TensorFlow takes away what the paths of all frames have in common.

    That is `/` or, where Python is installed next to the model's code, more.
    """
    modules = [path for module in list(sys.modules.values()) if (path := getattr(module, "__file__", None))]
    return next(
        (Path(path[: -len(file)]) for file in files for path in modules if path.endswith(f"/{file}")), Path("/")
    )


def _maker(frames: Sequence[_Frame]) -> _Frame:
    """Returns the frame that tells a person most: the innermost of their own, else of Keras's layers."""
    below = frames
    for index, frame in enumerate(frames):
        if _SERVER.search(frame.file):
            below = frames[index + 1 :]  # frames of the server itself are no part of the model
    for frame in reversed(below):
        if not any(framework in frame.file for framework in _FRAMEWORKS):
            return frame
    for frame in reversed(below):
        if _LAYERS in frame.file and not frame.file.endswith(_CALLS_A_LAYER):
            return frame
    return frames[-1]
