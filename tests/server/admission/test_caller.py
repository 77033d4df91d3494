from __future__ import annotations

import pytest

from xlaserve.admission.caller import ANYBODY, INFER, OBSERVE, READ, STRANGER, Caller, Role
from xlaserve.errors import PermissionDenied


@pytest.mark.parametrize(
    ("patterns", "may", "may_not"),
    [
        (("resnet50",), ["resnet50"], ["resnet501", "Resnet50", "", "resnet"]),
        (("resnet*",), ["resnet", "resnet50"], ["aresnet", "RESNET50", "digits"]),
        (("a?", "[xy]1"), ["ab", "x1", "y1"], ["a", "abc", "z1"]),
        (("*",), ["", "anything", "a/b\n"], []),
        ((), [], ["", "digits"]),
    ],
)
def test_models_are_named_by_patterns(patterns: tuple[str, ...], may: list[str], may_not: list[str]) -> None:
    caller = Caller("shop", frozenset(Role), patterns)
    assert [name for name in (*may, *may_not) if caller.may_use(name)] == may
    for name in may_not:
        with pytest.raises(PermissionDenied, match=r"^this caller may not use that model$"):
            caller.check_model(name)


def test_no_role_contains_another() -> None:
    for role in Role:
        caller = Caller("one", frozenset([role]))
        caller.check_role(role)
        for other in {*Role} - {role}:
            with pytest.raises(PermissionDenied, match=r"^this caller may not do that$"):
                caller.check_role(other)


def test_one_of_several_roles_is_enough() -> None:
    Caller("one", frozenset([Role.OBSERVE])).check_role(*READ)
    Caller("one", frozenset([Role.INFER])).check_role(*READ)
    with pytest.raises(PermissionDenied):
        Caller("one", frozenset([Role.ADMIN])).check_role(*READ)


def test_what_shows_all_models_is_for_those_who_may_use_them() -> None:
    ANYBODY.check_all_models()
    Caller("one", frozenset(), ("digits", "*")).check_all_models()
    for caller in (STRANGER, Caller("one", frozenset(Role), ("resnet*",))):
        with pytest.raises(PermissionDenied):
            caller.check_all_models()


def test_a_stranger_may_nothing() -> None:
    for roles in (INFER, OBSERVE):
        with pytest.raises(PermissionDenied):
            STRANGER.check_role(*roles)
    assert not STRANGER.may_use("digits")
