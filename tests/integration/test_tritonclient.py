"""A stock tritonclient, by gRPC and HTTP, in an environment of its own: its stubs would clash with ours in this one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripts.environments import run
from tests.clients.environments import REPOSITORY, environment
from tests.integration.conftest import Server

FOLDER = Path(__file__).parent
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def python() -> Path:
    """Python with tritonclient."""
    return environment("tritonclient") / "bin" / "python"


@pytest.fixture(scope="module")
def seen(python: Path, server: Server) -> dict[str, Any]:
    image = REPOSITORY / "scripts" / "samples" / "digits" / "3_1765.png"
    found: dict[str, Any] = json.loads(
        run(python, "-W", "error", FOLDER / "triton_probe.py", server.grpc, image, timeout_s=TIMEOUT_S)
    )
    return found


@pytest.fixture(scope="module")
def seen_by_http(python: Path, server: Server) -> dict[str, Any]:
    image = REPOSITORY / "scripts" / "samples" / "digits" / "3_1765.png"
    found: dict[str, Any] = json.loads(run(python, FOLDER / "triton_http_probe.py", server.http, image))
    return found


def test_it_asks_for_health_and_readiness(seen: dict[str, Any]) -> None:
    assert (seen["live"], seen["ready"]) == (True, True)
    assert seen["model_ready"] == {"digits": True, "noop": True, "broken": False, "unknown": False}
    assert seen["server"]["name"] == "xlaserve"


def test_it_lists_the_repository(seen: dict[str, Any]) -> None:
    models = {model["name"]: model for model in seen["index"]["models"]}
    assert {name: model["state"] for name, model in models.items()} == {
        "digits": "READY",
        "noop": "READY",
        "broken": "FAILED",
    }
    assert "does not exist" in models["broken"]["reason"]


def test_it_reads_metadata_and_configuration(seen: dict[str, Any]) -> None:
    metadata = seen["metadata"]
    assert (metadata["platform"], metadata["versions"]) == ("tensorflow_xla", ["1"])
    assert [(t["name"], t["datatype"], t["shape"]) for t in metadata["inputs"] + metadata["outputs"]] == [
        ("pixels", "UINT8", ["-1", "32", "32", "3"]),
        ("scores", "FP32", ["-1", "10"]),
    ]
    config = seen["config"]["config"]
    assert (config["name"], config["max_batch_size"]) == ("digits", 8)
    assert [(i["name"], i["data_type"]) for i in config["input"]] == [("pixels", "TYPE_UINT8")]
    assert config["dynamic_batching"]["preferred_batch_size"] == [1, 2, 4, 8]


def test_it_infers_from_pixels_and_from_images(seen: dict[str, Any]) -> None:
    assert seen["image"] == {"shape": [2, 10], "best": [3, 3], "id": "mine"}
    assert seen["pixels"] == [3, 10]
    assert seen["types_agree"]
    assert seen["async"] == [1, 10]
    assert seen["compressed"] == [1, 10]


def test_it_asks_for_classes_and_a_mode(seen: dict[str, Any]) -> None:
    ((first, second),) = seen["classification"]
    assert first.split(":")[1:] == ["3", "3"]
    assert float(first.split(":")[0]) > float(second.split(":")[0])
    assert seen["mode"] == "graph"


def test_it_streams(seen: dict[str, Any]) -> None:
    first, second, third = seen["stream"]
    assert (first, third) == ("0", "2")
    assert second.startswith("INVALID_ARGUMENT: pixels: expected shape [n, 32, 32, 3], got [1, 8, 8, 3]")


def test_it_is_told_what_is_wrong(seen: dict[str, Any]) -> None:
    assert {name: status for name, (status, _) in seen["errors"].items()} == {
        "unknown model": "StatusCode.NOT_FOUND",
        "wrong shape": "StatusCode.INVALID_ARGUMENT",
        "sequence": "StatusCode.UNIMPLEMENTED",
        "shared memory": "StatusCode.UNIMPLEMENTED",
        "load with a configuration": "StatusCode.UNIMPLEMENTED",
        "broken": "StatusCode.FAILED_PRECONDITION",
    }


def test_it_unloads_and_loads(seen: dict[str, Any]) -> None:
    assert (seen["unloaded"], seen["loaded"]) == (False, True)


def test_it_reads_statistics(seen: dict[str, Any]) -> None:
    (stats,) = seen["statistics"]["model_stats"]
    assert stats["name"] == "digits"
    # 2 + 3 + 3 + 1 + 1 + 1 images in single requests, and 2 in the stream.
    assert int(stats["inference_count"]) >= 13
    assert int(stats["inference_stats"]["success"]["count"]) >= 8
    assert int(stats["inference_stats"]["compute_infer"]["ns"]) > 0


def test_by_http_it_asks_for_health_models_and_their_descriptions(seen_by_http: dict[str, Any]) -> None:
    seen = seen_by_http
    assert (seen["live"], seen["ready"]) == (True, True)
    assert seen["model_ready"] == {"digits": True, "noop": True, "broken": False, "nope": False}
    assert seen["server"]["name"] == "xlaserve"
    states = {model["name"]: model["state"] for model in seen["index"]}
    assert states == {"digits": "READY", "noop": "READY", "broken": "FAILED"}
    metadata = seen["metadata"]
    assert [(t["name"], t["datatype"], t["shape"]) for t in metadata["inputs"] + metadata["outputs"]] == [
        ("pixels", "UINT8", [-1, 32, 32, 3]),
        ("scores", "FP32", [-1, 10]),
    ]
    assert (seen["config"]["name"], seen["config"]["max_batch_size"]) == ("digits", 8)
    (stats,) = seen["statistics"]["model_stats"]
    assert stats["name"] == "digits"
    assert stats["inference_stats"]["success"]["count"] >= 20


def test_by_http_it_infers_in_json_in_binary_and_compressed(seen_by_http: dict[str, Any]) -> None:
    seen = seen_by_http
    assert seen["image"] == {"shape": [2, 10], "best": [3, 3], "id": "mine"}
    assert seen["pixels"] == [3, 10]
    assert seen["types_agree"]
    assert seen["async"] == [[1, 10]] * 8
    assert seen["compressed"] == {"gzip": [2, 10], "deflate": [2, 10]}
    assert seen["mode"] == "graph"
    binary, listed = seen["classification"].values()
    assert binary == listed
    assert binary[0].split(":")[1] == "3"


def test_by_http_it_is_told_what_is_wrong(seen_by_http: dict[str, Any]) -> None:
    assert {name: status for name, (status, _) in seen_by_http["errors"].items()} == {
        "unknown model": "404",
        "wrong shape": "400",
        "sequence": "501",
        "shared memory": "404",
        "load with a configuration": "501",
        "broken": "503",
        "timeout": "504",
    }
    assert (seen_by_http["unloaded"], seen_by_http["loaded"]) == (False, True)
