"""Tier 2: a forward of this window once more, before the step changes the weights, here and on the peers.

Every so many windows the last microbatch's forward runs again from the same inputs, random streams and buffers, and its
outputs must be the same bytes. Then one rank's microbatch (another one each time) is computed by all of them. Digests
are the checksums of tier 0 over every tensor of the output. What it cannot see: backward and the optimizer, which need
the loop's own loss function; and what comes and goes between two looks.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from samerun.health.corruption.checksum import checksum

if TYPE_CHECKING:
    import torch
    from torch import nn

MAX_SENT_BYTES: Final = 16 << 20
"""Inputs larger than this are not sent to peers: the look then ends with the rank itself."""

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One forward: what went in, and in which state."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    streams: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


class Replayer:
    """`begin` a window that is to be looked at, `again` before its step, `end`. Hooks exist in between only."""

    def __init__(self, models: Mapping[str, nn.Module], autocast: Autocast) -> None:
        self._called = dict(models)
        self._bare = {name: _without_ddp(model) for name, model in models.items()}
        self._autocast = autocast
        self._handles: list[Any] = []
        self._entered: Call | None = None
        self._is_replaying = False
        self.call: Call | None = None
        """The last forward of the open window."""
        self.digest = ""
        """Of what it gave."""
        self.problem: Exception | None = None
        """What went wrong in a hook, where the training must go on."""

    def begin(self) -> None:
        self.end()
        for name, model in self._called.items():
            self._handles.append(model.register_forward_pre_hook(_Enter(self, name), with_kwargs=True))
            self._handles.append(model.register_forward_hook(_Leave(self)))

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._entered = self.call = None
        self.digest = ""

    def again(self, call: Call) -> str:
        """The digest of `call`, computed here and now. Leaves streams, buffers and gradients as they are."""
        return digest_of(self._run(call))

    def is_bad(self, call: Call) -> bool:
        """Whether `call`, computed here and now, gives a number that is not finite."""
        import torch
        from torch.utils._pytree import tree_leaves

        floats = [leaf for leaf in tree_leaves(self._run(call)) if isinstance(leaf, torch.Tensor)]
        return not all(bool(torch.isfinite(leaf).all()) for leaf in floats)

    def call_of(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """A forward that was kept elsewhere, in the streams and buffers of now."""
        name = next(name for name, bare in self._bare.items() if bare is model or _inside(bare) is model)
        return Call(name=name, args=args, kwargs=kwargs, streams=_streams(), buffers={})

    def _run(self, call: Call) -> Any:
        import torch

        from samerun.state.rng import preserved_rng

        self._is_replaying = True  # hooks see this forward, too, where the loop calls the same model
        try:
            with preserved_rng(), self._in_state_of(call), torch.enable_grad(), self._autocast():
                return self._bare[call.name](*call.args, **call.kwargs)
        finally:
            self._is_replaying = False

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        if torch.is_grad_enabled() and self.problem is None and not self._is_replaying:
            buffers = {key: buffer.detach().clone() for key, buffer in self._bare[name].named_buffers()}
            self._entered = Call(name=name, args=args, kwargs=kwargs, streams=_streams(), buffers=buffers)

    def leave(self, output: Any) -> None:
        if self._entered is None:
            return
        self.call, self._entered = self._entered, None
        try:
            self.digest = digest_of(output)
        except Exception as error:  # noqa: BLE001  # raised where it is named and switched off, not in the forward
            self.problem, self.call = error, None

    def raise_problem(self) -> None:
        if self.problem is not None:
            raise self.problem

    @contextlib.contextmanager
    def _in_state_of(self, call: Call) -> Iterator[None]:
        import torch

        buffers = dict(self._bare[call.name].named_buffers())
        kept = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        _set_streams(call.streams)
        try:
            with torch.no_grad():
                for name, value in call.buffers.items():
                    buffers[name].copy_(value)
            yield
        finally:
            with torch.no_grad():
                for name, value in kept.items():
                    buffers[name].copy_(value)

    def __deepcopy__(self, _: Any) -> Replayer:
        return self


def digest_of(output: Any) -> str:
    """Of every tensor in a model's output, in the order of its tree."""
    import torch
    from torch.utils._pytree import tree_leaves

    sums = [checksum(leaf) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return "-".join(f"{total:016x}{weighted:016x}" for total, weighted in sums)


def packed(call: Call) -> dict[str, Any] | None:
    """A call as JSON, to be computed by a peer; None where it is too large or holds what JSON cannot say."""
    try:
        document = {
            "name": call.name,
            "args": _packed(list(call.args)),
            "kwargs": _packed(dict(call.kwargs)),
            "streams": _packed(dict(call.streams)),
        }
    except TypeError:
        return None
    return document if _num_bytes(document) <= MAX_SENT_BYTES else None


def unpacked(document: Mapping[str, Any], own: Replayer, device: torch.device) -> Call:
    """A peer's call in the buffers of this rank, which DDP keeps like the peer's."""
    buffers = {} if own.call is None else own.call.buffers
    streams = {name: tensor.cpu() for name, tensor in _unpacked(document["streams"], device).items()}
    return Call(
        name=document["name"],
        args=tuple(_unpacked(document["args"], device)),
        kwargs=_unpacked(document["kwargs"], device),
        streams=streams,
        buffers=buffers,
    )


def _packed(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {
            "$tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), base64.b64encode(data).decode()]
        }
    if isinstance(value, tuple) and type(value) is tuple:
        return {"$tuple": [_packed(item) for item in value]}
    if isinstance(value, list):
        return [_packed(item) for item in value]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"$dict": {key: _packed(item) for key, item in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} is not sent to peers")


def _unpacked(value: Any, device: torch.device) -> Any:
    import torch

    if isinstance(value, list):
        return [_unpacked(item, device) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "$tensor":
        dtype, shape, text = inner
        as_dtype = getattr(torch, dtype)
        if not text:
            return torch.empty(shape, dtype=as_dtype, device=device)
        data = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        return data.view(as_dtype).reshape(shape).to(device)
    if kind == "$tuple":
        return tuple(_unpacked(item, device) for item in inner)
    return {key: _unpacked(item, device) for key, item in inner.items()}


def _num_bytes(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_num_bytes(item) for item in value.values())
    if isinstance(value, list):
        return sum(_num_bytes(item) for item in value)
    return len(value) if isinstance(value, str) else 8


def _streams() -> dict[str, torch.Tensor]:
    import torch

    streams = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        streams["cuda"] = torch.cuda.get_rng_state()
    return streams


def _set_streams(streams: Mapping[str, torch.Tensor]) -> None:
    import torch

    torch.set_rng_state(streams["cpu"])
    if "cuda" in streams:
        torch.cuda.set_rng_state(streams["cuda"])


def _without_ddp(model: nn.Module) -> nn.Module:
    """What DDP wraps, which may be compiled, as DDP itself may: DDP's own forward holds collectives."""
    inside = _inside(model)
    inner = getattr(inside, "module", None) if type(inside).__name__ == "DistributedDataParallel" else None
    return model if inner is None else inner


def _inside(model: nn.Module) -> nn.Module:
    """What torch.compile wraps."""
    original: nn.Module = getattr(model, "_orig_mod", model)
    return original


class _Enter:
    def __init__(self, owner: Replayer, name: str) -> None:
        self._owner = owner
        self._name = name

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._owner.enter(self._name, args, kwargs)

    def __deepcopy__(self, _: Any) -> _Enter:
        return self


class _Leave:
    def __init__(self, owner: Replayer) -> None:
        self._owner = owner

    def __call__(self, _: nn.Module, args: Any, output: Any) -> None:
        self._owner.leave(output)

    def __deepcopy__(self, _: Any) -> _Leave:
        return self
