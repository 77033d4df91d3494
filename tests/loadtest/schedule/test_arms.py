from __future__ import annotations

from xlaserve.config import Mode
from xlaserve_loadtest.schedule import arms


def test_arms_are_named_for_their_mode_or_for_model_and_mode() -> None:
    assert [arm.name for arm in arms.name_arms(["digits"], ["xla", "graph"], "embedded")] == ["xla", "graph"]
    names = [arm.name for arm in arms.name_arms(["a", "b"], ["xla", "graph"], "embedded")]
    assert names == ["a xla", "a graph", "b xla", "b graph"]


def test_every_model_has_a_control_of_its_baseline() -> None:
    found = arms.with_controls(arms.name_arms(["a", "b"], ["xla", "graph"], "embedded"), "graph")
    assert {arm.name: arm.is_control_of for arm in found if arm.is_control_of} == {
        "a graph (again)": "a graph",
        "b graph (again)": "b graph",
    }
    assert len({arm.name for arm in found}) == 6


def test_an_arm_alone_has_no_baseline_and_no_control() -> None:
    alone = arms.name_arms(["a"], ["graph"], "embedded")
    assert arms.choose_baseline(alone, "graph") is None
    assert arms.with_controls(alone, "graph") == alone
    assert arms.choose_baseline(arms.name_arms(["a"], ["xla", "eager"], "embedded"), "graph") is None


def test_every_mode_of_the_server_has_a_row() -> None:
    assert set(arms.MODES) == set(Mode)


def test_xla_graph_mode_and_autoclustering_have_processes_of_their_own_unless_they_are_to_share_one() -> None:
    kinds = {mode: arms.process_kind(mode, is_shared=False) for mode in arms.MODES}
    assert kinds["graph"] == kinds["eager"]
    assert kinds["xla"] == kinds["auto"]
    assert len({kinds["xla"], kinds["graph"], kinds["autocluster"]}) == 3
    assert len({arms.process_kind(mode, is_shared=True) for mode in arms.MODES}) == 1
