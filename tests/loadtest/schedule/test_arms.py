from __future__ import annotations

import pytest

from xlaserve.config import Mode
from xlaserve_loadtest.schedule import arms


def test_arms_are_named_for_their_mode_or_for_model_and_mode() -> None:
    assert [arm.name for arm in arms.name_arms(["digits"], ["xla", "graph"], "embedded")] == ["xla", "graph"]
    names = [arm.name for arm in arms.name_arms(["a", "b"], ["xla", "graph"], "embedded")]
    assert names == ["a xla", "a graph", "b xla", "b graph"]


def test_models_together_run_in_the_modes_that_all_of_them_have() -> None:
    assert arms.common_modes([("xla", "graph", "eager"), ("graph", "xla", "auto")]) == (
        ("xla", "graph"),
        ("eager", "auto"),
    )
    assert arms.common_modes([("xla",), ()]) == ((), ("xla",))
    assert arms.common_modes([()]) == ((), ())


def test_every_baseline_is_followed_by_its_control() -> None:
    found = arms.with_controls(arms.name_arms(["a", "b"], ["xla", "graph"], "embedded"), {"a graph", "b graph"})
    assert {arm.name: arm.is_control_of for arm in found if arm.is_control_of} == {
        "a graph (again)": "a graph",
        "b graph (again)": "b graph",
    }
    assert len({arm.name for arm in found}) == 6


def test_an_arm_alone_has_no_baseline_and_no_control() -> None:
    alone = arms.name_arms(["a"], ["graph"], "embedded")
    assert arms.choose_baseline(alone, "graph") is None
    assert arms.with_controls(alone, set()) == alone
    assert arms.choose_baseline(arms.name_arms(["a"], ["xla", "eager"], "embedded"), "graph") is None


def test_a_baseline_is_named_by_its_name_before_its_mode() -> None:
    servers = [arms.ServerArm("graph", ("h:1",), mode="xla"), arms.ServerArm("xla", ("h:2",), mode="graph")]
    assert arms.choose_baseline(arms.name_servers(servers, ["m"]), "graph") == "graph"
    assert arms.choose_baseline(arms.name_servers(servers, ["m"]), "xla") == "xla"


@pytest.mark.parametrize(
    ("text", "addresses", "model", "mode"),
    [
        ("ours=127.0.0.1:8001", ("127.0.0.1:8001",), None, ""),
        ("our own=[::1]:8001,host:2", ("[::1]:8001", "host:2"), None, ""),
        ("ours=h:1,model=ResNet50,mode=xla", ("h:1",), "ResNet50", "xla"),
    ],
)
def test_an_arm_that_is_a_server_is_parsed(text: str, addresses: tuple[str, ...], model: str | None, mode: str) -> None:
    found = arms.ServerArm.parse(text)
    assert (found.addresses, found.model, found.mode) == (addresses, model, mode)
    assert str(found) == text


@pytest.mark.parametrize(
    "text", ["ours", "=h:1", "ours=h", "ours=", "ours=h:1,model=", "ours=h:1,size=8", "ours=mode=x"]
)
def test_an_arm_without_name_or_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected (NAME=ADDRESS|HOST:PORT), "):
        arms.ServerArm.parse(text)


def test_the_modes_are_those_of_the_server() -> None:
    assert set(arms.MODES) == set(Mode)


def test_a_mix_of_models_is_one_arm_for_each_mode() -> None:
    found = arms.with_controls(arms.name_arms(["a", "b"], ["xla", "graph"], "h:1", [0.75, 0.25]), {"graph"})
    assert [arm.name for arm in found] == ["xla", "graph", "graph (again)"]
    assert {(arm.model, arm.served) for arm in found} == {("a:0.75,b:0.25", ("a", "b"))}
    (alone,) = arms.name_arms(["a", "b"], [arms.AS_IT_IS], "h:1", [0.75, 0.25])
    assert alone.name == "mix"
    ours, theirs = (arms.ServerArm.parse(text) for text in ("ours=h:1", "theirs=h:2,model=c"))
    mixed, own = arms.name_servers([ours, theirs], ["a", "b"], [0.75, 0.25])
    assert (mixed.served, own.served) == (("a", "b"), ("c",))
