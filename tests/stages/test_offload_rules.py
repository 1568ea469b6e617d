"""What a run may say about offload: checked at once, with what would be right."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stages.contracts import OffloadChoice
from stages.errors import RequestError
from stages.offload_rules import choose_offload, without_effect


def test_amounts_become_bytes() -> None:
    found = choose_offload("stream", "12GiB", 8 << 30, env={})
    assert found == OffloadChoice(preset="stream", device_budget=12 << 30, host_budget=8 << 30)


def test_what_the_run_says_wins_over_variables_and_those_over_defaults() -> None:
    env = {"DDO_PRESET": "low_memory", "DDO_DEVICE_BUDGET": "4GiB", "DDO_RESERVE": "1GiB"}
    assert choose_offload(env=env) == OffloadChoice(
        preset="low_memory", device_budget=4 << 30, reserve=1 << 30
    )
    assert choose_offload("stream", "6GiB", env=env) == OffloadChoice(
        preset="stream", device_budget=6 << 30, reserve=1 << 30
    )
    assert choose_offload(env={}) == OffloadChoice()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"preset": "fast"}, "preset is 'fast', allowed are auto, resident, stream, low_memory"),
        ({"device_budget": "12 potatoes"}, "device_budget: '12 potatoes' is no amount of memory"),
        ({"device_budget": 0}, "device_budget: 0 is 0 bytes, expected at least 1"),
        ({"host_budget": "-1GiB"}, "host_budget: '-1GiB' is no amount of memory"),
        ({"env": {"DDO_PRESETS": "auto"}}, "environment has DDO_PRESETS, known are DDO_PRESET"),
        ({"env": {"DDO_RESERVE": "9GiB"}, "device_budget": "8GiB"}, "leaves nothing"),
    ],
)
def test_a_wrong_value_says_what_would_be_right(said: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        choose_offload(**{"env": {}, **said})  # type: ignore[arg-type]


def test_saying_nothing_loads_nothing_of_ddo() -> None:
    code = (
        "import sys; from stages.offload_rules import choose_offload; choose_offload(env={}); "
        "print('ddo' in sys.modules); choose_offload('stream', env={}); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("device", "said", "names"),
    [
        ("cpu", ("stream", None, None), "offload has no effect on device cpu"),
        ("cpu", ("auto", "4GiB", None), "device_budget has no effect"),
        ("cpu", ("stream", None, "4GiB"), "offload and host_budget have no effect"),
        ("cpu", (None, None, None), None),
        ("cpu", ("off", None, None), None),
        ("cuda", ("stream", "4GiB", None), None),
    ],
)
def test_offload_asked_for_on_the_cpu_is_told_of(
    device: str, said: tuple[str | None, str | None, str | None], names: str | None
) -> None:
    found = without_effect(device, *said)
    assert found is None if names is None else names in str(found)
