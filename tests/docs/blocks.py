"""The blocks of commands that pages show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_TYPED = ("docker", "helm", "kubectl", "make", "pip", "sudo", "systemctl")
"""Programs that tests don't run as they are typed: they change the machine, or need one that is not here."""
LINE_NOT_TYPED = re.compile(rf"^(?:{'|'.join(NOT_TYPED)})\b(?:.*\\\n)*.*\n", re.MULTILINE)


def blocks(page: str, section: str = "") -> list[tuple[str, str]]:
    """Returns language and text of the blocks of a page, or of one of its sections."""
    text = (ROOT / page).read_text()
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        assert text, f"{page} has no section {section!r}"
    return BLOCK.findall(text)


def not_typed(page: str) -> list[str]:
    """Returns the commands of a page that tests don't run, each in one line."""
    shown = "".join(block for language, block in blocks(page) if language == "sh")
    return [line.strip().replace("\\\n", "") for line in LINE_NOT_TYPED.findall(shown)]
