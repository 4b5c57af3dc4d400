"""Real English that every Python carries: the language reference behind ``help()``."""

from __future__ import annotations

import re
from functools import cache

__all__ = ["paragraphs", "sentences"]

_BLOCK = re.compile(r"\n\s*\n")
_SENTENCE = re.compile(r"(?<=[a-z)\"][.?!]) +(?=[A-Z])")


@cache
def paragraphs() -> tuple[str, ...]:
    """The paragraphs of prose, each on one line, without grammar, code and headings; none twice."""
    from pydoc_data.topics import topics

    found: dict[str, None] = {}
    for _, text in sorted(topics.items()):
        for block in _BLOCK.split(text):
            prose = not block.startswith((" ", "*", "-", ".", "\t")) and len(block) > 80 and "::=" not in block
            if prose and "===" not in block and "---" not in block:
                found[" ".join(block.split())] = None
    return tuple(found)


@cache
def sentences(shortest: int = 50, longest: int = 140) -> tuple[str, ...]:
    """The sentences between two lengths, in order; none twice."""
    found = (sentence for paragraph in paragraphs() for sentence in _SENTENCE.split(paragraph))
    plain = (s for s in found if shortest <= len(s) <= longest and s[0].isupper() and s.endswith((".", "?")))
    return tuple(dict.fromkeys(plain))
