from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.server.admission.conftest import KEY, Write, entry

from xlaserve.admission.authenticator import Authenticator, unauthenticated
from xlaserve.admission.caller import ANYBODY, Caller, Limit, Role
from xlaserve.errors import ConfigError, Unauthenticated

REFUSAL = str(unauthenticated())


def bearer(credential: str) -> dict[str, str]:
    return {"authorization": f"Bearer {credential}"}


def look(authenticator: Authenticator) -> None:
    assert authenticator.watch is not None
    authenticator.watch.look()


def test_without_a_file_everybody_is_let_in() -> None:
    authenticator = Authenticator(None)
    assert not authenticator.is_locked
    assert authenticator.by_headers({"authorization": "Basic nonsense"}) is ANYBODY


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY),
        {"authorization": f"bearer   {KEY} "},
        {"x-api-key": KEY},
        {"x-api-key": KEY, "authorization": "Basic of-a-proxy"},
        {"x-api-key": "", **bearer(KEY)},
    ],
)
def test_a_key_is_recognised(write: Write, headers: dict[str, str]) -> None:
    authenticator = Authenticator(write(entry("shop", roles=["infer", "observe"], models=["resnet*"])))
    assert authenticator.is_locked
    assert authenticator.by_headers(headers) == Caller("shop", frozenset([Role.INFER, Role.OBSERVE]), ("resnet*",))


def test_a_caller_may_infer_with_every_model_where_nothing_else_is_said(write: Write) -> None:
    assert Authenticator(write(entry("shop"))).by_headers(bearer(KEY)) == Caller(
        "shop", frozenset([Role.INFER]), ("*",)
    )


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY.upper()),
        bearer(KEY + "x"),
        bearer(entry("shop")["key_sha256"]),
        bearer("a.b.c"),
        bearer(""),
        bearer("\udcff\ud800"),
        bearer("é" * 100),
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"x-api-key": "another", **bearer(KEY)},
    ],
)
def test_what_is_not_recognised_is_refused_with_the_same_words(write: Write, headers: dict[str, str]) -> None:
    with pytest.raises(Unauthenticated) as refused:
        Authenticator(write(entry("shop"))).by_headers(headers)
    assert str(refused.value) == REFUSAL


