"""Fixtures for every test: seeds from the test's own name, and which compiled kernels there are."""

import hashlib
import os
import random
import sys
from contextlib import suppress

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--native", action="store_true",
        help="build the compiled kernels (once, into build/tests) and let every test run on them",
    )  # fmt: skip


def pytest_configure(config):
    # What is built on the machine must not decide what is tested.
    config.addinivalue_line("filterwarnings", "ignore:the compiled cpu kernels are not built")
    if config.getoption("--native"):
        from tests import native

        # Before any test, whose time limit a busy machine would exceed.
        with suppress(pytest.skip.Exception):  # no compiler: the tests say so
            native.library_path()


@pytest.fixture(autouse=True, scope="session")
def build_dir(request, tmp_path_factory):
    """Where this process and its children look for compiled kernels: by default where nothing is,
    and where nothing can be written."""
    if request.config.getoption("--native"):
        from tests import native

        native.library_path()
        folder = native.BUILD_DIR
    else:
        file = tmp_path_factory.mktemp("nothing") / "file"
        file.touch()
        folder = file / "built"
    before = os.environ.get("DEEPINFER_BUILD_DIR")
    os.environ["DEEPINFER_BUILD_DIR"] = str(folder)
    yield folder
    os.environ.pop("DEEPINFER_BUILD_DIR")
    if before is not None:
        os.environ["DEEPINFER_BUILD_DIR"] = before


@pytest.fixture(autouse=True)
def seeded(request):
    """Seed every generator from the test's name: a test run alone sees the same data."""
    digest = hashlib.sha256(request.node.nodeid.encode()).digest()
    seed = int.from_bytes(digest[:4], "little")
    random.seed(seed)
    # Tests that need no torch must not load it; a test that does has imported it by now.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    return seed
