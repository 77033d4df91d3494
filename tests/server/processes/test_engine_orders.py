"""The settings, models and numbers that an engine begins with."""

from __future__ import annotations

import pickle

import pytest

from xlaserve.config import ModelSettings, Settings
from xlaserve.config.versions import grouped
from xlaserve.errors import ConfigError
from xlaserve.processes.engine_orders import ENGINES, LOADINGS, EngineOrders
from xlaserve.processes.engine_replacement import InitialModels

CATS, DOGS = ModelSettings(name="cats", source="fake"), ModelSettings(name="dogs", source="fake")
AT_START = Settings(models=(CATS,), log_level="debug")
NOW = Settings(models=(CATS, DOGS), log_level="info")


def test_the_first_engine_serves_what_is_configured_at_the_start() -> None:
    assert EngineOrders(AT_START, lambda: NOW).current().settings == AT_START


def test_another_engine_serves_the_models_that_are_configured_now() -> None:
    settings = EngineOrders(AT_START, lambda: NOW, number=1).current().settings
    assert (settings.models, settings.log_level) == ((CATS, DOGS), "debug")


def test_another_engine_serves_what_the_one_before_it_has_said() -> None:
    labelled = DOGS.model_copy(update={"version_labels": (("stable", "1"),)})
    initial = InitialModels(grouped([labelled]), {})
    settings = EngineOrders(AT_START, lambda: NOW, number=1, initial_models=pickle.dumps(initial)).current().settings
    assert settings.models == (labelled,)


def test_no_engine_numbers_loadings_as_the_one_before_it_or_after_it() -> None:
    first = [
        EngineOrders(AT_START, lambda: NOW, number=number).first_loading for number in (0, 1, 2, ENGINES, 2 * ENGINES)
    ]
    assert first == [1, LOADINGS + 1, 2 * LOADINGS + 1, 1, 1]
    assert (ENGINES - 1) * LOADINGS + LOADINGS < 2**32


def test_with_an_unreadable_configuration_the_next_engine_serves_as_before(caplog: pytest.LogCaptureFixture) -> None:
    def read() -> Settings:
        raise ConfigError("models: expected a list, got a number")

    assert EngineOrders(AT_START, read, number=1).current().settings == AT_START
    assert "models: expected a list, got a number" in caplog.text


def test_outliving_a_failed_model_is_no_change_of_the_configuration() -> None:
    lasting = AT_START.model_copy(update={"exit_on_model_failure": False})
    assert EngineOrders(lasting, lambda: AT_START, number=1).read() == lasting
