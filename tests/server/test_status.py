from __future__ import annotations

import pytest
from grpc import StatusCode

from xlaserve import errors
from xlaserve.errors import INTERNAL, INTERNAL_MESSAGE, MAX_MESSAGE_LENGTH, STATUS, status_of


def leaves(root: type[errors.XlaserveError]) -> set[type[errors.XlaserveError]]:
    below = [child for child in root.__subclasses__() if child.__module__ == errors.__name__]
    return {leaf for child in below for leaf in leaves(child)} if below else {root}


def made(kind: type[errors.XlaserveError], message: str) -> errors.XlaserveError:
    return kind("field", "this", message) if kind is errors.InvalidArgument else kind(message)


def test_every_leaf_of_the_tree_of_errors_has_its_own_row() -> None:
    assert set(STATUS) == leaves(errors.XlaserveError)


@pytest.mark.parametrize("kind", STATUS)
def test_an_error_is_answered_with_its_row_and_its_message(kind: type[errors.XlaserveError]) -> None:
    status, message = status_of(made(kind, "what came"))
    assert status is STATUS[kind]
    assert message.endswith(INTERNAL_MESSAGE if kind is errors.ConfigError else "what came")


def test_whose_fault_it_is_shows_in_the_status() -> None:
    fault_of_the_client = {
        StatusCode.INVALID_ARGUMENT,
        StatusCode.NOT_FOUND,
        StatusCode.UNIMPLEMENTED,
        StatusCode.UNAUTHENTICATED,
        StatusCode.PERMISSION_DENIED,
    }
    worth_another_try = {StatusCode.RESOURCE_EXHAUSTED, StatusCode.DEADLINE_EXCEEDED, StatusCode.UNAVAILABLE}
    for kind, row in STATUS.items():
        status = StatusCode[row.grpc]
        assert issubclass(kind, errors.RequestError) == (status in fault_of_the_client), kind
        assert not issubclass(kind, errors.OverloadError) or status in worth_another_try, kind


@pytest.mark.parametrize("error", [ValueError("/etc/secret"), KeyError(1), errors.XlaserveError("/etc/secret")])
def test_what_is_not_in_the_table_is_internal_and_tells_nothing(error: Exception) -> None:
    assert status_of(error) == (INTERNAL, INTERNAL_MESSAGE)


def test_a_message_stays_short_enough_for_trailing_metadata() -> None:
    _, message = status_of(errors.ModelNotFound("ü" * 10_000_000))
    # Three escaped characters for each of two bytes of UTF-8.
    assert len(message.encode()) * 3 < 8 * 1024
    assert message[:MAX_MESSAGE_LENGTH] == "ü" * MAX_MESSAGE_LENGTH
    assert message.endswith(" ...")
