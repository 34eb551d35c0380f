"""Starting: fresh, resumed, fallen back, refused; alike on every rank, and nothing touched where it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samerun.checkpoint import Store
from samerun.core.component import Captured, Source
from samerun.core.progress import Progress
from samerun.errors import Refused
from samerun.ranks.group import Group, Solo
from samerun.ranks.threads import run_ranks
from samerun.run.starting.start import Started, StartKind, start
from samerun.state.model import Weights
from samerun.state.optimizer import OptimizerMemory
from samerun.state.record import Record
from samerun.state.rng import Rng, preserved_rng

IDENTITY = {"model": {"weight": "float32[3, 7]"}, "user": {"lr": 0.1}}
FACTS = {"surroundings": {}, "topology": {}}


class Own:
    """A component of each rank's own: a tensor and a plain value that no other rank may get."""

    name = "mine"

    def __init__(self, rank: int, value: float) -> None:
        self.tensor = torch.full((5,), value + rank)
        self.plain: Any = {"rank": rank, "value": value}

    def capture(self) -> Captured:
        return Captured(plain=self.plain, rank_tensors={"t": self.tensor})

    def restore(self, source: Source) -> None:
        self.plain = source.plain
        source.read_into("t", self.tensor)


class Program:
    """One rank's program: a model, something of its own, and what a start gave it."""

    def __init__(self, group: Group, value: float = 0.0, *, width: int = 7) -> None:
        self.model = nn.Linear(width, 3)
        nn.init.constant_(self.model.weight, value)
        self.own = Own(group.rank, value)
        self.record = {"value": value}
        self.parts: list[Any] = [
            Weights({"m": self.model}),
            Record("loss", lambda: self.record, lambda saved: self.record.update(saved)),
            self.own,
        ]

    def holds(self, value: float) -> bool:
        return bool((self.model.weight == value).all()) and self.record == {"value": value}


def begin(
    path: Any, group: Group, program: Program, *, identity: Any = None, waive: Sequence[str] = (), parts: Any = None
) -> tuple[Store, Started]:
    store = Store(path, group=group)
    started = start(
        store, group, identity=identity or IDENTITY, components=parts or program.parts, waive=waive, facts=FACTS
    )
    return store, started


def make_run(path: Path, size: int = 1, values: Sequence[float] = (1.0, 2.0)) -> list[str]:
    """A run of `size` ranks with one checkpoint per value; names oldest first."""

    def body(group: Group) -> list[str]:
        program = Program(group)
        store, _ = begin(path, group, program)
        names, progress = [], Progress()
        for value in values:
            filled = Program(group, value)
            names.append(store.save({p.name: p.capture() for p in filled.parts}, progress, facts=FACTS).result().name)
            progress = progress.after(updated=True, samples=8, tokens=8)
        return names

    return run_ranks(size, body)[0]


def tree(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else b"/" for p in sorted(path.rglob("*"))}


def flip(file: Path, position: int = -9) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def test_an_empty_path_starts_fresh_with_one_name_for_all_ranks(tmp_path: Path) -> None:
    started = run_ranks(3, lambda group: begin(tmp_path, group, Program(group))[1])
    assert {s.kind for s in started} == {StartKind.FRESH}
    assert len({s.run_id for s in started}) == 1
    assert [s.attempt for s in started] == [1, 1, 1]
    assert all(s.progress == Progress() and s.checkpoint is None for s in started)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_resume_restores_the_newest_and_each_rank_its_own(tmp_path: Path, size: int) -> None:
    names = make_run(tmp_path, size)

    def body(group: Group) -> tuple[Started, bool, Any, float]:
        program = Program(group)
        _, started = begin(tmp_path, group, program)
        return started, program.holds(2.0), program.own.plain, float(program.own.tensor[0])

    for rank, (started, holds, plain, own) in enumerate(run_ranks(size, body)):
        assert started.kind is StartKind.RESUMED
        assert (started.checkpoint, started.attempt, started.saved_world_size) == (names[1], 2, size)
        assert started.restored == ("weights", "loss", "mine")
        assert int(started.progress.updates) == 1
        assert holds
        assert (plain, own) == ({"rank": rank, "value": 2.0}, 2.0 + rank)


