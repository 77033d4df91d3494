"""Those who are not let in: by TLS, by keys and by tokens."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import jwt
import trustme
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from tests.attack import http1
from tests.attack.connections import GARBAGE
from tests.attack.registry import OK, Round, attack
from tests.attack.server import Server

MAX_CONNECTIONS: Final = 40
KEY: Final = "key-of-a-caller-1234567890"
OTHER: Final = "key-of-another-0987654321"
MINE, THEIRS, NONE = "mine", "theirs", "absent"
REFUSED: Final = frozenset({"401"})
READ_AGAIN_S: Final = 20.0
CHANGED_S: Final = 2.5
"""Files are looked at every 2 s."""
MAX_LEFT_FDS: Final = 8
NOOP: Final = {"source": "builtin:noop", "modes": ["graph"], "buckets": [1]}
LIVE: Final = http1.Request("GET", "/v2/health/live")


class House:
    """A server's certificate, keys and tokens, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        authority = trustme.CA()
        issued = authority.issue_cert("localhost", "127.0.0.1")
        issued.private_key_pem.write_to_path(folder / "key.pem")
        (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        authority.cert_pem.write_to_path(folder / "ca.pem")
        self.signing = rsa.generate_private_key(65_537, 2048)
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.signing.public_key()))
        (folder / "jwks.json").write_text(json.dumps({"keys": [{**public, "kid": "k", "alg": "RS256", "use": "sig"}]}))
        self.allow(KEY, OTHER)

    def allow(self, *keys: str) -> None:
        """Writes who may call."""
        callers = [
            {
                "name": f"caller{number}",
                "key_sha256": hashlib.sha256(key.encode()).hexdigest(),
                "roles": ["infer", "observe", "admin"],
                "models": [MINE],
            }
            for number, key in enumerate(keys)
        ]
        tokens = {"jwks": "jwks.json", "issuer": "https://issuer", "audience": "xlaserve"}
        partial = self.folder / "partial"
        partial.write_text(json.dumps({"callers": callers, "tokens": tokens}))
        partial.replace(self.folder / "access.yaml")

    def config(self, *, tls: bool) -> dict[str, Any]:
        """Returns the server's settings."""
        files = {"tls_certificate": str(self.folder / "cert.pem"), "tls_key": str(self.folder / "key.pem")}
        return {
            "models": [{**NOOP, "name": MINE}, {**NOOP, "name": THEIRS}],
            "access": str(self.folder / "access.yaml"),
            "log_level": "debug",
            **(files if tls else {}),
        }

    def token(self, headers: dict[str, Any] | None = None, **changed: Any) -> str:
        """Returns a token of the issuer."""
        now = int(time.time())
        claims = {
            "iss": "https://issuer",
            "aud": "xlaserve",
            "sub": "s",
            "exp": now + 600,
            "roles": ["infer"],
            **changed,
        }
        return jwt.encode(claims, self.signing, "RS256", {"kid": "k", **(headers or {})})

    def forged(self, rng: random.Random) -> str:
        """Returns what is no token of the issuer, or no key."""
        head, claims, signature = self.token().split(".")
        public = self.signing.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        kinds: tuple[Callable[[], str], ...] = (
            lambda: f"{_part({'alg': 'none', 'kid': 'k'})}.{claims}.",
            lambda: f"{_part({'alg': 'nOnE', 'kid': 'k'})}.{claims}.{signature}",
            lambda: _by_hmac({"alg": "HS256", "kid": "k"}, claims, public),
            lambda: f"{_part({'alg': 'ES256', 'kid': 'k'})}.{claims}.{signature}",
            lambda: f"{_part({'alg': 'RS256', 'kid': rng.choice((None, 1, [], {}, '../x', 'k' * 9000))})}.{claims}.x",
            lambda: f"{_part({'alg': 'RS256', 'kid': 'k', 'crit': ['b64'], 'b64': False})}.{claims}.{signature}",
            self._by_own_key,
            lambda: f"{head}.{claims}.{signature[:-9]}",
            lambda: f"{head}.{_part({'sub': 's', 'roles': ['admin']})}.{signature}",
            lambda: f"{head}.{claims}.",
            lambda: self.token(exp=1),
            lambda: self.token(aud="other"),
            lambda: self.token(iss="other"),
            lambda: self.token(exp=10**400),
            lambda: self.token(exp="never"),
            lambda: self.token(nbf=2**40),
            lambda: "." * rng.choice((2, 3, 50_000)),
            lambda: "a" * 60_000,
            lambda: f"{'A' * 20_000}.{'A' * 20_000}.{'A' * 20_000}",
            lambda: _encoded(b'{"a":' * 3000) + f".{claims}.{signature}",
            lambda: rng.randbytes(20).hex(),
            lambda: KEY[:-1],
            lambda: KEY + " x",
            lambda: "\xff\xfe",
            lambda: "",
        )
        return rng.choice(kinds)()

    def _by_own_key(self) -> str:
        own = rsa.generate_private_key(65_537, 2048)
        claims = {"iss": "https://issuer", "aud": "xlaserve", "sub": "s", "exp": 2**33, "roles": ["admin"]}
        jwk = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(own.public_key()))
        return jwt.encode(claims, own, "RS256", {"kid": "k", "jwk": jwk, "jku": "http://127.0.0.1:9/"})


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _part(value: object) -> str:
    return _encoded(json.dumps(value).encode())


