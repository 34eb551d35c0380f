"""The digests that an index keeps of everything its rank held: each tensor is read once, when that costs least.

What the edge needs anyway (a rank's own tensors, seals) is noted there; what a copy was made of is digested from the
copy, in the background; the rest is read from live memory, at the latest moment that is still the edge's state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from samerun.checkpoint.tensors import Slices
from samerun.core.component import Captured
from samerun.state.fingerprint import plain_digests, tensor_digest


class Fingerprints:
    """Plain state is digested at once; tensors wait in `left` until they are taken or noted.

    A component with tensors in slices of its own kind has no digests, nor is anything read where they were `given`.
    """

    def __init__(self, state: Mapping[str, Captured], given: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self._found: dict[str, dict[str, str]] = {}
        self._left: dict[str, dict[str, torch.Tensor]] = {}
        for name, captured in state.items():
            tensors = {**captured.tensors, **captured.rank_tensors}
            if given is not None:
                self._found[name] = dict(given.get(name, {}))
            elif any(isinstance(tensor, Slices) for tensor in tensors.values()):
                self._found[name] = {}
            else:
                self._found[name] = plain_digests(captured.plain, taken=tensors)
                self._left[name] = tensors

    def note(self, component: str, key: str, digest: str) -> None:
        """The digest of a tensor that was read for another reason."""
        if self._left.get(component, {}).pop(key, None) is not None:
            self._found[component][key] = digest

    def wants(self, component: str, key: str) -> bool:
        return key in self._left.get(component, {})

    def take(self, components: Collection[str], *, but: Collection[tuple[str, str]] = ()) -> None:
        """Reads from live memory what is left of `components`, except (component, key) in `but`."""
        for component in components:
            for key, tensor in list(self._left.get(component, {}).items()):
                if (component, key) not in but:
                    self.note(component, key, tensor_digest(tensor))

    def take_on_host(self, components: Collection[str]) -> None:
        """As `take`, but what lives on a device gets none: fetching every replica for it would cost a save itself."""
        for component in components:
            left = self._left.get(component, {})
            for key in [key for key, tensor in left.items() if tensor.device.type != "cpu"]:
                del left[key]
        self.take(components)

    def all(self) -> dict[str, dict[str, str]]:
        """Everything; reads what is still left."""
        self.take(list(self._left))
        return self._found
