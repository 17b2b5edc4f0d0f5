"""Tests of image inputs have a cache folder of their own."""

import pytest


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("SPMD_TRAINER_CACHE", str(tmp_path_factory.mktemp("cache")))
