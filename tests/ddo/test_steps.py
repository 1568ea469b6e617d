from __future__ import annotations

import gc
import weakref

import pytest
import torch

from ddo.errors import DdoError
from ddo.steps import Steps


class Lender:
    """Stands for a stray finder: a step that runs inside of it succeeds if it lends enough."""

    def __init__(self, found, *, ran_uncompiled=False):
        self.found = found
        self.ran_uncompiled = ran_uncompiled
        self.is_active = False

    def __enter__(self):
        self.is_active = True
        return self

    def __exit__(self, *_):
        self.is_active = False


class Owner:
    """Notes what happens at the boundaries."""

    def __init__(self, smaller=(), lender=None):
        self.events = []
        self.asked = []
        self.stale = []
        self.smaller = list(smaller)
        self.lender = lender

    def begin_step(self):
        self.events.append("begin")

    def end_step(self, *, is_complete):
        self.events.append("end" if is_complete else "broken")

    def find_smaller(self, num_tries):
        self.asked.append(num_tries)
        return self.smaller.pop(0) if self.smaller else None

    def make_smaller(self, smaller):
        self.events.append(smaller)

    def was_stale(self):
        return self.stale.pop(0) if self.stale else False

    def stray_finder(self):
        return self.lender

    def keep_strays(self, found):
        self.events.append(("strays", found))


def failing(times, error):
    """A method that fails so many times, then answers."""
    left = [times]

    def method(answer):
        if left[0]:
            left[0] -= 1
            raise error
        return answer

    return method


def test_an_entry_within_an_entry_is_part_of_the_same_step():
    owner = Owner()
    steps = Steps(owner, 3)
    assert steps.run(lambda: steps.run(lambda: 7, (), {}), (), {}) == 7
    assert owner.events == ["begin", "end"]


def test_a_step_without_memory_is_repeated_with_less_weights():
    owner = Owner(smaller=["half", "quarter"])
    method = failing(2, torch.OutOfMemoryError("full"))
    assert Steps(owner, 3).run(method, (5,), {}) == 5
    assert owner.events == ["begin", "broken", "half", "begin", "broken", "quarter", "begin", "end"]
    assert owner.asked == [0, 1]


def test_a_step_with_stale_weights_is_run_again_once():
    owner = Owner()
    owner.stale = [True, True]
    answers = iter([1, 2, 3])
    assert Steps(owner, 3).run(lambda: next(answers), (), {}) == 2
    assert owner.events == ["begin", "end", "begin", "end"]


@pytest.mark.parametrize(("smaller", "retries"), [([], 3), (["a", "b", "c"], 1)])
def test_retries_end_when_nothing_is_left_to_give_or_their_number_is_reached(smaller, retries):
    owner = Owner(smaller=smaller)
    with pytest.raises(torch.OutOfMemoryError) as error:
        Steps(owner, retries).run(failing(9, torch.OutOfMemoryError("full")), (5,), {})
    assert "lower device_budget" in error.value.__notes__[0]
    assert owner.events.count("begin") == min(len(smaller), retries) + 1


def test_tensors_of_a_failed_step_are_gone_before_memory_is_asked_for_again():
    alive = []

    class Careful(Owner):
        def make_smaller(self, smaller):
            gc.collect()
            alive.append(activation() is not None)

    def method():
        nonlocal activation
        if activation is None:
            tensor = torch.zeros(8)
            activation = weakref.ref(tensor)
            raise torch.OutOfMemoryError("full")
        return "done"

    activation = None
    assert Steps(Careful(smaller=["less"]), 1).run(method, (), {}) == "done"
    assert alive == [False]


def test_a_weight_out_of_reach_is_lent_and_remembered():
    owner = Owner(lender=Lender({3}))

    def method():
        if not owner.lender.is_active:
            raise RuntimeError("expected all tensors to be on the same device")
        return "right"

    assert Steps(owner, 0).run(method, (), {}) == "right"
    assert owner.events == ["begin", "broken", "begin", "end", ("strays", {3})]


def test_a_step_that_lending_let_run_uncompiled_is_run_once_more_as_it_should():
    owner = Owner(lender=Lender({3}, ran_uncompiled=True))

    def method():
        if owner.lender.is_active:
            return "nearly right"
        if ("strays", {3}) not in owner.events:
            raise RuntimeError("expected all tensors to be on the same device")
        return "right"

    assert Steps(owner, 0).run(method, (), {}) == "right"
    strays = ("strays", {3})
    assert owner.events == ["begin", "broken", "begin", "end", strays, "begin", "end"]


@pytest.mark.parametrize("found", [set(), {3}])
def test_an_error_that_lending_does_not_cure_is_raised_as_it_was(found):
    owner = Owner(lender=Lender(found))
    error = RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError) as caught:
        Steps(owner, 0).run(failing(2 if found else 1, error), (1,), {})
    assert caught.value is error
    assert ("strays", found) not in owner.events


def test_errors_of_this_package_and_of_python_are_not_repeated():
    class SomeError(DdoError, RuntimeError):
        pass

    for error in (SomeError("ours"), ValueError("theirs"), KeyboardInterrupt()):
        owner = Owner(lender=Lender({1}))
        with pytest.raises(type(error)):
            Steps(owner, 3).run(failing(1, error), (1,), {})
        assert owner.events == ["begin", "broken"]
