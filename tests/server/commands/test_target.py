"""`--target`: the name under which every command takes the address of a server."""

from __future__ import annotations

import pytest
from scripts.generate_docs import parsers

from xlaserve.cli import parser

ADDRESS = "vision:8001"


def test_every_command_that_asks_a_server_names_it_with_target() -> None:
    taking = {own.prog for own in parsers() for action in own._actions if "--target" in action.option_strings}
    assert {"loadtest", "xlaserve-health", "xlaserve buckets", "xlaserve ledger", "xlaserve plan"} < taking
    assert "xlaserve-client models" in taking
    others = {"--server", "--address", "--url"}
    for own in parsers():
        for action in own._actions:
            assert "--target" in action.option_strings or not others & set(action.option_strings), own.prog


@pytest.mark.parametrize("words", [["ledger"], ["profile"], ["buckets", "digits"]])
@pytest.mark.parametrize("option", ["--target", "--server"])
def test_the_name_of_the_first_release_is_still_taken(words: list[str], option: str) -> None:
    assert parser().parse_args([*words, option, ADDRESS]).target == ADDRESS
