"""Error types: exit statuses, text, JSON, and that they survive a process border."""

import pickle

import pytest

from deepinfer import errors
from deepinfer.errors import DeepinferError, ExitCode

TYPES = {
    errors.UsageError: 2,
    errors.EnvironmentProblem: 3,
    errors.CheckpointError: 4,
    errors.CapacityError: 5,
    errors.InternalError: 70,
}


@pytest.mark.parametrize(("kind", "status"), TYPES.items())
def test_each_type_has_its_exit_status(kind, status):
    error = kind("some-code", "it broke", ["got 1", "expected 2"], "try this")
    assert error.exit_status == status
    assert str(error) == "it broke\n  got 1\n  expected 2"
    assert error.as_json() == {
        "code": "some-code",
        "message": "it broke",
        "facts": ["got 1", "expected 2"],
        "hint": "try this",
    }
    assert isinstance(error, DeepinferError)


def test_exit_codes_are_the_documented_ones():
    assert sorted(int(code) for code in ExitCode) == [0, 1, 2, 3, 4, 5, 70, 130, 141, 143]


def test_errors_pickle_with_everything():
    error = errors.CheckpointError("a", "b", ("c",), hint="d")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is errors.CheckpointError
    assert again.as_json() == error.as_json()


def test_one_fact_may_be_a_string():
    assert errors.UsageError("a", "b", "one fact").facts == ("one fact",)