def test_a_run_that_never_saved_starts_fresh_under_its_own_name(tmp_path: Path) -> None:
    _, first = begin(tmp_path, Solo(), Program(Solo()))
    _, second = begin(tmp_path, Solo(), Program(Solo()))
    assert (second.kind, second.run_id, second.attempt) == (StartKind.FRESH, first.run_id, 2)


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "rank-00000.json", "manifest.json"])
def test_damage_falls_back_to_the_older_one_and_says_why(tmp_path: Path, file: str) -> None:
    older, newest = make_run(tmp_path)
    flip(tmp_path / "checkpoints" / newest / file)
    program = Program(Solo())
    _, started = begin(tmp_path, Solo(), program)
    assert started.kind is StartKind.FALLEN_BACK
    assert started.checkpoint == older
    assert program.holds(1.0)
    assert [passed.name for passed in started.passed] == [newest]
    assert file in str(started.passed[0])


def test_an_unfinished_save_is_passed_over_and_is_no_fall_back(tmp_path: Path) -> None:
    older, newest = make_run(tmp_path)
    (tmp_path / "checkpoints" / newest / "manifest.json").unlink()
    _, started = begin(tmp_path, Solo(), Program(Solo()))
    assert (started.kind, started.checkpoint) == (StartKind.RESUMED, older)
    assert "no manifest; the save never finished" in str(started.passed[0])


@pytest.mark.parametrize("size", [2, 3])
def test_damage_that_one_rank_sees_makes_all_fall_back_alike(tmp_path: Path, size: int) -> None:
    def save(group: Group) -> list[str]:
        store, _ = begin(tmp_path, group, Program(group), parts=[Own(group.rank, 0.0)])
        states = [{"mine": Own(group.rank, value).capture()} for value in (1.0, 2.0)]
        return [store.save(state, Progress(), facts=FACTS).result().name for state in states]

    older, newest = run_ranks(size, save)[0]
    flip(tmp_path / "checkpoints" / newest / "rank-00001.safetensors")  # rank 1's own: no other rank reads it

    def body(group: Group) -> tuple[StartKind, Any, float, str]:
        own = Own(group.rank, 0.0)
        _, started = begin(tmp_path, group, Program(group), parts=[own])
        return started.kind, started.checkpoint, float(own.tensor[0]) - group.rank, str(started.passed[0])

    ended = run_ranks(size, body)
    assert len(set(ended)) == 1
    kind, checkpoint, value, why = ended[0]
    assert (kind, checkpoint, value) == (StartKind.FALLEN_BACK, older, 1.0)
    assert why.startswith(f"{newest}: rank 1: ")
    assert "the file is damaged" in why


def test_a_rank_that_sees_another_folder_makes_no_difference_of_opinion(tmp_path: Path) -> None:
    """Storage that is not shared after all: every rank must come to the same end."""
    make_run(tmp_path / "0", 2)
    (tmp_path / "1").mkdir()

    def body(group: Group) -> str:
        with pytest.raises(Refused) as refused:
            begin(tmp_path / str(group.rank), group, Program(group))
        return str(refused.value)

    ended = run_ranks(2, body)
    assert ended[0] == ended[1].replace(f"{tmp_path}/1", f"{tmp_path}/0")
    assert "is the path on storage that all ranks share?" in ended[0]


def test_a_manifest_that_only_one_rank_finds_damaged_makes_no_difference_of_opinion(tmp_path: Path) -> None:
    names = make_run(tmp_path / "0", 2)
    run = tmp_path / "1"
    for name, data in tree(tmp_path / "0").items():
        target = run / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if data == b"/":
            target.mkdir(exist_ok=True)
        else:
            target.write_bytes(data)
    flip(run / "checkpoints" / names[1] / "manifest.json")

    def body(group: Group) -> tuple[Any, ...]:
        _, started = begin(tmp_path / str(group.rank), group, Program(group))
        return started.kind, started.checkpoint, started.passed

    ended = run_ranks(2, body)
    assert ended[0] == ended[1]
    assert ended[0][:2] == (StartKind.FALLEN_BACK, names[0])


