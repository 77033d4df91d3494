from __future__ import annotations

import os
import subprocess
import sys

import pytest

PRINT = """
import os
import sys

class Look:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ["GRPC_EXPERIMENTS"], os.environ["GRPC_VERBOSITY"])
            sys.meta_path.remove(self)

sys.meta_path.insert(0, Look())
import xlaserve.cli
"""


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ({}, ["-event_engine_listener", "NONE"]),
        ({"GRPC_EXPERIMENTS": "tcp_rcv_lowat", "GRPC_VERBOSITY": "debug"}, ["tcp_rcv_lowat", "debug"]),
    ],
    ids=["default", "of the environment"],
)
def test_grpc_finds_its_environment_chosen_when_it_is_imported(given: dict[str, str], seen: list[str]) -> None:
    chosen = ("GRPC_EXPERIMENTS", "GRPC_VERBOSITY")
    environment = {key: value for key, value in os.environ.items() if key not in chosen} | given
    done = subprocess.run(
        (sys.executable, "-c", PRINT), env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == seen
