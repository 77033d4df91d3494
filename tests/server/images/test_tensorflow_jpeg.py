"""JPEGs decoded as TensorFlow does."""

from __future__ import annotations

import io
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from tests.server.images.encoded import LIMITS, UPRIGHT, encode

from xlaserve.config import TENSORFLOW_BILINEAR, Color, Decoding, Fit, ModelSettings
from xlaserve.errors import InvalidImage, ModelFailed
from xlaserve.images import tensorflow_jpeg
from xlaserve.images.decoder import Decoded, decode
from xlaserve.images.frame import place
from xlaserve.models.fast_decoding import photograph
from xlaserve.models.network_settings import check_decode

needs_simplejpeg = pytest.mark.skipif(not tensorflow_jpeg.is_available(), reason="needs simplejpeg")


def decoded(data: bytes, *, decoding: Decoding = Decoding.TENSORFLOW, color: Color = Color.RGB) -> Decoded:
    with Image.open(io.BytesIO(data)) as image:
        where = partial(place, input_height=image.height, input_width=image.width, fit=Fit.RESIZE)
    return decode(data, where, LIMITS, decoding=decoding, color=color, resize=TENSORFLOW_BILINEAR)


@needs_simplejpeg
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_pixels_are_those_of_tensorflow(mode: str, subsampling: int, progressive: bool) -> None:
    for side, quality in ((37, 60), (200, 95)):
        image = photograph(side, side + 21, side).convert(mode)
        data = encode(image, "JPEG", quality=quality, subsampling=subsampling, progressive=progressive)
        wanted = tf.io.decode_image(data, channels=3, expand_animations=False).numpy()
        np.testing.assert_array_equal(decoded(data).pixels, wanted)
        grey = tf.io.decode_jpeg(data, channels=1).numpy()
        np.testing.assert_array_equal(decoded(data, color=Color.GREY).pixels, grey)
        assert (decoded(data, decoding=Decoding.EXACT).pixels != wanted).any()


@needs_simplejpeg
def test_what_simplejpeg_does_not_read_is_decoded_as_always() -> None:
    data = encode(UPRIGHT.convert("CMYK"), "JPEG")
    exact = decoded(data, decoding=Decoding.EXACT).pixels
    np.testing.assert_array_equal(decoded(data).pixels, exact)
    opaque = encode(UPRIGHT, "JPEG")
    assert (decoded(opaque, color=Color.RGBA).pixels[:, :, 3] == 255).all()
    with pytest.raises(InvalidImage):
        decoded(encode(photograph(64, 64), "JPEG")[:-300])


@needs_simplejpeg
def test_pictures_of_other_formats_stay_exact() -> None:
    np.testing.assert_array_equal(decoded(encode(UPRIGHT)).pixels, UPRIGHT)


def test_without_simplejpeg_pillow_decodes_and_the_setting_is_refused() -> None:
    settings = ModelSettings(name="m", source="fake", decode=Decoding.TENSORFLOW)
    data = encode(UPRIGHT, "JPEG")
    exact = decoded(data, decoding=Decoding.EXACT).pixels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorflow_jpeg, "is_available", lambda: False)
        np.testing.assert_array_equal(decoded(data).pixels, exact)
        with pytest.raises(ModelFailed, match="pip install 'simplejpeg"):
            check_decode(settings)
        check_decode(ModelSettings(name="m", source="fake"))
