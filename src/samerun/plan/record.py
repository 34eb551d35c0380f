"""Plans are values: frozen records that travel as JSON and can be compared.

A record class has a `SCHEMA` such as `samerun.plan.memory.v1`. `to_json` writes the schema beside the fields;
`from_json` finds the class by the schema and refuses unknown schemas, unknown fields, missing fields and wrong types.
`diff` compares two records field by field, so a run that resumes elsewhere can say what its plan changes.
Every number has its unit in its field's name (`_bytes`, `_seconds`, `num_`).
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol, runtime_checkable

from samerun.errors import SchemaError

_HOMES: Final[dict[str, tuple[str, str]]] = {
    "samerun.plan.memory.v1": ("samerun.plan.memory.plan", "MemoryPlan"),
    "samerun.plan.interval.v1": ("samerun.plan.availability.interval", "IntervalPlan"),
    "samerun.plan.goodput.v1": ("samerun.plan.availability.goodput", "GoodputPlan"),
    "samerun.plan.preempt.v1": ("samerun.plan.availability.deadline", "PreemptPlan"),
    "samerun.plan.batch.v1": ("samerun.plan.batch", "BatchPlan"),
    "samerun.plan.layouts.v1": ("samerun.plan.memory.layouts", "LayoutsPlan"),
    "samerun.plan.schedule.v1": ("samerun.plan.schedule", "SchedulePlan"),
    "samerun.plan.scaling.v1": ("samerun.plan.scaling", "ScalingPlan"),
    "samerun.plan.noise.v1": ("samerun.plan.noise", "NoisePlan"),
    "samerun.plan.cost.v1": ("samerun.plan.cost", "CostPlan"),
    "samerun.plan.recipe.v1": ("samerun.plan.recipe", "RecipePlan"),
    "samerun.plan.run.v1": ("samerun.plan.run", "RunPlan"),
}


@runtime_checkable
class Plan(Protocol):
    """A frozen dataclass with a schema."""

    @property
    def SCHEMA(self) -> str: ...  # noqa: N802  # a class constant of every record


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference between two plans: a dotted path and the two JSON values (None where a side lacks it)."""

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.before} → {self.after}"


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as a JSON tree with its `schema`; nested plans carry theirs. `from_json` gives an equal record."""
    return tree(plan)  # type: ignore[no-any-return]  # a dataclass becomes a dict


def from_json(value: dict[str, Any]) -> Any:
    """The record that `to_json` wrote. Raises SchemaError for an unknown schema, field or type."""
    schema = value.get("schema")
    if not isinstance(schema, str) or schema not in _HOMES:
        raise SchemaError(f"plan: unknown schema {schema!r}; this version reads {', '.join(sorted(_HOMES))}")
    module, name = _HOMES[schema]
    kind = getattr(importlib.import_module(module), name)
    msgspec = importlib.import_module("msgspec")
    body = _without_schema(value)
    try:
        plan = msgspec.convert(body, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise SchemaError(f"plan {schema}: {error}") from error
    back = _without_schema(to_json(plan))
    for change in _changes("", body, back):  # what the decoder ignored would be missing here
        raise SchemaError(f"plan {schema}: unknown or non-canonical field {change.path!r} ({change.before!r})")
    return plan


def diff(before: Plan, after: Plan) -> tuple[Change, ...]:
    """Every field whose value differs, in the order of the fields; empty when the plans are equal.

    Two plans of different kinds raise ValueError: they answer different questions.
    """
    if before.SCHEMA != after.SCHEMA:
        raise ValueError(f"a {before.SCHEMA} cannot be compared with a {after.SCHEMA}")
    return tuple(_changes("", to_json(before), to_json(after)))


def tree(value: Any) -> Any:
    """A record as a JSON tree: enums by value, tuples as lists, nested plans with their schema."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: tree(getattr(value, field.name)) for field in dataclasses.fields(value)}
        schema = getattr(type(value), "SCHEMA", None)
        return fields if schema is None else {"schema": schema, **fields}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [tree(item) for item in value]
    if isinstance(value, dict):
        return {str(key): tree(item) for key, item in value.items()}
    return value


def _without_schema(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_schema(item) for key, item in value.items() if key != "schema"}
    if isinstance(value, list):
        return [_without_schema(item) for item in value]
    return value


def _changes(path: str, before: Any, after: Any) -> list[Change]:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(key for key in after if key not in before)]
        found: list[Change] = []
        for key in keys:
            found += _changes(f"{path}.{key}" if path else key, before.get(key), after.get(key))
        return found
    if isinstance(before, list) and isinstance(after, list) and _are_named(before) and _are_named(after):
        return _changes(path, {item["name"]: item for item in before}, {item["name"]: item for item in after})
    same = before == after and type(before) is type(after)
    if same or (before == after and not isinstance(before, bool) and not isinstance(after, bool)):
        return []
    return [Change(path=path, before=before, after=after)]


def _are_named(items: list[Any]) -> bool:
    return bool(items) and all(isinstance(item, dict) and "name" in item for item in items)
