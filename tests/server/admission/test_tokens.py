from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from tests.fakes import Clock
from tests.server.admission.conftest import entry

from xlaserve.admission.authenticator import Authenticator, unauthenticated
from xlaserve.admission.caller import Caller, Limit, Origin, Role
from xlaserve.admission.callers_file import Tokens
from xlaserve.admission.tokens import LEEWAY_S, MAX_TOKEN_BYTES, TokenReader
from xlaserve.errors import ConfigError, Unauthenticated

KEYS: dict[str, Any] = {
    "RS256": rsa.generate_private_key(65537, 2048),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}
TO_JWK: dict[str, Callable[..., Any]] = {
    "RS256": RSAAlgorithm.to_jwk,
    "ES256": ECAlgorithm.to_jwk,
    "EdDSA": OKPAlgorithm.to_jwk,
}
STRANGE = ec.generate_private_key(ec.SECP256R1())
ISSUER, AUDIENCE = "https://login.example.com", "xlaserve"


def jwk(algorithm: str, **more: Any) -> dict[str, Any]:
    public = json.loads(TO_JWK[algorithm](KEYS[algorithm].public_key()))
    return {**public, "kid": algorithm, "use": "sig", **more}


def write_keys(folder: Path, *keys: dict[str, Any]) -> Path:
    path = folder / "keys.json"
    path.write_text(json.dumps({"keys": keys or [*map(jwk, KEYS)]}))
    return path


@pytest.fixture
def settings(tmp_path: Path) -> Tokens:
    return Tokens(jwks=write_keys(tmp_path), issuer=ISSUER, audience=AUDIENCE)


@pytest.fixture
def reader(settings: Tokens) -> TokenReader:
    return TokenReader(settings)


def claims(**changed: Any) -> dict[str, Any]:
    found = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "shop",
        "exp": int(time.time()) + 600,
        "roles": ["infer"],
        **changed,
    }
    return {key: value for key, value in found.items() if value is not None}


def token(algorithm: str = "ES256", key: Any = None, headers: dict[str, Any] | None = None, **changed: Any) -> str:
    signing = key or KEYS[algorithm]
    return jwt.encode(claims(**changed), signing, algorithm, {"kid": algorithm, **(headers or {})})


def encoded(part: bytes) -> bytes:
    return base64.urlsafe_b64encode(part).rstrip(b"=")


@pytest.mark.parametrize("algorithm", KEYS)
def test_a_token_says_who_calls(reader: TokenReader, algorithm: str) -> None:
    found = reader.caller(token(algorithm, roles=["infer", "observe", "of something else"], models=["resnet*"]))
    assert found == Caller("shop", frozenset([Role.INFER, Role.OBSERVE]), ("resnet*",), origin=Origin.TOKEN)


def test_each_subject_has_the_limits_and_the_priority_of_tokens(settings: Tokens) -> None:
    limits = (Limit(images_per_s=5),)
    found = TokenReader(settings.model_copy(update={"limits": limits, "priority": 3})).caller(token(sub="shop"))
    assert found is not None
    assert (found.name, found.limits, found.priority, found.is_listed) == ("shop", limits, 3, False)


@pytest.mark.parametrize(
    "changed",
    [
        {"iss": "https://evil.example.com"},
        {"iss": None},
        {"aud": "another"},
        {"aud": ["another"]},
        {"aud": None},
        {"sub": None},
        {"sub": ""},
        {"sub": "ops\0.evil"},
        {"sub": "ops\n"},
        {"sub": "o" * 256},
        {"exp": None},
        {"exp": "soon"},
        {"exp": float("inf")},
        {"roles": {"admin": True}},
        {"roles": 3},
        {"roles": [["admin"]]},
        {"models": "resnet"},
        {"models": {"resnet": 1}},
        {"models": [1]},
    ],
    ids=str,
)
def test_a_token_with_wrong_claims_is_not_accepted(reader: TokenReader, changed: dict[str, Any]) -> None:
    assert reader.caller(token(**changed)) is None


