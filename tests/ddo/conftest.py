"""Torch with one thread: the tensors are tiny, and threads would only wait for each other."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
