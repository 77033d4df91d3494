from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def pages(generate_docs: ModuleType) -> dict[str, str]:
    found: dict[str, str] = generate_docs.pages()
    return found


def test_committed_pages_are_fresh(generate_docs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["generate_docs.py", "--check"])
    generate_docs.main()


def test_check_names_pages_that_are_stale_or_missing(
    generate_docs: ModuleType,
    pages: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in pages.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "settings.md").write_text(pages["settings.md"].replace("8001", "9001"))
    (tmp_path / "admin.md").unlink()
    monkeypatch.setattr(generate_docs, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate_docs.py", "--check"])

    with pytest.raises(SystemExit, match=r"stale pages in docs/reference: admin\.md, settings\.md;"):
        generate_docs.main()


def test_every_field_of_the_settings_is_documented(pages: dict[str, str]) -> None:
    from xlaserve.config import (
        AutoBuckets,
        BoxDecoding,
        ExampleSettings,
        ModelSettings,
        OutputSettings,
        ResizeSettings,
        ScalingSettings,
        Settings,
        ShadowSettings,
    )
    from xlaserve_fleet.settings import FleetSettings

    headings = {line.removeprefix("### ") for line in pages["settings.md"].splitlines() if line.startswith("### ")}

    assert headings == {
        *Settings.model_fields,
        *(f"models.{name}" for name in ModelSettings.model_fields),
        *(f"models.outputs.{name}" for name in OutputSettings.model_fields),
        *(f"models.examples.{name}" for name in ExampleSettings.model_fields),
        *(f"models.box_decoding.{name}" for name in BoxDecoding.model_fields),
        *(f"models.auto_buckets.{name}" for name in AutoBuckets.model_fields),
        *(f"models.shadow.{name}" for name in ShadowSettings.model_fields),
        *(f"models.resize.{name}" for name in ResizeSettings.model_fields),
        *(f"models.preprocess.{name}" for name in ScalingSettings.model_fields),
        *(f"fleet.{name}" for name in FleetSettings.model_fields),
    }


def test_methods_that_the_reference_calls_unimplemented_refuse_everything(pages: dict[str, str]) -> None:
    from xlaserve.wire.grpc.tensorflow_serving_service import ModelService, PredictionService

    told = set(re.findall(r"^### (\w+)\n\nTakes .*\n\nUNIMPLEMENTED", pages["tensorflow-serving.md"], re.MULTILINE))
    methods = {**vars(PredictionService), **vars(ModelService)}
    assert told == {name for name, method in methods.items() if method.__doc__ == "Refuses."} == {"MultiInference"}


def test_the_help_of_load_process_names_the_modes_that_it_is_for() -> None:
    from xlaserve.config import Mode, ModelSettings, Settings
    from xlaserve.models.preparer import can_be_prepared

    told = set(re.findall(r"`(\w+)`", Settings.model_fields["load_process"].description or ""))
    models = (ModelSettings(name="m", source="keras.applications:MobileNetV2", modes=(mode,)) for mode in Mode)
    assert told == {str(model.modes[0]) for model in models if can_be_prepared(model)}


@pytest.mark.parametrize(
    ("page", "line"),
    [
        ("settings.md", "integer, at least 0, at most 65,535 · default `8001` · `--grpc-port` · `XLASERVE_GRPC_PORT`"),
        ("settings.md", "list of batch or [batch, height, width] · default `[1, 2, 4, 8, 16]`"),
        ("commands.md", "## xlaserve-client classify"),
        ("commands.md", "## loadtest sweep"),
        ("metrics.md", "| `xlaserve_ready` | 1 once start-up has finished and at least one model serves. | gauge |"),
        ("metrics.md", "| `nv_inference_request_success` | Requests that succeeded. | unknown | `model`, `version` |"),
        (
            "metrics.md",
            "| `nv_inference_request_failure` | Requests that failed. | unknown | `model`, `version`, `reason` |",
        ),
        ("vision.md", "Takes [ClassifyRequest](#classifyrequest), returns [ClassifyResponse](#classifyresponse)."),
        ("vision.md", "| `auto_modes` | map of string to string | 14 |"),
    ],
)
def test_pages_say_what_the_code_says(pages: dict[str, str], page: str, line: str) -> None:
    assert any(found.startswith(line) for found in pages[page].splitlines())


def test_the_page_for_users_of_triton_names_every_metric_of_its_names(pages: dict[str, str]) -> None:
    from xlaserve.models.triton_metrics import triton_metrics
    from xlaserve.telemetry.metrics import Metrics

    listed = re.findall(r"^\| `(nv_\w+)`", pages["metrics.md"], re.MULTILINE)
    assert {metric.name for metric in triton_metrics([], Metrics())} == {*listed}
    assert "reference/metrics.md#tritons-names" in (Path(__file__).parents[2] / "docs" / "from-triton.md").read_text()
