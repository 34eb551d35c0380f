"""The page about the format shows code that works and schema words that are real."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from golden.make_golden import BY_TWO, HERE
from samerun.format import schema

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def test_the_reader_on_the_page_reads_the_golden_checkpoint() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    path = str(HERE / "sound" / "checkpoints" / BY_TWO)
    names: dict[str, Any] = {}
    exec(code.group(1).replace("RUN/checkpoints/NAME", path), names)
    assert names["parts"]["weights/sharded@0,0"] == [4, 5]
    assert names["parts"]["weights/sharded@4,0"] == [3, 5]


def test_every_schema_word_and_manifest_field_is_on_the_page() -> None:
    words = [value for name, value in vars(schema).items() if name.endswith("_SCHEMA")]
    fields = [*schema.Manifest.__struct_fields__, *schema.Index.__struct_fields__]
    for word in [*words, *fields]:
        assert f"`{word}`" in PAGE or f"{word}" in re.findall(r"[a-z_0-9.]+", PAGE), word
