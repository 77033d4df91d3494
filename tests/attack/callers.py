"""Callers who reach for what is another's, by name or by region, and strangers who fill the log."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import trustme
from tests.attack import http2
from tests.attack.client import HEALTH, INFERENCE, leak
from tests.attack.http2 import DATA, END_HEADERS, END_STREAM, HEADERS
from tests.attack.registry import OK, Round, attack
from tests.attack.server import Server
from tests.attack.strangers import NOOP

from xlaserve_proto import open_inference_pb2 as pb

MEMORY: Final = Path("/dev/shm")
KEYS: Final = {"root": "key-of-an-administrator-1", "second": "key-of-an-administrator-2", "shop": "key-of-a-shop-3"}
ROLES: Final = {"root": ["admin", "infer"], "second": ["admin", "infer"], "shop": ["infer"]}
TENSOR_BYTES: Final = 224 * 224 * 3
SECRET: Final = b"\x09" * TENSOR_BYTES
REGION: Final = "region"
BURST: Final = 300
"""Calls of a stranger at a time: more than may each have a line of the log."""
MAX_LOG_BYTES: Final = 60_000
"""Bytes that such calls may add to the log: a hundred lines, and how many were left out."""
TIMEOUT_S: Final = 40.0
NAMES: Final = ("ops\0.evil", "ops\n", "ops\x7f", "\0ops", "ops\u202e", "ops ", "OPS")


def _start(round: Round, **more: Any) -> Server:
    """Starts a server that knows the callers of KEYS, and `ops` by its certificate."""
    callers: list[dict[str, Any]] = [
        {"name": name, "key_sha256": hashlib.sha256(key.encode()).hexdigest(), "roles": ROLES[name]}
        for name, key in KEYS.items()
    ]
    callers.append({"name": "ops", "certificate": "ops", "roles": ["admin", "infer"]})
    access = round.folder / "access.yaml"
    access.write_text(json.dumps({"callers": callers}))
    config = {"models": [{**NOOP, "name": "noop"}], "access": str(access), "shared_memory": True, **more}
    return round.start(config).wait_until_ready()


def _ask(
    channel: grpc.Channel, method: str, message: bytes, metadata: tuple[tuple[str, str | bytes], ...] = ()
) -> tuple[str, bytes, str]:
    """Returns the status, the answer and the message of the status."""
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
    try:
        return OK, call(message, metadata=metadata, timeout=TIMEOUT_S), ""
    except grpc.RpcError as error:
        return error.code().name, b"", error.details() or ""


@contextmanager
def _file() -> Iterator[Path]:
    file = MEMORY / f"xlaserve-attack-{uuid.uuid4().hex}"
    file.write_bytes(SECRET)
    try:
        yield file
    finally:
        file.unlink()


def _request(*, reads: bool) -> bytes:
    """Returns a request that reads the region, or overwrites it with its output."""
    request = pb.ModelInferRequest(model_name="noop")
    tensor = request.inputs.add(name="pixels", datatype="UINT8", shape=(1, 224, 224, 3))
    parameters = tensor.parameters
    if not reads:
        request.raw_input_contents.append(bytes(TENSOR_BYTES))
        parameters = request.outputs.add(name="scores").parameters
    parameters["shared_memory_region"].string_param = REGION
    parameters["shared_memory_byte_size"].int64_param = TENSOR_BYTES
    return request.SerializeToString()


@attack(allowed={OK, "NOT_FOUND", "PERMISSION_DENIED"}, site="own", is_short=False)
def shared_memory_of_others(round: Round) -> None:
    """Callers read, overwrite, list and unregister regions that another one registered: none is theirs."""
    server = _start(round)
    key: dict[str, tuple[tuple[str, str | bytes], ...]] = {
        name: (("authorization", f"Bearer {secret}"),) for name, secret in KEYS.items()
    }
    unregister = (pb.SystemSharedMemoryUnregisterRequest(name=name).SerializeToString() for name in (REGION, ""))
    for_admins = [
        *((f"{INFERENCE}SystemSharedMemoryUnregister", message) for message in unregister),
        (f"{INFERENCE}SystemSharedMemoryStatus", b""),
    ]
    with _file() as file, grpc.insecure_channel(server.grpc) as channel:
        region = pb.SystemSharedMemoryRegisterRequest(name=REGION, key=f"/{file.name}", byte_size=TENSOR_BYTES)
        outcome, *_ = _ask(channel, f"{INFERENCE}SystemSharedMemoryRegister", region.SerializeToString(), key["root"])
        round.count(outcome, "register", frozenset({OK}))
        while round.has_time:
            for name in ("shop", "second"):
                for reads in (True, False):
                    message = _request(reads=reads)
                    outcome, _, details = _ask(channel, f"{INFERENCE}ModelInfer", message, key[name])
                    round.count(outcome, f"{name} uses another's region", frozenset({"NOT_FOUND"}), leak(details))
                for method, message in for_admins:
                    outcome, answer, details = _ask(channel, method, message, key[name])
                    expected = frozenset({OK} if name == "second" else {"PERMISSION_DENIED"})
                    wrong = "it shows another's region" if REGION.encode() in answer else leak(details)
                    round.count(outcome, f"{name}: {method}", expected, wrong)
            outcome, answer, _ = _ask(channel, f"{INFERENCE}ModelInfer", _request(reads=True), key["root"])
            round.count(outcome, "its own region", frozenset({OK}))
            if file.read_bytes() != SECRET:
                round.tally.fault("the region was written to")


@attack(allowed={"UNAUTHENTICATED"}, site="own", is_short=False)
def names_with_control_characters(round: Round) -> None:
    """Certificates whose names go on after a zero byte or end in one: nobody's, over gRPC too."""
    authority, clients = trustme.CA(), trustme.CA()
    own = authority.issue_cert("localhost")
    files = {name: round.folder / f"{name}.pem" for name in ("tls_certificate", "tls_key", "tls_client_ca")}
    own.cert_chain_pems[0].write_to_path(files["tls_certificate"])
    own.private_key_pem.write_to_path(files["tls_key"])
    clients.cert_pem.write_to_path(files["tls_client_ca"])
    server = _start(round, **{name: str(file) for name, file in files.items()})
    address = f"localhost:{server.grpc.rpartition(':')[2]}"
    while round.has_time:
        for name in (*NAMES, "ops"):
            issued = clients.issue_cert("client.example.com", common_name=name)
            credentials = grpc.ssl_channel_credentials(
                authority.cert_pem.bytes(), issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes()
            )
            with grpc.secure_channel(address, credentials, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                outcome, *_ = _ask(channel, f"{INFERENCE}SystemSharedMemoryStatus", b"")
            round.count(outcome, repr(name), frozenset({OK}) if name == "ops" else None)


@attack(allowed={OK, "closed"}, site="own", is_short=False)
def strangers_who_fill_the_log(round: Round) -> None:
    """Hundreds of calls of each kind that strangers can make: none has a traceback, and few have a line."""
    server = _start(round)
    kinds: dict[str, tuple[str, dict[str, str]]] = {
        "Health/List": (f"{HEALTH}List", {}),
        "no such method": (f"{HEALTH}Nope", {}),
        "no such service": ("/a.b/C", {}),
        "not implemented": (f"{INFERENCE}CudaSharedMemoryStatus", {}),
        "unauthenticated": (f"{INFERENCE}ModelInfer", {}),
        "for administrators": (f"{INFERENCE}RepositoryModelLoad", {}),
        "reflection": ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", {}),
        "an encoding that is none": (f"{HEALTH}Check", {"grpc_encoding": "nope"}),
        "a timeout that is none": (f"{HEALTH}Check", {"grpc_timeout": "x"}),
    }
    while round.has_time:
        for kind, (path, more) in kinds.items():
            before = len(server.log)
            with http2.Connection(server.grpc) as connection:
                for stream in range(1, 2 * BURST, 2):
                    call = http2.frame(HEADERS, END_HEADERS, stream, http2.headers(path, **more))
                    is_open = connection.send(call + http2.frame(DATA, END_STREAM, stream, http2.message(b"")))
                ended = sum(kind == HEADERS and flags & END_STREAM for kind, flags, *_ in connection.frames(1.0))
            said_bytes = len(server.log) - before
            wrong = f"{said_bytes} bytes in the log" if said_bytes > MAX_LOG_BYTES else None
            round.count(OK if is_open and ended else "closed", f"{BURST} calls: {kind}", wrong=wrong)
