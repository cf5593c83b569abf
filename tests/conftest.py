"""Fixtures for every test: seeds from the test's own name."""

import hashlib
import random
import sys

import pytest


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
