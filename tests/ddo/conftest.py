"""Torch with one thread: the tensors are tiny, and threads would only wait for each other.

For this folder alone: elsewhere bits are compared with those of processes with all threads.
"""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
