"""The check that the bytecode of a Lambda layer is of this version of Python, which the bytecode does not say."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Final

PYTHON: Final = ".".join(platform.python_version_tuple()[:2])
"""The version of Python whose bytecode is read here."""
_TIMEOUT_S: Final = 30.0
_CHECK: Final = """
import codecs, dis, marshal, sys, types
def check(code):
    names = [one.opname for one in dis.get_instructions(code)]
    assert "RESUME" in names and not [one for one in names if one.startswith("<")]
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            check(one)
check(marshal.loads(codecs.decode(sys.stdin.buffer.read(), "base64")))
"""
"""Since Python 3.11 each function begins with the instruction RESUME, whose number changes with the version."""


def is_readable(code: str) -> bool:
    """Returns whether bytecode, in base64, is of this Python. A process finds out, as other bytecode may crash it."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _CHECK],
        input=code.encode(),
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return done.returncode == 0
