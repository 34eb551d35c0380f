"""Arithmetic before launch: reject what cannot work while it costs nothing.

Every question is a frozen request, every answer a frozen plan with units in its field names, a `SCHEMA`, and
`to_json` / `from_json` / `diff`. Pure Python: neither torch nor numpy is imported. Names load on first use.
"""

from __future__ import annotations

from samerun.core.lazy import lazy_names

__all__ = [
    "Activations", "Adapter", "Attention", "BatchPlan", "Change", "Clock", "CostPlan", "FailureRate", "Family",
    "GoodputPlan", "IntervalPlan", "Layout", "LayoutsPlan", "LayoutsRequest", "Lengths", "Loss", "MemoryPlan",
    "MemoryRequest", "Mesh", "Method", "Microbatch", "NoisePlan", "Optimizer", "ParameterCount", "Plan",
    "Precision", "PreemptPlan", "Quantization", "Recipe", "RecipePlan", "Recompute", "RunPlan", "Save",
    "Saving", "ScalingPlan", "Schedule", "SchedulePlan", "Shape", "Simulated", "Suggestion", "Tier", "Verdict",
    "count_parameters", "diff", "from_json", "gpt", "plan_batch", "plan_cost", "plan_goodput", "plan_interval",
    "plan_layouts", "plan_memory", "plan_noise", "plan_preempt", "plan_recipe", "plan_scaling", "plan_schedule",
    "rate_from_failures", "read_config", "replan", "shape_of_config", "shape_of_tensors", "simulate", "suggest",
    "to_json",
]  # fmt: skip

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Change": "record", "Plan": "record", "diff": "record", "from_json": "record", "to_json": "record",
        "Mesh": "mesh",
        "Family": "model.shape", "Shape": "model.shape", "gpt": "model.shape",
        "read_config": "model.hf_config", "shape_of_config": "model.hf_config",
        "shape_of_tensors": "model.tensor_shapes",
        "Activations": "memory.request", "Adapter": "memory.request", "Attention": "memory.request",
        "Layout": "memory.request", "Loss": "memory.request", "MemoryRequest": "memory.request",
        "Method": "memory.request", "Microbatch": "memory.request", "Optimizer": "memory.request",
        "Precision": "memory.request", "Quantization": "memory.request", "Recompute": "memory.request",
        "Save": "memory.request",
        "ParameterCount": "memory.counts", "count_parameters": "memory.counts",
        "MemoryPlan": "memory.plan", "Verdict": "memory.plan", "plan_memory": "memory.plan",
        "Suggestion": "memory.suggest", "suggest": "memory.suggest",
        "LayoutsPlan": "memory.layouts", "LayoutsRequest": "memory.layouts", "plan_layouts": "memory.layouts",
        "FailureRate": "availability.mtbf", "rate_from_failures": "availability.mtbf",
        "Saving": "availability.interval", "IntervalPlan": "availability.interval",
        "plan_interval": "availability.interval",
        "Tier": "availability.goodput", "GoodputPlan": "availability.goodput", "plan_goodput": "availability.goodput",
        "Simulated": "availability.simulation", "simulate": "availability.simulation",
        "PreemptPlan": "availability.deadline", "plan_preempt": "availability.deadline",
        "BatchPlan": "batch", "plan_batch": "batch", "Lengths": "batch",
        "Clock": "schedule", "Schedule": "schedule", "SchedulePlan": "schedule", "plan_schedule": "schedule",
        "ScalingPlan": "scaling", "plan_scaling": "scaling",
        "NoisePlan": "noise", "plan_noise": "noise",
        "CostPlan": "cost", "plan_cost": "cost",
        "Recipe": "recipe", "RecipePlan": "recipe", "plan_recipe": "recipe",
        "RunPlan": "run", "replan": "run",
    },
)  # fmt: skip
