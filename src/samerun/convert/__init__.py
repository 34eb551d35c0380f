"""From other formats to ckpt.v1 and back, running no code of the files: import, read, export.

An import is a beginning (warm start), an export is for use; neither is a run that can be resumed, and both say so.
"""

from __future__ import annotations

from samerun.core.lazy import lazy_names

__all__ = ["Foreign", "Form", "export", "import_checkpoint", "read"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Foreign": "sources",
        "Form": "exporting",
        "export": "exporting",
        "import_checkpoint": "importing",
        "read": "sources",
    },
)