def test_headers_without_credentials_leave_it_to_the_certificate(write: Write) -> None:
    path = write(entry("shop"), {"name": "ops", "certificate": "ops.example.com", "roles": ["admin"]})
    authenticator = Authenticator(path)
    assert authenticator.by_headers({"user-agent": "x"}) is None
    assert authenticator.asks_for_certificates
    assert authenticator.by_connection(["other", "ops.example.com"], "").name == "ops"
    for names in ([], ["OPS.example.com", "", "example.com"]):
        with pytest.raises(Unauthenticated) as refused:
            authenticator.by_connection(names, "")
        assert str(refused.value) == REFUSAL


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "file: "),
        ("[", "not YAML"),
        ("callers: 3", "callers: "),
        ("callers: [{name: a}]", "callers.0: expected key_sha256 or certificate"),
        ("callers: [{name: a, certificate: b, key_sha256: c}]", "callers.0.key_sha256: "),
        ("callers: [{name: a, key_sha256: xla_the-key-itself}]", "callers.0.key_sha256: "),
        ("callers: [{name: '', certificate: b}]", "callers.0.name: "),
        ('callers: [{name: "a\\nb", certificate: b}]', "callers.0.name: expected 1 to"),
        ('callers: [{name: a, certificate: "b\\x01.evil"}]', "callers.0.certificate: expected 1 to"),
        ("callers: [{name: a, certificate: b, roles: [root]}]", "callers.0.roles.0: "),
        ("callers: [{name: a, certificate: b, model: [c]}]", "callers.0.model: no such field, did you mean models?"),
        ("callers: [{name: a, certificate: b}, {name: c, certificate: b}]", "each certificate is one caller's"),
        ("callers: []\ncallers: []", "expected each key once"),
        ("tokens: {jwks: keys.json, issuer: a}", "tokens.audience: "),
        ("tokens: {jwks: keys.json, issuer: a, audience: b, algorithms: [HS256]}", "tokens.algorithms.0: "),
        ("tokens: {jwks: keys.json, issuer: a, audience: b, algorithms: [none]}", "tokens.algorithms.0: "),
        ("tokens: {jwks: keys.json, issuer: a, audience: b}", "keys.json can't be read"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_without_what_it_holds(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "access.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as wrong:
        Authenticator(path)
    assert expected in str(wrong.value)
    assert str(wrong.value).startswith("access: ")
    assert "\n" not in str(wrong.value)
    assert "the-key-itself" not in str(wrong.value)


def test_files_that_are_no_text_or_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "bytes"):
        with pytest.raises(ConfigError, match=r"^access: [^\n]*$"):
            Authenticator(path)


def test_two_callers_with_one_key_are_refused(write: Write) -> None:
    with pytest.raises(ConfigError, match="each key_sha256 is one caller's"):
        Authenticator(write(entry("shop"), entry("ops", roles=["admin"])))


def test_a_key_that_is_withdrawn_no_longer_opens_and_a_new_one_does(write: Write) -> None:
    authenticator = Authenticator(write(entry("shop"), entry("old", "xla_old")))
    assert authenticator.by_headers(bearer("xla_old"))
    write(entry("shop"), entry("new", "xla_new"))
    look(authenticator)
    assert authenticator.by_headers(bearer(KEY))
    assert (caller := authenticator.by_headers(bearer("xla_new"))) and caller.name == "new"
    with pytest.raises(Unauthenticated):
        authenticator.by_headers(bearer("xla_old"))


@pytest.mark.parametrize("is_in_place", [False, True])
def test_a_file_that_is_replaced_by_one_of_the_same_size_and_time_is_read(
    write: Write, tmp_path: Path, is_in_place: bool
) -> None:
    path = write(entry("shop", "xla_1"))
    authenticator = Authenticator(path)
    stat = path.stat()
    if not is_in_place:
        path.rename(tmp_path / "before")
    give_up_at = time.monotonic() + 30
    while not path.exists() or path.stat().st_ctime_ns == stat.st_ctime_ns:  # until that clock has gone on
        assert time.monotonic() < give_up_at
        write(entry("shop", "xla_2"))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    look(authenticator)
    assert authenticator.by_headers(bearer("xla_2"))


@pytest.mark.parametrize("damage", ["half", "empty", "removed", "a folder"])
def test_a_file_that_breaks_while_running_leaves_all_as_before(
    write: Write, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    caplog.set_level(logging.INFO)
    path = write(entry("shop"))
    authenticator = Authenticator(path)
    whole = path.read_text()
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage != "removed":
        path.write_text(whole[: len(whole) // 2] if damage == "half" else "")
    for _ in range(3):
        look(authenticator)
    assert authenticator.by_headers(bearer(KEY))
    assert [(one.levelname, one.getMessage().startswith("as before: access: ")) for one in caplog.records] == [
        ("ERROR", True)
    ]

    if damage == "a folder":
        path.rmdir()
    write(entry("shop", "xla_two"))
    look(authenticator)
    assert authenticator.by_headers(bearer("xla_two"))
    assert caplog.records[-1].getMessage() == "access: read again"


def test_a_file_is_read_once_for_each_change(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    authenticator = Authenticator(write(entry("shop")))
    read: list[Any] = []
    monkeypatch.setattr("xlaserve.admission.authenticator.callers_file.read", read.append)
    look(authenticator)
    assert read == []


def test_the_file_is_followed_on_a_thread(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    from threading import Event

    monkeypatch.setattr("xlaserve.admission.watch.LOOK_S", 0.01)
    looked = Event()
    authenticator = Authenticator(write(entry("shop")))
    assert authenticator.watch is not None
    monkeypatch.setattr(authenticator.watch, "look", looked.set)
    authenticator.watch.follow()
    assert looked.wait(10)


def test_a_caller_has_the_limits_and_the_priority_of_its_entry(write: Write) -> None:
    limits = [{"images_per_s": 10, "max_images": 4}, {"models": ["resnet*"], "images_per_s": 2, "burst_images": 8}]
    caller = Authenticator(write(entry("shop", limits=limits, priority=1))).by_headers(bearer(KEY))
    assert caller is not None
    assert caller.limits == (
        Limit(images_per_s=10, max_images=4),
        Limit(models=("resnet*",), images_per_s=2, burst_images=8),
    )
    assert caller.priority == 1


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"priority": 0}, "priority"),
        ({"priority": 4}, "priority"),
        ({"limits": [{}]}, "limits.0"),
        ({"limits": [{"images_per_s": 0}]}, "limits.0.images_per_s"),
        ({"limits": [{"max_images": 1}, {"max_images": 2}]}, "limits: expected one for the same models"),
    ],
)
def test_limits_that_can_not_hold_are_refused_with_their_field(write: Write, more: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"callers\.0\.{field}"):
        Authenticator(write(entry("shop", **more)))


def test_anybody_may_not_administer(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"anybody\.roles"):
        Authenticator(write(anybody={"roles": ["infer", "admin"]}))


def test_without_an_anybody_section_credentials_are_required(write: Write) -> None:
    authenticator = Authenticator(write(entry("shop")))
    assert not authenticator.asks_connections
    with pytest.raises(Unauthenticated):
        authenticator.by_connection([], "192.0.2.7")
    authenticator = Authenticator(write(entry("shop"), anybody={}))
    assert authenticator.is_locked and authenticator.asks_connections and not authenticator.asks_for_certificates
    assert authenticator.by_headers({}) is None
    assert authenticator.by_connection([], "192.0.2.7").roles == {Role.INFER}
