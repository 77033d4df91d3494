"""What clients see of servers that ask who calls, each in an environment of its own: prints how it ended, as JSON.

python access_calls.py WAY LOCKED.json
"""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MODEL = "noop"
SHAPE = [1, 224, 224, 3]
TIMEOUT_S = 30
OK, UNKNOWN, DENIED, CLOSED = "OK", "not recognised", "not allowed", "not connected"
BY_STATUS = {200: OK, 401: UNKNOWN, 403: DENIED, "UNAUTHENTICATED": UNKNOWN, "PERMISSION_DENIED": DENIED}
LOCKED: dict[str, Any] = json.loads(Path(sys.argv[2]).read_text())
CA = LOCKED["ca"]


class Call(NamedTuple):
    """To which server, as whom."""

    server: str
    own: list[str]
    """Files of a certificate and its key; none without."""
    headers: Mapping[str, str]

    def address(self, protocol: str) -> str:
        return str(LOCKED[self.server][protocol])

    @property
    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=CA)
        if self.own:
            context.load_cert_chain(*self.own)
        return context


def bearer(what: str) -> Call:
    return Call("tls", [], {"authorization": f"Bearer {LOCKED[what]}"})


def keys(infer: Callable[[Call], str], describe: Callable[[Call], str]) -> None:
    """TLS with an API key; refused without one, with another, and with what is no key"""
    assert infer(bearer("user")) == OK
    assert infer(Call("tls", [], {"x-api-key": LOCKED["user"]})) == OK
    for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "Basic dTpw"}, {"x-api-key": "other"}):
        assert infer(Call("tls", [], headers)) == UNKNOWN, headers


def tokens(infer: Callable[[Call], str], describe: Callable[[Call], str]) -> None:
    """TLS with a JSON Web Token; refused with one that has expired, and with one that was changed"""
    assert infer(bearer("token")) == OK
    assert infer(bearer("old_token")) == UNKNOWN
    assert infer(Call("tls", [], {"authorization": f"Bearer {LOCKED['token'][:-8]}AAAAAAAA"})) == UNKNOWN


def certificates(infer: Callable[[Call], str], describe: Callable[[Call], str]) -> None:
    """Mutual TLS with a certificate alone; not connected without one, or with one of another authority"""
    assert infer(Call("mutual", LOCKED["own"], {})) == OK
    untrusted: tuple[list[str], ...] = ([], LOCKED["others"])
    for own in untrusted:
        assert infer(Call("mutual", own, {"authorization": f"Bearer {LOCKED['user']}"})) == CLOSED


def roles(infer: Callable[[Call], str], describe: Callable[[Call], str]) -> None:
    """Roles: `observe` reads metadata and is refused to infer"""
    assert describe(bearer("watcher")) == OK
    assert describe(bearer("user")) == OK
    assert infer(bearer("watcher")) == DENIED


def curl(call: Call, path: str, *more: str) -> str:
    own = ("--cert", call.own[0], "--key", call.own[1]) if call.own else ()
    headers = [part for name, value in call.headers.items() for part in ("-H", f"{name}: {value}")]
    command = (
        "curl",
        "-s",
        "-o",
        "/dev/null",
        "-w",
        "%{http_code}",
        "-m",
        str(TIMEOUT_S),
        "--cacert",
        CA,
        *own,
        *headers,
    )
    done = subprocess.run(
        [*command, *more, f"https://{call.address('http')}/v2/models/{MODEL}{path}"],
        capture_output=True,
        text=True,
        check=False,
        input=json.dumps({"inputs": [{"name": "pixels", "shape": SHAPE, "datatype": "UINT8", "data": [9] * 150_528}]}),
    )
    return BY_STATUS.get(int(done.stdout), done.stdout) if done.returncode == 0 else CLOSED


def triton(protocol: str) -> tuple[Callable[[Call], str], Callable[[Call], str]]:
    import numpy as np
    from geventhttpclient.response import HTTPConnectionClosed
    from tritonclient.utils import InferenceServerException

    if protocol == "grpc":
        import tritonclient.grpc as module
    else:
        import tritonclient.http as module

    def client(call: Call) -> Any:
        cert, key = call.own or (None, None)
        address = call.address(protocol)
        if protocol == "grpc":
            files = {"root_certificates": CA, "private_key": key, "certificate_chain": cert}
            return module.InferenceServerClient(address, ssl=True, **files)
        return module.InferenceServerClient(address, ssl=True, ssl_context_factory=lambda: call.context)

    def outcome(ask: Callable[[], object]) -> str:
        try:
            ask()
        except InferenceServerException as error:
            status = str(error.status()).removeprefix("StatusCode.")
            return BY_STATUS.get(int(status) if status.isdecimal() else status, CLOSED)
        except (OSError, HTTPConnectionClosed):
            return CLOSED
        return OK

    def infer(call: Call) -> str:
        tensor = module.InferInput("pixels", SHAPE, "UINT8")
        tensor.set_data_from_numpy(np.full(SHAPE, 9, np.uint8))
        return outcome(lambda: client(call).infer(MODEL, [tensor], headers=dict(call.headers)))

    return infer, lambda call: outcome(lambda: client(call).get_model_metadata(MODEL, headers=dict(call.headers)))


