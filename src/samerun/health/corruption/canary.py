"""Tier 1: the same inputs through the same kernels, again and again, and against what this kind of device gave before.

A golden belongs to one key (device name, driver, torch, dtype, …): another key has no golden, and then only the
repetitions are compared. Torch is imported when a canary runs. Global generators and their state are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from samerun.core.canonical import canonical_bytes, sha256_hex
from samerun.errors import UsageError
from samerun.health.corruption.qualify import REPETITIONS, Qualification, qualify

if TYPE_CHECKING:
    import torch

SCHEMA: Final = "samerun.canary.v1"
_SIZE: Final = 192
_SEED: Final = 20240607

Kernel = Callable[["torch.Tensor"], "torch.Tensor"]


class Verdict(Enum):
    PASS = "pass"
    CORRUPT = "corrupt"
    """A repetition left the tolerance, or the result is not the golden one."""
    NOT_QUALIFIED = "not qualified"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One kernel under test. `reduction` is the length of its longest sum."""

    name: str
    run: Kernel
    reduction: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    name: str
    verdict: Verdict
    qualification: Qualification
    digest: str
    """sha256 of the first repetition's bytes."""
    worst_deviation: float
    had_golden: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "verdict": self.verdict.value,
            "tolerance": self.qualification.tolerance,
            "reason": self.qualification.reason,
            "digest": self.digest,
            "worst_deviation": self.worst_deviation,
            "had_golden": self.had_golden,
        }


def probes() -> list[Probe]:
    """A chain of GEMMs, attention, a long reduction, one AdamW update, a copy to the device and back."""
    return [
        Probe(name="gemm", run=_gemm, reduction=_SIZE),
        Probe(name="attention", run=_attention, reduction=_SIZE),
        Probe(name="reduction", run=_reduction, reduction=_SIZE * _SIZE),
        Probe(name="optimizer", run=_optimizer, reduction=1),
        Probe(name="copy", run=_copy, reduction=1),
    ]


def run_canary(
    device: str, *, dtype: str = "float32", golden: Mapping[str, str] | None = None, repetitions: int = REPETITIONS,
    among: list[Probe] | None = None,
) -> list[ProbeResult]:  # fmt: skip
    """Every probe `repetitions` times on `device`. `golden`: probe → digest that the same key gave before."""
    import torch

    where = torch.device(device)
    generator = torch.Generator().manual_seed(_SEED)
    given = torch.randn(_SIZE, _SIZE, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
    results = []
    for probe in among if among is not None else probes():
        outputs = [probe.run(given.to(where)).cpu() for _ in range(repetitions)]
        results.append(_judged(probe, outputs, dtype, (golden or {}).get(probe.name)))
    return results


def _judged(probe: Probe, outputs: list[torch.Tensor], dtype: str, golden: str | None) -> ProbeResult:
    first = outputs[0]
    digests = [_digest(output) for output in outputs]
    deviations = [
        0.0 if digest == digests[0] else _deviation(first, output)
        for digest, output in zip(digests[1:], outputs[1:], strict=True)
    ]
    accumulator = "float32" if dtype in ("float16", "bfloat16") else dtype
    qualification = qualify(deviations, reduction=probe.reduction, accumulator=accumulator, output=dtype)
    if not qualification.is_qualified:
        verdict = Verdict.NOT_QUALIFIED
    elif golden is not None and qualification.tolerance == 0 and golden != digests[0]:
        verdict = Verdict.CORRUPT
    else:
        verdict = Verdict.PASS
    return ProbeResult(
        name=probe.name,
        verdict=_minority_verdict(digests, verdict),
        qualification=qualification,
        digest=digests[0],
        worst_deviation=max(deviations, default=0.0),
        had_golden=golden is not None,
    )


def _minority_verdict(digests: list[str], verdict: Verdict) -> Verdict:
    """One or two odd ones among twenty equal repetitions are no rounding: a kernel that varies, varies more often."""
    most = max(digests.count(digest) for digest in set(digests))
    odd = len(digests) - most
    return Verdict.CORRUPT if 0 < odd <= len(digests) // 10 else verdict


def key_of(device: str, dtype: str) -> dict[str, str]:
    """What must be the same for two results to be the same bytes."""
    import platform

    import torch

    where = torch.device(device)
    key = {"dtype": dtype, "torch": torch.__version__, "threads": str(torch.get_num_threads())}
    if where.type == "cuda":
        key |= {
            "device": torch.cuda.get_device_name(where),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "tf32": str(torch.backends.cuda.matmul.allow_tf32),
        }
    else:
        key |= {"device": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"}
    return key


def read_golden(path: Path, key: Mapping[str, str]) -> dict[str, str] | None:
    """Probe → digest for exactly this key; None where the file or the key is not there. UsageError for another file."""
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text())
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']!r}")
        known: dict[str, dict[str, str]] = document["goldens"]
        return known.get(_key_text(key))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} holds no canary goldens ({error!r}); give --golden another path") from error


def write_golden(path: Path, key: Mapping[str, str], results: list[ProbeResult]) -> None:
    """Adds this key's digests of the probes that are qualified at tolerance 0 to the file."""
    document: dict[str, Any] = {"schema": SCHEMA, "goldens": {}}
    if path.exists():
        document = json.loads(path.read_text())
    exact = [r for r in results if r.verdict is Verdict.PASS and r.qualification.tolerance == 0]
    document["goldens"][_key_text(key)] = {result.name: result.digest for result in exact}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def _key_text(key: Mapping[str, str]) -> str:
    return canonical_bytes(dict(key)).decode().strip()


def _digest(tensor: torch.Tensor) -> str:
    import torch

    return sha256_hex(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _deviation(first: torch.Tensor, other: torch.Tensor) -> float:
    scale = first.double().abs().max().clamp_min(1e-300)
    return float(((first.double() - other.double()).abs() / scale).max())


def _gemm(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(4):
        y = (y @ x.T) / x.shape[0] ** 0.5
        y = y / y.abs().max()
    return y


def _attention(x: torch.Tensor) -> torch.Tensor:
    import torch

    heads = x.reshape(1, 4, x.shape[0], -1)
    return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)


def _reduction(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum().reshape(1)


def _optimizer(x: torch.Tensor) -> torch.Tensor:
    import torch

    weight = torch.nn.Parameter(x.clone())
    weight.grad = x.T.contiguous()
    torch.optim.AdamW([weight], lr=1e-3).step()
    return weight.detach()


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().to(x.device)
