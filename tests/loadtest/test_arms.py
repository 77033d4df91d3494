from __future__ import annotations

import pytest

from xlaserve_loadtest import arms


def test_arms_are_named_for_their_mode_or_for_model_and_mode():
    assert [arm.name for arm in arms.name_arms(["digits"], ["xla", "graph"], "embedded")] == ["xla", "graph"]
    names = [arm.name for arm in arms.name_arms(["a", "b"], ["xla", "graph"], "embedded")]
    assert names == ["a xla", "a graph", "b xla", "b graph"]


def test_every_model_has_a_control_of_its_baseline():
    found = arms.with_controls(arms.name_arms(["a", "b"], ["xla", "graph"], "embedded"), "graph")
    assert {arm.name: arm.is_control_of for arm in found if arm.is_control_of} == {
        "a graph (again)": "a graph",
        "b graph (again)": "b graph",
    }
    assert len({arm.name for arm in found}) == 6


def test_an_arm_alone_has_no_baseline_and_no_control():
    alone = arms.name_arms(["a"], ["graph"], "embedded")
    assert arms.choose_baseline(alone, "graph") is None
    assert arms.with_controls(alone, "graph") == alone
    assert arms.choose_baseline(arms.name_arms(["a"], ["xla", "eager"], "embedded"), "graph") is None


@pytest.mark.parametrize("is_shared", [False, True])
def test_autoclustering_always_has_a_process_of_its_own(is_shared):
    kinds = {mode: arms.process_kind(mode, is_shared=is_shared) for mode in arms.MODES}
    assert [mode for mode, kind in kinds.items() if kind == kinds["autocluster"]] == ["autocluster"]
    assert (kinds["xla"] == kinds["graph"]) is is_shared
    assert kinds["graph"] == kinds["eager"]
    assert kinds["xla"] == kinds["auto"]


def test_autoclustering_is_graph_mode_in_a_process_with_the_flags():
    assert arms.served_modes(["autocluster", "graph"]) == ("graph",)
    assert arms.environment_of("autocluster", "--x") == {
        "TF_XLA_FLAGS": "--x --tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"
    }
    assert arms.environment_of("xla", "--x") == {}
