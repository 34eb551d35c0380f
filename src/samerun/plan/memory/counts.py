"""Parameters on one rank of one pipeline stage, by how they are stored and trained.

Tensor parallelism divides matrices and the embedding; norms and biases are counted as replicated. Without a shape the
parameters are split evenly, and an upper bound is unknown when there is more than one tensor or pipeline rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from samerun.plan.memory.request import Adapter, MemoryRequest, Method
from samerun.plan.mesh import Mesh
from samerun.plan.model.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """Numbers of parameters on one rank before ZeRO shards them."""

    num_matrix: int
    """Of the blocks' linear layers: what QLoRA quantizes."""
    num_other: int
    """Embedding, head, norms, biases."""
    num_adapter: int
    num_block: int
    """Of one block: the group that FSDP gathers at a time; 0 when unknown."""
    largest_matrix: int
    num_layers: int
    is_certain: bool
    """Whether the split over ranks is known."""

    @property
    def num_base(self) -> int:
        return self.num_matrix + self.num_other


def rank_counts(request: MemoryRequest, *, is_last_stage: bool) -> RankCounts:
    """The counts of a rank on the first or last pipeline stage (the same one when there is one stage)."""
    mesh, shape = request.layout.mesh, request.shape
    if shape is None:
        split = mesh.num_tensor * mesh.num_pipeline
        return RankCounts(
            num_matrix=math.ceil(request.num_base_params / split), num_other=0, num_adapter=0, num_block=0,
            largest_matrix=0, num_layers=0, is_certain=split == 1,
        )  # fmt: skip
    tensor = mesh.num_tensor
    layers = math.ceil(shape.num_layers / mesh.num_pipeline)
    matrix = sum(rows * columns for rows, columns in _local_matrices(shape, mesh))
    other = layers * shape.num_vector_params
    is_only = mesh.num_pipeline == 1
    if is_only or not is_last_stage:
        other += math.ceil(shape.vocab_size / tensor) * shape.hidden_size + shape.max_positions * shape.hidden_size
    if is_only:
        other += shape.num_final_norm_params + math.ceil(shape.num_head_params / tensor)
    elif is_last_stage:  # a tied head across stages is a second copy of the embedding
        other += shape.num_final_norm_params + math.ceil(shape.vocab_size / tensor) * shape.hidden_size
    return RankCounts(
        num_matrix=layers * matrix,
        num_other=other,
        num_adapter=layers * _adapter_params(shape, request.adapter, tensor)
        if request.method is not Method.FULL
        else 0,
        num_block=matrix + shape.num_vector_params,
        largest_matrix=max(rows * columns for rows, columns in _local_matrices(shape, mesh)),
        num_layers=layers,
        is_certain=True,
    )


def _local_matrices(shape: Shape, mesh: Mesh) -> list[tuple[int, int]]:
    """Each matrix divided over the tensor ranks; fewer key-value heads than ranks are replicated."""
    tensor = mesh.num_tensor
    kv_tensor = min(tensor, shape.num_kv_heads)
    kv = {1, 2}  # positions of the key and value matrices
    return [
        (rows, math.ceil(columns / (kv_tensor if place in kv else tensor)))
        for place, (rows, columns) in enumerate(shape.matrices)
    ]


def adapted_matrices(shape: Shape, adapter: Adapter) -> tuple[tuple[int, int], ...]:
    """(in, out) of the linear layers of one block that carry an adapter."""
    return shape.matrices[:4] if adapter.is_attention_only else shape.matrices


def _adapter_params(shape: Shape, adapter: Adapter, tensor: int) -> int:
    """r(in + out) for each adapted matrix; one of the two factors follows the matrix's tensor split."""
    return sum(
        adapter.rank * (rows + math.ceil(columns / tensor)) for rows, columns in adapted_matrices(shape, adapter)
    )


class _Parameter(Protocol):
    """What is read of a live model's parameter, also on the meta device."""

    requires_grad: bool

    def numel(self) -> int: ...

    def element_size(self) -> int: ...


class _Model(Protocol):
    def named_parameters(self) -> Iterable[tuple[str, Any]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """What a live model's parameters amount to; tied weights count once."""

    num_params: int
    num_trainable: int
    param_bytes: int
    largest_name: str
    num_largest: int


def count_parameters(model: _Model) -> ParameterCount:
    """Counts a model (a torch module, on the meta device too) through `named_parameters`; nothing is imported.

    Use the result as `MemoryRequest(num_params=count.num_params)`. Buffers are not counted.
    """
    total = trainable = size = 0
    largest: tuple[int, str] = (0, "")
    for name, parameter in model.named_parameters():
        number: _Parameter = parameter
        total += number.numel()
        trainable += number.numel() if number.requires_grad else 0
        size += number.numel() * number.element_size()
        largest = max(largest, (number.numel(), name))
    return ParameterCount(
        num_params=total, num_trainable=trainable, param_bytes=size, largest_name=largest[1], num_largest=largest[0]
    )
