from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from xlaserve.admission.authenticator import Authenticator
from xlaserve.admission.caller import Caller, Role
from xlaserve.commands import key, remote
from xlaserve.commands.command import Invocation
from xlaserve.config import Settings
from xlaserve.errors import XlaserveError


def make(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, dict[str, Any]]:
    parser = argparse.ArgumentParser()
    key.add_options(parser)
    assert key.run(Invocation(parser.parse_args(words), Settings(), Settings)) == 0
    told = capsys.readouterr()
    return told.out.strip(), yaml.safe_load(told.err)


def test_what_is_made_opens_the_door(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made, entry = make(capsys, "shop", "--role", "observe", "--role", "infer", "--model", "resnet*")
    path = tmp_path / "access.yaml"
    path.write_text(yaml.safe_dump(entry))
    assert made not in path.read_text()
    found = Authenticator(path).by_headers({"authorization": f"Bearer {made}"})
    assert found == Caller("shop", frozenset([Role.INFER, Role.OBSERVE]), ("resnet*",))


def test_keys_differ_and_can_not_be_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    made = {make(capsys, "shop")[0] for _ in range(20)}
    assert len(made) == 20
    assert all(one.startswith(key.PREFIX) and len(one) > len(key.PREFIX) + 40 for one in made)


@pytest.mark.parametrize("token", ["two\nlines", "é", "\0"])
def test_a_token_that_can_not_be_sent_is_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setattr(os, "environ", {remote.TOKEN_VARIABLE: token})
    with pytest.raises(XlaserveError, match=r"^XLASERVE_TOKEN: expected printable") as refused:
        remote.metadata()
    assert token not in str(refused.value)


def test_no_token_is_sent_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for environ in ({}, {remote.TOKEN_VARIABLE: ""}):
        monkeypatch.setattr(os, "environ", environ)
        assert remote.metadata() == ()