@pytest.mark.parametrize(("claim", "from_now_s"), [("exp", -LEEWAY_S - 5), ("nbf", 600), ("iat", 600)])
def test_a_token_of_another_time_is_not_accepted(reader: TokenReader, claim: str, from_now_s: int) -> None:
    changed: dict[str, Any] = {claim: int(time.time()) + from_now_s}
    assert reader.caller(token(**changed)) is None


def test_one_audience_of_several_is_enough(reader: TokenReader) -> None:
    assert reader.caller(token(aud=["another", AUDIENCE]))


def test_clocks_may_differ_a_little(reader: TokenReader) -> None:
    now = int(time.time())
    assert reader.caller(token(exp=now - LEEWAY_S + 20, nbf=now + LEEWAY_S - 20))


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("infer observe", {Role.INFER, Role.OBSERVE}),
        (["admin"], {Role.ADMIN}),
        ("root administrator", set()),
        ([], set()),
        (None, set()),
    ],
)
def test_roles_are_a_list_or_words(reader: TokenReader, roles: Any, expected: set[Role]) -> None:
    found = reader.caller(token(roles=roles))
    assert found
    assert found.roles == expected


def test_claims_have_the_names_that_are_set(settings: Tokens) -> None:
    changed = settings.model_copy(update={"roles_claim": "groups", "models_claim": "may"})
    found = TokenReader(changed).caller(token(roles=["admin"], groups=["infer"], may=["a"], models=["b"]))
    assert found == Caller("shop", frozenset([Role.INFER]), ("a",), origin=Origin.TOKEN)


def forged_by_public_key() -> str:
    """A token that is signed by HMAC with the public key for a secret."""
    public = KEYS["RS256"].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    head = encoded(json.dumps({"alg": "HS256", "typ": "JWT", "kid": "RS256"}).encode())
    signed = head + b"." + encoded(json.dumps(claims(roles=["admin"])).encode())
    return (signed + b"." + encoded(hmac.digest(public, signed, hashlib.sha256))).decode()


def unsigned(algorithm: str) -> str:
    head = encoded(json.dumps({"alg": algorithm, "kid": "RS256"}).encode())
    return (head + b"." + encoded(json.dumps(claims()).encode()) + b".").decode()


def nested(depth: int) -> str:
    return (encoded(b"[" * depth) + b"." + encoded(b"{}") + b"." + encoded(b"x")).decode()


@pytest.mark.parametrize(
    "forged",
    [
        forged_by_public_key(),
        unsigned("none"),
        unsigned("None"),
        unsigned("RS256"),
        jwt.encode(claims(), STRANGE, "ES256", {"kid": "ES256"}),
        jwt.encode(claims(), STRANGE, "ES256", {"kid": "RS256"}),
        jwt.encode(claims(), STRANGE, "ES256", {"kid": "unknown"}),
        jwt.encode(claims(), STRANGE, "ES256"),
        jwt.encode(
            claims(), STRANGE, "ES256", {"kid": "ES256", "jwk": json.loads(TO_JWK["ES256"](STRANGE.public_key()))}
        ),
        jwt.encode(claims(), KEYS["RS256"], "RS512", {"kid": "RS256"}),
        token()[:-4] + "AAAA",
        token().replace(".", ".A", 1),
        token() + "A" * MAX_TOKEN_BYTES,
        nested(5000),
        "..",
        "a.b.c",
        "\udcff.\ud800.é",
    ],
    ids=range(17),
)
def test_a_forged_token_is_not_accepted(reader: TokenReader, forged: str) -> None:
    assert reader.caller(forged) is None


def test_a_set_of_one_key_takes_tokens_that_do_not_name_it(tmp_path: Path) -> None:
    keys = write_keys(tmp_path, jwk("EdDSA", kid=None))
    reader = TokenReader(Tokens(jwks=keys, issuer=ISSUER, audience=AUDIENCE))
    assert reader.caller(jwt.encode(claims(), KEYS["EdDSA"], "EdDSA"))


