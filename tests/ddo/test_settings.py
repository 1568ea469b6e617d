from __future__ import annotations

import pytest

from ddo.settings import ENVIRONMENT, OffloadSettings, SettingsError
from ddo.sizes import GIB, parse_nbytes, show_nbytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("12GiB", 12 * GIB), ("1.5 gib", 3 * GIB // 2), ("2GB", 2 * 10**9), ("300", 300), (7, 7)],
)
def test_amounts_are_read_as_people_write_them(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "12 GiBs", "-1", "0", "1e9", "GiB", True, 1.5, None, "٣GiB x"]
)
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(ValueError, match=r"amount of memory|expected at least 1 byte"):
        parse_nbytes(text)


def test_amounts_are_shown_in_the_largest_unit_that_they_reach():
    shown = ["12 bytes", "3.4 KiB", "3.0 MiB", "5.00 GiB"]
    assert [show_nbytes(n) for n in (12, 3500, 3 << 20, 5 * GIB)] == shown


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "fast"}, "preset is 'fast', allowed are auto"),
        ({"device_budget": "12 apples"}, "device_budget: '12 apples'"),
        ({"host_budget": 0}, "host_budget: 0 is 0 bytes"),
        ({"max_oom_retries": True}, "max_oom_retries is True, allowed are 0 to 100"),
        ({"device_budget": "2GiB", "reserve": "2GiB"}, "leaves nothing"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_with_what_is_allowed(settings, message):
    with pytest.raises(SettingsError, match=message):
        OffloadSettings(**settings)


def test_weights_get_what_the_reserve_leaves():
    assert OffloadSettings().weight_budget_bytes(16 * GIB) == 13 * GIB
    assert OffloadSettings().weight_budget_bytes(4 * GIB) == 3 * GIB
    assert OffloadSettings(reserve="1GiB").weight_budget_bytes(4 * GIB) == 3 * GIB


def test_arguments_win_over_variables_and_variables_over_defaults():
    environment = {"DDO_PRESET": "stream", "DDO_DEVICE_BUDGET": "8GiB", "PATH": "/"}
    settings = OffloadSettings.from_environment(environment, preset="resident")
    assert settings.preset == "resident"
    assert settings.device_budget_bytes == 8 * GIB
    assert settings.host_budget_bytes is None


def test_a_misspelt_variable_is_refused_with_the_known_ones():
    with pytest.raises(SettingsError, match=r"DDO_PRESTE, known are DDO_PRESET, DDO_DEVICE"):
        OffloadSettings.from_environment({"DDO_PRESTE": "off"})


def test_at_most_five_variables_are_read():
    assert len(ENVIRONMENT) <= 5
