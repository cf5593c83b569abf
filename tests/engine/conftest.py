"""The models here are so small that a second thread only waits for the first."""

from __future__ import annotations

import pytest
import torch

from tests import t6


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["float", "quantised"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("t6") / request.param
    return t6.write(path, quantised=request.param == "quantised")
