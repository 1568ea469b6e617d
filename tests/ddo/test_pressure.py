from __future__ import annotations

from ddo.pressure import Pressure


def quiet_steps_until_an_attempt(pressure, budget):
    for count in range(10_000):
        if (larger := pressure.next_budget(budget)) is not None:
            return count, larger
    raise AssertionError("no attempt was made")


def test_a_full_budget_never_grows():
    pressure = Pressure(100)
    assert all(pressure.next_budget(100) is None for _ in range(1000))


def test_attempts_ask_for_half_of_what_is_missing_and_become_rare():
    pressure = Pressure(100)
    assert quiet_steps_until_an_attempt(pressure, 60) == (16, 80)
    assert quiet_steps_until_an_attempt(pressure, 60) == (64, 80)
    assert quiet_steps_until_an_attempt(pressure, 80) == (256, 90)


def test_want_of_memory_starts_the_wait_again():
    pressure = Pressure(100)
    for _ in range(10):
        pressure.next_budget(60)
    pressure.starved()
    assert quiet_steps_until_an_attempt(pressure, 60)[0] == 16