def _by_hmac(head: dict[str, str], claims: str, secret: bytes) -> str:
    signed = f"{_part(head)}.{claims}"
    return f"{signed}.{_encoded(hmac.digest(secret, signed.encode(), 'sha256'))}"


@attack(allowed=REFUSED | {"closed", "431"}, site="own", is_short=False)
def forged_credentials(round: Round) -> None:
    """Tokens of other algorithms, keys and issuers, and endless ones: refused in the same words, none in the log."""
    house = House(round.folder / "house")
    server = round.start(house.config(tls=False)).wait_until_ready()
    said: set[bytes] = set()
    with http1.Client(server.http) as client:
        while round.has_time:
            forged = house.forged(round.random)
            name = round.random.choice(("Authorization: Bearer ", "Authorization: ", "X-Api-Key: "))
            outcome, body, wrong = client.ask(http1.Request("GET", f"/v2/models/{MINE}", headers=(f"{name}{forged}",)))
            if outcome == "401":
                said.add(body)
            round.count(outcome, f"{name}{forged[:80]}", wrong=wrong or ("several refusals" if len(said) > 1 else None))
        good = ((house.token(), "Bearer"), (KEY, "Bearer"), (KEY, "bearer"))
        for credential, scheme in good:
            header = f"Authorization: {scheme} {credential}"
            outcome, _, wrong = client.ask(http1.Request("GET", f"/v2/models/{MINE}", headers=(header,)))
            round.count(outcome, "a caller who is known", frozenset({OK}), wrong)
    _check_log(round, server)


@attack(allowed={OK, "401"}, site="own", is_short=False, expects="as before")
def keys_that_change(round: Round) -> None:
    """Keys are withdrawn and given back while calls run: each is answered or refused; what is wrong changes nothing."""
    house = House(round.folder / "house")
    server = round.start(house.config(tls=False)).wait_until_ready()
    ask = http1.Request("GET", f"/v2/models/{MINE}", headers=(f"Authorization: Bearer {OTHER}",))
    steady = http1.Request("GET", f"/v2/models/{MINE}", headers=(f"Authorization: Bearer {KEY}",))
    with http1.Client(server.http) as client:
        while round.has_time:
            for keys, expected in (((KEY,), "401"), (None, "401"), ((KEY, OTHER), OK)):
                if keys is None:
                    (house.folder / "access.yaml").write_text(
                        round.random.choice(("", "{", "callers: 7", "\0", "a: &a [*a]"))
                    )
                else:
                    house.allow(*keys)
                began, outcome = time.monotonic(), ""
                least_s = CHANGED_S if keys is None else 0.0
                while (waited_s := time.monotonic() - began) < least_s or outcome != expected:
                    if waited_s > READ_AGAIN_S:
                        break
                    outcome, _, wrong = client.ask(ask)
                    round.count(outcome, "a key that comes and goes", wrong=wrong)
                    outcome_of_steady, _, wrong = client.ask(steady)
                    round.count(outcome_of_steady, "a key that stays", frozenset({OK}), wrong)
                    time.sleep(0.01)
                if outcome != expected:
                    round.tally.fault(f"after {READ_AGAIN_S:g} s expected {expected}, got {outcome}")


