"""The page's examples run as written."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from torchport import dispatch

PAGE = Path(__file__).parents[3] / "docs" / "dispatch.md"


def test_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 5
    namespace: dict[str, Any] = {}
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            for block in blocks:
                exec(compile(block, str(PAGE), "exec"), namespace)
    finally:
        engine = dispatch.backends.get_optional("demo.engine")
        if engine is not None:
            dispatch.backends.unregister(engine)
    assert "no kernel for demo::mul at CPU" in printed.getvalue()
    assert "aten::add.Tensor" in printed.getvalue()


def test_every_rule_is_on_the_page() -> None:
    from torchport.dispatch.rules import MISSING_RULE, RULES

    numbered = re.findall(r"^\d+\. .*?(?=^\d+\. |^$)", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    named = [match[1] for text in numbered if (match := re.search(r"\[([a-z ]+)\]", text))]
    assert named == [rule.provenance for rule in (*RULES, MISSING_RULE)]