def test_nothing_that_loads_is_refused_with_every_reason(tmp_path: Path) -> None:
    names = make_run(tmp_path)
    for name in names:
        flip(tmp_path / "checkpoints" / name / "rank-00000.json")
    with pytest.raises(Refused, match="none can be loaded") as refused:
        begin(tmp_path, Solo(), Program(Solo()))
    assert all(name in str(refused.value) for name in names)
    assert "start a new run at another path" in str(refused.value)


def test_another_run_is_refused_with_the_differences_and_nothing_touched(tmp_path: Path) -> None:
    make_run(tmp_path, 2)
    before = tree(tmp_path)
    other = {"model": {"weight": "float32[3, 8]"}, "user": {"lr": 0.2, "clip": 1.0}}

    def body(group: Group) -> str:
        with pytest.raises(Refused) as refused:
            begin(tmp_path, group, Program(group), identity=other)
        return str(refused.value)

    ended = run_ranks(2, body)
    assert ended[0] == ended[1]
    for part in (
        'model.weight: saved "float32[3, 7]", now "float32[3, 8]"',
        "user.clip: saved nothing, now 1.0",
        "user.lr: saved 0.1, now 0.2",
        "ways on:",
    ):
        assert part in ended[0]
    assert tree(tmp_path) == before


def test_control_the_comparison_of_trees_sees_a_touch(tmp_path: Path) -> None:
    make_run(tmp_path)
    before = tree(tmp_path)
    begin(tmp_path, Solo(), Program(Solo()))  # takes an attempt's number
    assert tree(tmp_path) != before


def test_a_long_list_of_differences_is_cut(tmp_path: Path) -> None:
    begin(tmp_path, Solo(), Program(Solo()), identity={f"k{i:02}": 0 for i in range(20)})
    with pytest.raises(Refused, match="and 8 more"):
        begin(tmp_path, Solo(), Program(Solo()), identity={f"k{i:02}": 1 for i in range(20)})


def test_ranks_of_different_programs_are_refused_before_anything_exists(tmp_path: Path) -> None:
    path = tmp_path / "run"

    def body(group: Group) -> str:
        identity = {**IDENTITY, "user": {"lr": 0.1 if group.rank != 1 else 0.3}}
        with pytest.raises(Refused) as refused:
            begin(path, group, Program(group), identity=identity)
        return str(refused.value)

    ended = run_ranks(3, body)
    assert len(set(ended)) == 1
    assert "ranks [1] were started with another" in ended[0]
    assert not path.exists()


def test_sound_bytes_that_do_not_fit_are_refused_not_fallen_back_from(tmp_path: Path) -> None:
    _, newest = make_run(tmp_path)
    with pytest.raises(Refused, match="is sound but does not fit this program") as refused:
        begin(tmp_path, Solo(), Program(Solo(), width=8))
    assert newest in str(refused.value)
    assert "weight" in str(refused.value)


def test_a_component_that_the_checkpoint_lacks_is_an_error_unless_waived(tmp_path: Path) -> None:
    make_run(tmp_path)
    program = Program(Solo())
    more = [*program.parts, Record("ema", lambda: {"new": 1}, lambda saved: None)]
    with pytest.raises(Refused, match=r"holds no ema; waive=\('ema',\) starts them fresh"):
        begin(tmp_path, Solo(), program, parts=more)
    _, started = begin(tmp_path, Solo(), program, parts=more, waive=["ema"])
    assert (started.kind, started.waived) == (StartKind.RESUMED, ("ema",))
    assert started.restored == ("weights", "loss", "mine")