def test_a_secret_in_the_set_is_no_key(tmp_path: Path) -> None:
    secret = {"kty": "oct", "k": encoded(b"s" * 32).decode(), "kid": "secret"}
    write_keys(tmp_path, secret, jwk("ES256"))
    reader = TokenReader(Tokens(jwks=tmp_path / "keys.json", issuer=ISSUER, audience=AUDIENCE))
    assert reader.caller(jwt.encode(claims(), b"s" * 32, "HS256", {"kid": "secret"})) is None
    assert reader.caller(token())
    write_keys(tmp_path, secret)
    with pytest.raises(ConfigError, match="expected public keys"):
        TokenReader(Tokens(jwks=tmp_path / "keys.json", issuer=ISSUER, audience=AUDIENCE))


def test_a_key_that_is_not_for_signatures_is_left_out(tmp_path: Path) -> None:
    path = write_keys(tmp_path, jwk("RS256", use="enc"))
    with pytest.raises(ConfigError, match="expected public keys"):
        TokenReader(Tokens(jwks=path, issuer=ISSUER, audience=AUDIENCE))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"keys": []}', '{"keys": [{"kty": "?"}]}', '{"keys": 3}', "[" * 999])
def test_a_set_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"^access: tokens\.jwks: [^\n]*$"):
        TokenReader(Tokens(jwks=path, issuer=ISSUER, audience=AUDIENCE))


def access_file(folder: Path) -> Path:
    path = folder / "access.yaml"
    path.write_text(json.dumps({"tokens": {"jwks": "keys.json", "issuer": ISSUER, "audience": AUDIENCE}}))
    return path


def test_the_door_takes_tokens_and_refuses_them_with_its_own_words(tmp_path: Path) -> None:
    write_keys(tmp_path)
    authenticator = Authenticator(access_file(tmp_path))
    found = authenticator.by_headers({"authorization": f"Bearer {token()}"})
    assert found == Caller("shop", frozenset([Role.INFER]), origin=Origin.TOKEN)
    with pytest.raises(Unauthenticated) as refused:
        authenticator.by_headers({"authorization": f"Bearer {token(sub=None)}"})
    assert str(refused.value) == str(unauthenticated())


def test_a_key_may_look_like_a_token(tmp_path: Path) -> None:
    write_keys(tmp_path)
    path = access_file(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "callers": [entry("dotted", "a.b.c")]}))
    assert Authenticator(path).by_headers({"authorization": "Bearer a.b.c"}) == Caller(
        "dotted", frozenset([Role.INFER])
    )


def test_keys_are_read_again_when_they_change(tmp_path: Path) -> None:
    write_keys(tmp_path, jwk("ES256"))
    authenticator = Authenticator(access_file(tmp_path))
    assert authenticator.watch is not None
    write_keys(tmp_path, jwk("EdDSA"))
    authenticator.watch.look()
    assert authenticator.by_headers({"authorization": f"Bearer {token('EdDSA')}"})
    with pytest.raises(Unauthenticated):
        authenticator.by_headers({"authorization": f"Bearer {token('ES256')}"})


def test_tokens_can_be_given_up_together_with_their_keys(tmp_path: Path) -> None:
    keys = write_keys(tmp_path)
    path = access_file(tmp_path)
    authenticator = Authenticator(path)
    assert authenticator.watch is not None
    keys.unlink()
    path.write_text("callers: []")
    authenticator.watch.look()
    with pytest.raises(Unauthenticated):
        authenticator.by_headers({"authorization": f"Bearer {token()}"})


def test_a_signature_is_checked_once_until_its_token_expires(settings: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(time.time())
    reader = TokenReader(settings, clock)
    checked: list[str] = []
    decode = jwt.decode

    def note(token: str, *arguments: Any, **named: Any) -> Any:
        checked.append(token)
        return decode(token, *arguments, **named)

    monkeypatch.setattr(jwt, "decode", note)
    first, second = token(), token("EdDSA", sub="another")
    for _ in range(3):
        assert (found := reader.caller(first)) and found.name == "shop"
        assert (found := reader.caller(second)) and found.name == "another"
        assert reader.caller(token(sub=None)) is None
    assert checked.count(first) == checked.count(second) == 1
    clock.now += 601
    reader.caller(first)
    assert checked.count(first) == 2


def test_few_tokens_are_remembered(reader: TokenReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xlaserve.admission.tokens.MAX_ACCEPTED", 3)
    for number in range(10):
        assert reader.caller(token("EdDSA", sub=str(number)))
        assert len(reader._accepted) <= 3
