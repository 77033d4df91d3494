from __future__ import annotations

import subprocess
import sys

from xlaserve.models.version_lookup import Routing

IDS = [f"id {number}" for number in range(2000)]


def test_an_id_is_answered_by_the_same_version_in_every_process() -> None:
    program = "from xlaserve.models.version_lookup import Routing; print(Routing({'canary': 50}).choose('one'))"
    chosen = {
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()
        for _ in range(2)
    }
    assert chosen == {Routing({"canary": 50}).choose("one")}


def test_a_share_that_grows_keeps_its_requests() -> None:
    small, large = Routing({"canary": 5}), Routing({"canary": 20})
    few = {id_ for id_ in IDS if small.choose(id_) == "canary"}
    many = {id_ for id_ in IDS if large.choose(id_) == "canary"}
    assert few < many


def test_shares_of_all_leave_nothing_to_the_default_version() -> None:
    assert {Routing({"a": 50, "b": 50}).choose(id_) for id_ in IDS} == {"a", "b"}
    assert {Routing({"a": 99.5}).choose(id_) for id_ in IDS} == {"a", ""}


def test_any_text_is_an_id() -> None:
    assert Routing({"a": 100}).choose("\ud800ü") == "a"
