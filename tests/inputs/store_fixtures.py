"""The fixtures of tests/storage for tests of inputs: object stores on loopback."""

import importlib.util
import pathlib
import sys


def _storage_fixtures():
    path = pathlib.Path(__file__).parents[1] / "storage" / "conftest.py"
    spec = importlib.util.spec_from_file_location("storage_fixtures", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_stores = _storage_fixtures()
gs_address, address_of, use = _stores.gs_address, _stores.address_of, _stores.use
