from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from p3net.errors import InputError


@pytest.mark.parametrize("source", ["a.csv", Path("a.csv"), None])
def test_message_and_source(source):
    error = InputError("no points", source=source)
    assert error.message == "no points"
    assert error.source == ("a.csv" if source else None)
    assert str(error) == ("a.csv: no points" if source else "no points")
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("source", ["a.csv", None])
def test_it_survives_the_trip_between_processes(source):
    error = InputError("no points", source=source)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is InputError
    assert (again.message, again.source, str(again)) == (error.message, source, str(error))
