from __future__ import annotations

import argparse

import pytest

from xlaserve.commands import arguments


def test_an_error_of_everything_leaves_nothing_to_go_by() -> None:
    assert arguments.error("0.3") == 0.3
    for given in ("1", "1.5", "-0.1", "much"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a share from 0"):
            arguments.error(given)
