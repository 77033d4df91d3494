from __future__ import annotations

import pytest
from scripts.pin_hashes import lines


def package(name: str, version: str, **source: object) -> dict[str, object]:
    return {"metadata": {"name": name, "version": version}, "download_info": {"url": "file:///somewhere", **source}}


def archive(**hashes: str) -> dict[str, object]:
    return {"hashes": hashes}


def test_each_package_has_a_line_without_its_address_and_our_own_has_none() -> None:
    found = {
        "install": [
            package("xlaserve", "0.1.0", dir_info={}),
            package("Pillow", "13.0.0", archive_info=archive(sha256="b0")),
            package("numpy", "2.4.6", archive_info=archive(sha256="a0", md5="1")),
        ]
    }
    assert [*lines(found)] == ["numpy==2.4.6 --hash=sha256:a0", "Pillow==13.0.0 --hash=sha256:b0"]


def test_a_package_without_a_hash_is_no_line() -> None:
    with pytest.raises(KeyError):
        [*lines({"install": [package("numpy", "2.4.6", archive_info=archive())]})]
