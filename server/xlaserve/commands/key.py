"""`xlaserve key`: makes an API key."""

from __future__ import annotations

import argparse
import hashlib
import secrets
import sys
from typing import Final

import yaml

from xlaserve.admission.caller import Role
from xlaserve.commands.command import Command, Invocation

PREFIX: Final = "xla_"
"""By which people, and tools that look for secrets, know a key again."""
BYTES: Final = 32


def run(invocation: Invocation) -> int:
    """Prints a new key, and what of it belongs into the file that `access` names."""
    key = PREFIX + secrets.token_urlsafe(BYTES)
    entry = {
        "name": invocation.own.name,
        "key_sha256": hashlib.sha256(key.encode()).hexdigest(),
        "roles": [str(role) for role in invocation.own.role or [Role.INFER]],
        "models": invocation.own.model or ["*"],
    }
    sys.stdout.write(f"{key}\n")
    sys.stderr.write("# The key is shown once. Add this to the file that `access` names:\n")
    sys.stderr.write(yaml.safe_dump({"callers": [entry]}, sort_keys=False))
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own options."""
    parser.add_argument("name", help="who will use it, for logs")
    parser.add_argument("--role", type=Role, choices=[*Role], action="append", help="repeatable; infer by default")
    parser.add_argument(
        "--model", action="append", metavar="PATTERN", help="for which models; repeatable, all by default"
    )


COMMAND = Command(run, add_options, ())
