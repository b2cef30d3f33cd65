"""Errors: the exit codes people and scripts rely on, and the two lines they print."""

import pytest

from ullage.base import errors

CODES = {
    "UsageError": 2,
    "DataError": 65,
    "ModelError": 66,
    "ServiceError": 69,
    "NumericsError": 70,
    "WriteError": 74,
    "PreemptedError": 75,
    "ConfigError": 78,
    "DoesNotFitError": 79,
    "PeerLostError": 80,
    "InterruptedRunError": 130,
}


def test_codes():
    found = {
        name: value.code
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.UllageError) and value is not errors.UllageError
    }
    assert found == CODES
    assert errors.UllageError.code == 1


@pytest.mark.parametrize(("remedy", "text"), [("do that", "what happened\ndo that"), ("", "what happened")])
def test_text_is_cause_and_remedy(remedy, text):
    error = errors.DataError("what happened", remedy)
    assert str(error) == text
    assert (error.cause, error.remedy) == ("what happened", remedy)
