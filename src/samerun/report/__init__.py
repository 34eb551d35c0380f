"""One page about a run: what was trained, in which attempts, what was saved, what was noticed. Loads without torch."""

from __future__ import annotations
