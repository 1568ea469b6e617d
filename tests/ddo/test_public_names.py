from __future__ import annotations

import subprocess
import sys

import pytest

import ddo


def test_every_public_name_is_there():
    assert ddo.__all__ == sorted(ddo.__all__)
    assert all(getattr(ddo, name) is not None for name in ddo.__all__)


def test_an_unknown_name_is_an_ordinary_error():
    with pytest.raises(AttributeError, match="'ddo' has no attribute 'nothing'"):
        _ = ddo.nothing


def test_forecast_and_settings_load_no_torch():
    use = "import sys, ddo; ddo.forecast, ddo.OffloadSettings, ddo.plan"
    code = f"{use}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