def kserve(protocol: str) -> tuple[Callable[[Call], str], Callable[[Call], str]]:
    import grpc
    import httpx
    import numpy as np
    from kserve import InferenceGRPCClient, InferInput, InferRequest
    from kserve.inference_client import InferenceRESTClient, RESTConfig

    def request() -> Any:
        tensor = InferInput("pixels", SHAPE, "UINT8")
        tensor.set_data_from_numpy(np.full(SHAPE, 9, np.uint8))
        return InferRequest(MODEL, [tensor])

    async def ask(call: Call, infers: bool) -> str:
        cert, key = call.own or (None, None)
        try:
            if protocol == "grpc":
                files = {"root_certificates": CA, "private_key": key, "certificate_chain": cert}
                async with InferenceGRPCClient(call.address("grpc"), use_ssl=True, retries=0, **files) as client:
                    headers = [*call.headers.items()]
                    await (
                        client.infer(request(), headers=headers)
                        if infers
                        else client.is_model_ready(MODEL, headers=headers)
                    )
            else:
                rest = InferenceRESTClient(RESTConfig(protocol="v2", retries=0, verify=call.context))
                base, fields = f"https://{call.address('http')}", dict(call.headers)
                if infers:
                    await rest.infer(base, request(), model_name=MODEL, headers=fields)
                else:
                    assert await rest.is_model_ready(base, MODEL, headers=fields)
        except grpc.RpcError as error:
            return BY_STATUS.get(error.code().name, CLOSED)
        except httpx.HTTPStatusError as error:
            return BY_STATUS.get(error.response.status_code, str(error))
        except (httpx.TransportError, OSError):
            return CLOSED
        return OK

    return lambda call: asyncio.run(ask(call, True)), lambda call: asyncio.run(ask(call, False))


def tensorflow_serving(protocol: str) -> tuple[Callable[[Call], str], Callable[[Call], str]]:
    import grpc
    import numpy as np
    import requests
    import tensorflow as tf
    from tensorflow_serving.apis import get_model_metadata_pb2, predict_pb2, prediction_service_pb2_grpc

    pixels = np.full(SHAPE, 9, np.uint8)

    def by_grpc(call: Call, infers: bool) -> str:
        cert, key = (Path(file).read_bytes() for file in call.own) if call.own else (None, None)
        credentials = grpc.ssl_channel_credentials(Path(CA).read_bytes(), key, cert)
        with grpc.secure_channel(call.address("grpc"), credentials) as channel:
            stub, metadata = prediction_service_pb2_grpc.PredictionServiceStub(channel), [*call.headers.items()]
            asked: Any = predict_pb2.PredictRequest() if infers else get_model_metadata_pb2.GetModelMetadataRequest()
            asked.model_spec.name = MODEL
            if infers:
                asked.inputs["pixels"].CopyFrom(tf.make_tensor_proto(pixels))
            else:
                asked.metadata_field.append("signature_def")
            try:
                (stub.Predict if infers else stub.GetModelMetadata)(asked, TIMEOUT_S, metadata=metadata)
            except grpc.RpcError as error:
                return BY_STATUS.get(error.code().name, CLOSED)
        return OK

    def by_rest(call: Call, infers: bool) -> str:
        url = f"https://{call.address('http')}/v1/models/{MODEL}"
        options: Any = {"headers": call.headers, "verify": CA, "cert": tuple(call.own) or None, "timeout": TIMEOUT_S}
        try:
            if infers:
                answer = requests.post(f"{url}:predict", json={"instances": pixels.tolist()}, **options)
            else:
                answer = requests.get(f"{url}/metadata", **options)
        except requests.ConnectionError:
            return CLOSED
        return BY_STATUS.get(answer.status_code, str(answer.text))

    ask = by_grpc if protocol == "grpc" else by_rest
    return lambda call: ask(call, True), lambda call: ask(call, False)


def ways(name: str) -> tuple[Callable[[Call], str], Callable[[Call], str]]:
    # What infers and what reads metadata, in one way: CLIENT.PROTOCOL. A docstring would make it a call of the table.
    client, _, protocol = name.partition(".")
    if client == "curl":
        return lambda call: curl(call, "/infer", "-d", "@-"), lambda call: curl(call, "")
    return {"tritonclient": triton, "kserve": kserve, "tensorflow-serving": tensorflow_serving}[client](protocol)


def outcome(call: Callable[..., None], infer: Callable[[Call], str], describe: Callable[[Call], str]) -> str:
    try:
        call(infer, describe)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    infer, describe = ways(sys.argv[1])
    json.dump({one.__name__: outcome(one, infer, describe) for one in (keys, tokens, certificates, roles)}, sys.stdout)