@attack(allowed={OK, "401"}, site="own", is_short=False, expects="as before")
def token_keys_that_change(round: Round) -> None:
    """Keys are replaced by secrets, other algorithms and nonsense: tokens stay good, and forged ones are refused."""
    house = House(round.folder / "house")
    server = round.start(house.config(tls=False)).wait_until_ready()
    path = house.folder / "jwks.json"
    whole = path.read_text()
    (key,) = json.loads(whole)["keys"]
    secret = key["n"].encode()
    by_secret = {"kty": "oct", "kid": "k", "alg": "HS256", "k": _encoded(secret)}
    unusable: tuple[dict[str, Any], ...] = (
        by_secret,
        {**key, "alg": "none"},
        {**key, "alg": "HS256"},
        {**key, "alg": "PS256"},
        {**key, "use": "enc"},
        {**key, "n": ""},
    )
    with http1.Client(server.http) as client:
        while round.has_time:
            texts = (
                *(json.dumps({"keys": [one]}) for one in unusable),
                "",
                "{",
                '{"keys": []}',
                whole[: len(whole) // 2],
            )
            for text in (round.random.choice(texts), json.dumps({"keys": [by_secret, key]})):
                (house.folder / "partial").write_text(text)
                (house.folder / "partial").replace(path)
                until = time.monotonic() + CHANGED_S
                while time.monotonic() < until and round.has_time:
                    token = house.token(jti=str(round.random.random()))
                    _, claims, _ = token.split(".")
                    forged = _by_hmac({"alg": "HS256", "kid": "k"}, claims, secret)
                    unsigned = f"{_part({'alg': 'none', 'kid': 'k'})}.{claims}."
                    for credential, expected in ((token, OK), (forged, "401"), (unsigned, "401")):
                        header = f"Authorization: Bearer {credential}"
                        ask = http1.Request("GET", f"/v2/models/{MINE}", headers=(header,))
                        outcome, _, wrong = client.ask(ask)
                        round.count(outcome, f"{expected} expected of {text[:60]}", frozenset({expected}), wrong)
                    time.sleep(0.05)


@attack(allowed={"401", "403", "404", "405", "400", "501", OK}, site="own", is_short=False)
def what_may_not_be_seen(round: Round) -> None:
    """Whether a model exists that one may not use is told by no path, verb or body."""
    house = House(round.folder / "house")
    server = round.start(house.config(tls=False)).wait_until_ready()
    headers = (f"Authorization: Bearer {KEY}",)
    tails: tuple[str, ...] = (
        "",
        "/ready",
        "/config",
        "/stats",
        "/infer",
        "/metadata",
        "/versions/1",
        "/versions/9/ready",
        "/labels/x",
    )
    tails += (
        ":predict",
        ":classify",
        ":detect",
        ":segment",
        ":embed",
        ":transform",
        ":regress",
        "/versions/1:predict",
        "/labels/x:predict",
    )
    tails += ("/load", "/unload", "/nope", "%2fconfig", "/versions/1/infer")
    bodies: tuple[bytes | None, ...] = (None, b"", b"{}", b"{", b'{"examples":[]}', b'{"ready":true}')
    with http1.Client(server.http) as client:
        while round.has_time:
            root = round.random.choice(("/v1/models/", "/v2/models/", "/v2/repository/models/"))
            tail, verb = round.random.choice(tails), round.random.choice(("GET", "POST", "HEAD", "OPTIONS", "DELETE"))
            body = round.random.choice(bodies)
            if verb == "HEAD":
                continue  # its answers have no bodies to tell apart
            told = []
            for name in (THEIRS, NONE):
                request = http1.Request(verb, f"{root}{name}{tail}", damaged=body or b"", headers=headers)
                outcome, answer, wrong = client.ask(request)
                told.append((outcome, answer.replace(name.encode(), b"NAME")))
            if told[0] != told[1]:
                wrong = f"{told[0]} for a model that is there, {told[1]} for none"
            round.count(outcome, f"{verb} {root}NAME{tail} {body!r}", wrong=wrong)
        for path in ("/metrics", "/v2/models/stats", "/v1/models", "/openapi.json", "/docs"):
            outcome, answer, _ = client.ask(http1.Request("GET", path, headers=headers))
            round.count(outcome, path, wrong="it names a model of others" if THEIRS.encode() in answer else None)
        outcome, answer, _ = client.ask(http1.Request("POST", "/v2/repository/index", headers=headers))
        round.count(outcome, "index", frozenset({OK}), "it names others" if THEIRS.encode() in answer else None)
    _check_log(round, server)


@attack(allowed={OK, "closed", "refused", "400"}, site="own", is_short=False)
def tls_strangers(round: Round) -> None:
    """Handshakes that stall, break off or are none, more than there may be; those who speak TLS are answered."""
    house = House(round.folder / "house")
    limits = {"max_connections": MAX_CONNECTIONS, "max_connections_per_address": MAX_CONNECTIONS}
    server = round.start({**house.config(tls=True), **limits}).wait_until_ready()
    host, port = server.http.rsplit(":", 1)
    address = host, int(port)
    context = ssl.create_default_context(cafile=str(house.folder / "ca.pem"))
    with _hello(context) as hello, ExitStack() as held:
        _check_tls(round, context, address)
        time.sleep(0.5)
        open_files, number = server.open_files, 0
        while round.has_time:
            number += 1
            raw = held.enter_context(socket.create_connection(address, timeout=10))
            data = round.random.choice(
                (b"", hello, hello[: round.random.randrange(len(hello))], hello + bytes(5000), *GARBAGE, hello * 20)
            )
            with suppress(OSError):
                raw.sendall(data)
                if round.random.random() < 0.2:
                    raw.shutdown(socket.SHUT_WR)
            if round.random.random() < 0.1:
                with suppress(OSError):
                    own = held.enter_context(context.wrap_socket(raw, server_hostname="localhost"))
                    own.sendall(round.random.choice((b"GET", GARBAGE[1], round.random.randbytes(20_000))))
            round.count(OK, f"connection {number}")
            if number % 25 == 0:
                _check_tls(round, context, address)
            if number % 200 == 0:
                held.close()
        held.close()
        give_up_at = time.monotonic() + 15
        while (left := server.open_files - open_files) > MAX_LEFT_FDS and time.monotonic() < give_up_at:
            time.sleep(0.1)
        if left > MAX_LEFT_FDS:
            round.tally.fault(f"{left} more file descriptors are open than before")
    _check_log(round, server)


def _check_tls(round: Round, context: ssl.SSLContext, address: tuple[str, int]) -> None:
    """Asks as one who speaks TLS, and is known."""
    request = http1.Request("GET", f"/v2/models/{MINE}", headers=(f"Authorization: Bearer {KEY}", "Connection: close"))
    outcome = "closed"
    with (
        suppress(OSError),
        socket.create_connection(address, timeout=20) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as connection,
    ):
        connection.sendall(request.to_bytes())
        said = b""
        while part := connection.recv(65_536):
            said += part
        outcome = OK if said.startswith(b"HTTP/1.1 200") else said[9:12].decode("latin-1")
    round.count(outcome, "one who speaks TLS", frozenset({OK}))


@contextmanager
def _hello(context: ssl.SSLContext) -> Iterator[bytes]:
    """Gives the first bytes of a client that speaks TLS."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    yield outgoing.read()


def _check_log(round: Round, server: Server) -> None:
    for secret in (KEY, OTHER, KEY[:-1], "eyJ"):
        if secret in server.log:
            round.tally.fault(f"a secret is in the log: {secret[:9]}...")
