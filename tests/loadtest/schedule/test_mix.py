from __future__ import annotations

import pytest

from xlaserve_loadtest.schedule import mix
from xlaserve_loadtest.schedule.mix import Kind, Mix, draw_kinds, parse_counts, parse_models, parse_sizes

ONE = Mix({0: 1.0})
OWN: Mix[mix.Size | None] = Mix({None: 1.0})


@pytest.mark.parametrize(("text", "shown"), [("8", "8"), ("1:0.7,8:0.3", "1:0.7,8:0.3"), ("1:3, 2:1", "1:0.75,2:0.25")])
def test_counts_are_read(text: str, shown: str) -> None:
    assert str(parse_counts(text)) == shown


def test_models_and_sizes_are_read() -> None:
    models = parse_models("keras.applications:ResNet50:3,digits:1")
    assert models.shares == {"keras.applications:ResNet50": 0.75, "digits": 0.25}
    assert parse_models("a,b").shares == {"a": 0.5, "b": 0.5}
    sizes = parse_sizes("224x224:0.9, 0320x640:0.1")
    assert sizes.shares == {(224, 224): 0.9, (320, 640): 0.1}
    assert str(sizes) == "224x224:0.9,320x640:0.1"


@pytest.mark.parametrize("text", ["", "0", "1:", "1:0", "x", "1,1", "-1", "1:0.5,2:0", "1:1,2:0.0001", "²"])
def test_wrong_counts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"expected .*, got {text!r}"):
        parse_counts(text)


@pytest.mark.parametrize("text", ["", "a,,b", "a:,b", "a:0.5,a:0.5"])
def test_wrong_models_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected models such as"):
        parse_models(text)


def test_no_more_models_are_mixed_than_a_request_can_name() -> None:
    assert len(parse_models(",".join(f"m{index}" for index in range(256))).shares) == 256
    with pytest.raises(ValueError, match="expected up to 256 models, got 257"):
        parse_models(",".join(f"m{index}" for index in range(257)))


@pytest.mark.parametrize("text", ["", "8", "8x", "8x0", "8x8:0.5,8x8"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected HEIGHTxWIDTH"):
        parse_sizes(text)


def test_shares_are_kept_in_a_random_order() -> None:
    kinds = draw_kinds(ONE, parse_counts("1:0.7,8:0.3"), OWN, None, 0)
    counts = [kind.images for kind in kinds]
    assert (counts.count(1), counts.count(8)) == (28, 12)
    assert counts != sorted(counts)
    assert kinds == draw_kinds(ONE, parse_counts("1:0.7,8:0.3"), OWN, None, 0)


@pytest.mark.parametrize("shares", [(1 / 3, 2 / 3), (0.01, 0.99), (0.013, 0.987), (0.5, 0.3, 0.2)])
def test_a_sequence_is_long_enough_for_its_shares(shares: tuple[float, ...]) -> None:
    models = Mix(dict(enumerate(shares)))
    drawn = [kind.model for kind in draw_kinds(models, Mix({1: 1.0}), OWN, None, 0)]
    for model, share in enumerate(shares):
        assert drawn.count(model) / len(drawn) == pytest.approx(share, rel=0.03)


def test_models_counts_and_sizes_do_not_go_together() -> None:
    sizes: Mix[mix.Size | None] = Mix({(8, 8): 0.5, (4, 4): 0.5})
    kinds = draw_kinds(Mix({0: 0.5, 1: 0.5}), Mix({1: 0.5, 4: 0.5}), sizes, None, 0)
    assert len(set(kinds)) == 8
    assert max(kinds.count(kind) for kind in set(kinds)) < 2 * len(kinds) / 8
    assert Kind(1, 4, (8, 8)) in kinds
