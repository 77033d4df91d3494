"""XLA's own events of compilation, from what TensorFlow logs of them on stderr.

Counters of compilations exist in TensorFlow's C++ code and can't be read from Python; lines of its log can be had for
single source files (TF_CPP_VMODULE), and those chosen here are written when something is compiled and at no other time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

VMODULE: Final = "device_compiler=1,device_executable_persistor=1,xla_compiler=2,const_analysis=3"
"""Source files, and the verbosity from which on they log the lines that `Reader` reads."""

_LINE: Final = re.compile(r"^I\d{4} 00:00:(?P<at>[\d.]+) +(?P<thread>\d+) (?P<file>[\w.]+):\d+\] +(?P<text>.*)$")
_CONSTANT: Final = re.compile(r"const _Arg (\d+): (\S+)")
_NEEDS_CONSTANT: Final = re.compile(r"marking consts for must-be-const inputs of (\S+)")
_BEGINS: Final = re.compile(r"XlaCompiler::CompileFunction ([^\s\[]+)\[")
_ARGUMENT: Final = re.compile(r"XLA arg \d+ shape: (.+?) name: .*TF arg (\d+)\b")
_RESULT: Final = re.compile(r"XLA output shape: (.+)")
_LOOKS_IN_CACHE: Final = "Try loading serialized cache entry:"
_FOUND_IN_CACHE: Final = "Loading cached entry for:"
_VALUE: Final = re.compile(r"Tensor<type: \w+ shape: \[[\d,]*\] values: ([^>]*)>")
_LONGEST_VALUE: Final = 100
_ENDS: Final = re.compile(r"Compilation of XLA executable time: .*?\((\d+) us\)")
_LAYOUT: Final = re.compile(r"(?<=\])\{[^}]*\}")


@dataclass(frozen=True, slots=True)
class XlaCompilation:
    """One program that XLA compiled."""

    function: str
    """The traced function's name; empty where it is not known."""
    arguments: tuple[str, ...]
    """Shapes, as `f32[1,4]`, in their order."""
    result: str
    constants: tuple[str, ...]
    """Arguments whose value is part of the program, as `size = 9 7 (needed by resize)`: another value is another
    program."""
    from_cache: bool
    """Whether XLA found it in its persistent cache."""
    seconds: float
    at_s: float
    """When it ended, since the epoch."""
    thread: int
    """The thread's number in the operating system."""

    def __str__(self) -> str:
        shown = ", ".join(self.arguments[:4])
        if len(self.arguments) > 4:
            shown += f" and {len(self.arguments) - 4} more"
        constants = f", compile-time constants: {', '.join(self.constants)}" if self.constants else ""
        return f"{self.function or 'a program'} of ({shown}) -> {self.result or 'unknown'}{constants}"


@dataclass
class _Begun:
    function: str = ""
    arguments: list[tuple[int, str]] = field(default_factory=list)
    result: str = ""
    values: list[str] = field(default_factory=list)
    from_cache: bool = False


class Reader:
    """Assembles compilations from log lines; lines of threads that compile at the same time may be mixed."""

    def __init__(self) -> None:
        self._begun: defaultdict[int, _Begun] = defaultdict(_Begun)
        self._needs_constant: dict[int, str] = {}
        self._constants: dict[tuple[int, str], str] = {}

    def read(self, line: str) -> XlaCompilation | None:
        """Takes a line of the log; returns the compilation that it is the end of, and None for any other."""
        found = _LINE.match(line)
        if found is None:
            return None
        thread, text = int(found["thread"]), found["text"]
        match found["file"]:
            case "const_analysis.cc":
                self._read_analysis(thread, text)
            case "xla_compiler.cc":
                self._read_compiler(thread, text)
            case "device_executable_persistor.h" if text.startswith(_LOOKS_IN_CACHE):
                # With the signature, which holds the values of constants.
                self._begun[thread].values = [value[:_LONGEST_VALUE] for value in _VALUE.findall(text)]
            case "device_executable_persistor.h" if text.startswith(_FOUND_IN_CACHE):
                self._begun[thread].from_cache = True
            case "device_compiler.h" if ends := _ENDS.search(text):
                return self._end(thread, at_s=float(found["at"]), seconds=int(ends[1]) / 1e6)
        return None

    def _read_analysis(self, thread: int, text: str) -> None:
        if needs := _NEEDS_CONSTANT.search(text):
            self._needs_constant[thread] = needs[1]
        elif constant := _CONSTANT.search(text):
            # A function's graph is analysed once, before it is compiled, and perhaps on another thread.
            self._constants.setdefault((int(constant[1]), constant[2]), self._needs_constant.get(thread, ""))

    def _read_compiler(self, thread: int, text: str) -> None:
        if begins := _BEGINS.search(text):
            self._begun[thread] = _Begun(begins[1])
        elif argument := _ARGUMENT.search(text):
            self._begun[thread].arguments.append((int(argument[2]), _LAYOUT.sub("", argument[1])))
        elif result := _RESULT.search(text):
            self._begun[thread].result = _LAYOUT.sub("", result[1])

    def _end(self, thread: int, *, at_s: float, seconds: float) -> XlaCompilation:
        begun = self._begun.pop(thread, _Begun())
        given = {number for number, _ in begun.arguments}
        # Constants are no arguments of the program. Which function one belongs to is not said: those of a number that
        # this one takes as data are others'.
        names = [
            (name, f" (needed by {operation})" if operation else "")
            for (number, name), operation in sorted(self._constants.items())
            if number not in given and begun.function
        ]
        if len(names) == len(begun.values):
            constants = [f"{name} = {value}{why}" for (name, why), value in zip(names, begun.values, strict=True)]
        else:
            constants = [*begun.values, *(f"{name}{why}" for name, why in names)]
        return XlaCompilation(
            function=begun.function,
            arguments=tuple(shape for _, shape in begun.arguments),
            result=begun.result,
            constants=tuple(constants),
            from_cache=begun.from_cache,
            seconds=seconds,
            at_s=at_s,
            thread=thread,
        )
