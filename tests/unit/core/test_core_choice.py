"""An option that is given by name: members and words are taken, anything else is told with the option's own name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import samerun
from samerun.core.choice import Choice
from samerun.errors import UsageError
from samerun.step import Step


class Colour(Choice):
    RED = "red"
    BLUE = "dark-blue"


def test_words_and_members() -> None:
    assert Colour.parse("dark-blue", option="colour") is Colour.BLUE
    assert Colour.parse(Colour.RED, option="colour") is Colour.RED


@pytest.mark.parametrize("wrong", ["RED", "", "green", None, 3])
def test_anything_else_is_told_with_the_options_name(wrong: Any) -> None:
    with pytest.raises(UsageError) as told:
        Colour.parse(wrong, option="paint")
    assert str(told.value) == f"paint={wrong!r} is unknown; choose one of 'red', 'dark-blue'"


@pytest.mark.parametrize("option", ["precision", "objective", "accumulate", "clock", "rng", "remap", "on_save_error"])
def test_every_option_of_a_run_is_told_by_the_name_it_was_given_under(option: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = samerun.Data([0, 1], global_batch=1, micro_batch=1, seed=0)
    makers: list[Callable[..., Any]] = [
        lambda **o: samerun.Run("nowhere", model=model, optimizer=optimizer, data=data, **o)
    ]
    if option in ("precision", "objective", "accumulate", "clock"):
        makers.append(lambda **o: Step(model, optimizer, **o))
    for make in makers:
        with pytest.raises(UsageError, match=f"^{option}='wrong' is unknown; choose one of "):
            make(**{option: "wrong"})