def test_a_component_that_the_program_lacks_is_an_error_unless_waived(tmp_path: Path) -> None:
    make_run(tmp_path)
    program = Program(Solo())
    with pytest.raises(Refused, match=r"holds mine, which the program has not.*waive=\('mine',\)"):
        begin(tmp_path, Solo(), program, parts=program.parts[:2])
    _, started = begin(tmp_path, Solo(), program, parts=program.parts[:2], waive=["mine"])
    assert started.waived == ("mine",)
    assert program.holds(2.0)


def test_what_a_component_leaves_unread_is_an_error(tmp_path: Path) -> None:
    make_run(tmp_path)
    program = Program(Solo())
    program.own.restore = lambda source: None  # type: ignore[method-assign]
    with pytest.raises(Refused, match=r"2 entries of the checkpoint were restored nowhere: .*mine/t"):
        begin(tmp_path, Solo(), program)


def forget_moments(program: Program) -> list[Any]:
    optimizer = torch.optim.Adam(program.model.parameters())
    for parameter in program.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    memory = (OptimizerMemory({"o": optimizer}, {"m": program.model}, steps=steps) for steps in (False, True))
    return [*program.parts, *memory]


def test_a_waived_memory_is_zeros_of_the_saved_shapes(tmp_path: Path) -> None:
    parts = forget_moments(Program(Solo()))
    store, _ = begin(tmp_path, Solo(), Program(Solo()), parts=parts)
    store.save({p.name: p.capture() for p in parts}, Progress(), facts=FACTS).result()
    fresh = forget_moments(Program(Solo()))
    _, started = begin(tmp_path, Solo(), Program(Solo()), parts=fresh, waive=["moments"])
    assert started.waived == ("moments",)
    moments, steps = (part.capture().tensors for part in fresh[-2:])
    assert moments and all(not tensor.any() for tensor in moments.values())
    assert steps and all(tensor == 1 for tensor in steps.values())


@pytest.mark.parametrize(("saved", "live"), [(2, 1), (1, 3), (3, 2)])
def test_on_another_number_of_ranks_streams_are_derived_and_weights_are_the_same(
    tmp_path: Path, saved: int, live: int
) -> None:
    def parts(program: Program) -> list[Any]:
        return [*program.parts[:2], Rng()]

    def save(group: Group) -> None:
        program = Program(group, 4.0)
        store, _ = begin(tmp_path, group, program, parts=parts(program))
        store.save({p.name: p.capture() for p in parts(program)}, Progress(), facts=FACTS).result()

    def load(group: Group) -> tuple[bool, bool, int | None]:
        program = Program(group)
        mine = parts(program)
        _, started = begin(tmp_path, group, program, parts=mine)
        return program.holds(4.0), mine[-1].derived, started.saved_world_size

    with preserved_rng():
        run_ranks(saved, save)
        assert run_ranks(live, load) == [(True, True, saved)] * live


def test_state_of_each_rank_cannot_be_dealt_out_to_another_number(tmp_path: Path) -> None:
    make_run(tmp_path, 2)
    with pytest.raises(Refused, match="differs between the 2 ranks that saved it"):
        begin(tmp_path, Solo(), Program(Solo()))


def other_program(path: Path) -> None:
    (path / "run.json").write_text(json.dumps({"name": "another tool's"}))


def lost_record(path: Path) -> None:
    make_run(path)
    (path / "run.json").unlink()


def damaged_record(path: Path) -> None:
    make_run(path)
    flip(path / "run.json")


@pytest.mark.parametrize("prepare", [other_program, lost_record, damaged_record])
def test_a_path_that_cannot_be_read_as_a_run_is_refused_untouched(
    tmp_path: Path, prepare: Callable[[Path], None]
) -> None:
    prepare(tmp_path)
    before = tree(tmp_path)

    def body(group: Group) -> str:
        with pytest.raises(Refused, match="this path cannot be used for a run") as refused:
            begin(tmp_path, group, Program(group))
        return str(refused.value)

    assert len(set(run_ranks(2, body))) == 1
    assert tree(tmp_path) == before
