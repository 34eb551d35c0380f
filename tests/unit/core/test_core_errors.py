"""The tree of errors is the one that is drawn, and every way to end has its own code."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from samerun import errors
from samerun.errors import DoNotRestart, ExitCode, Refused, SamerunError, Stop, Stopped


def kinds() -> list[type[BaseException]]:
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, BaseException)]
    return [kind for kind in found if kind.__module__ == "samerun.errors"]


def test_every_error_is_drawn() -> None:
    text = errors.__doc__ or ""
    assert [kind.__name__ for kind in kinds() if kind.__name__ not in text] == []


def test_drawn_codes_are_the_real_ones() -> None:
    drawn = {}
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"[\s├└│─]*(\w+)[^\d]*?\s(\d+)(\s|$)", line):
            drawn[found.group(1)] = int(found.group(2))
    assert len(drawn) == 12
    assert {name: int(getattr(errors, name).exit_code) for name in drawn} == drawn


def test_stops_leave_a_script_with_their_code() -> None:
    for kind, code in ((Stopped, 75), (Refused, 4), (DoNotRestart, 93)):
        assert issubclass(kind, Stop) and issubclass(kind, SystemExit)
        assert kind("why").code == int(kind.exit_code) == code
        assert str(kind("why")) == kind("why").reason == "why"
        end = subprocess.run(
            [sys.executable, "-c", f"from samerun.errors import {kind.__name__}; raise {kind.__name__}('why')"],
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert end.returncode == code


def test_in_a_notebook_a_stop_leaves_the_kernel_alive() -> None:
    code = (
        "import builtins; builtins.get_ipython = lambda: None\n"
        "from samerun.errors import Stopped\n"
        "assert issubclass(Stopped, Exception) and not issubclass(Stopped, SystemExit)\n"
        "try: raise Stopped('why')\n"
        "except Exception as error: print(error, error.code)"
    )
    end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (end.returncode, end.stdout) == (0, "why 75\n"), end.stderr


def test_errors_are_also_their_kin_of_the_standard_library() -> None:
    assert issubclass(errors.UsageError, ValueError)
    assert issubclass(errors.StorageError, OSError)
    assert issubclass(errors.NotFoundError, FileNotFoundError)
    assert issubclass(errors.AlreadyExistsError, FileExistsError)


def test_no_deliberate_end_is_caught_as_a_failure() -> None:
    assert not issubclass(Stop, SamerunError)
    with pytest.raises(Stopped):
        try:
            raise Stopped("saved")
        except Exception:  # noqa: BLE001  # what users write
            raise AssertionError from None


def test_codes_are_distinct() -> None:
    assert len({int(code) for code in ExitCode}) == len(ExitCode)
