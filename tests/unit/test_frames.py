"""Whose a frame is, and what is said of it; the one policy for operators that run on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torchport
from torchport.core import frames
from torchport.core.errors import UnsupportedOp
from torchport.core.fallback import check_fallback, note_fallback
from torchport.core.frames import is_users, user_frames, user_line, warn_user

TORCH = Path(torch.__file__).parent
OURS = Path(torchport.__file__).parent


@pytest.mark.parametrize(
    ("file", "users"),
    [
        (__file__, True),
        ("<stdin>", True),
        (f"{OURS}_of_mine/backend.py", True),
        (f"{TORCH}vision/ops.py", True),
        (f"{OURS}/backends/reference/__init__.py", False),
        (f"{TORCH}/nn/modules/linear.py", False),
        ("<torchport kernel aten.add.Tensor>", False),
        ("<eval_with_key>.3", False),
    ],
)
def test_whose_a_file_is(file: str, users: bool) -> None:
    assert is_users(file) is users


def test_the_running_line_and_a_warning_name_the_users_frame() -> None:
    assert "test_frames.py" in str(user_line())
    with pytest.warns(RuntimeWarning, match="slow") as caught:
        warn_user("slow", RuntimeWarning)
    assert caught[0].filename == __file__


def test_frames_of_a_stack_trace() -> None:
    trace = (
        f'  File "{__file__}", line 7, in forward\n    return self.act(\n        x)\n'
        f'  File "{TORCH}/nn/modules/linear.py", line 1, in forward\n    return F.linear()\n'
        '  File "model.py", line 9, in act'
    )
    first, last = user_frames(trace)
    assert (first.place, first.code) == (f"{__file__}:7 in forward", "return self.act( x)")
    assert (last.place, last.code) == ("model.py:9 in act", "")
    assert user_frames(None) == []


def test_the_fallback_policy() -> None:
    op = torch.ops.aten.sin.default
    torchport.metrics.reset()
    with torchport.config.override(fallback="allow"):
        check_fallback(op, None, "why")
        note_fallback(op, None, "why")
    with (
        torchport.config.override(fallback="warn"),
        pytest.warns(UserWarning, match="aten::sin runs on the host: why") as caught,
    ):
        note_fallback(op, "here", "why")
    assert caught[0].filename == __file__
    assert torchport.metrics.counter("Fallback") == torchport.metrics.counter("aten::sin") == 2
    with torchport.config.override(fallback="error"):
        for refuse in (check_fallback, note_fallback):
            with pytest.raises(UnsupportedOp, match=r"why\. Allow the host fallback") as refused:
                refuse(op, "here", "why")
            assert (refused.value.op, refused.value.source) == ("aten.sin.default", "here")
    assert torchport.metrics.counter("Fallback") == 2


def test_whose_code_a_file_is_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def is_users(file: str) -> bool:
        asked.append(file)
        return file == __file__

    monkeypatch.setattr(frames, "is_users", is_users)
    monkeypatch.setattr(frames, "_known", {})
    first, second = frames.user_line(), frames.user_line()
    assert first == second
    assert first is not None
    assert first.startswith(f"{__file__}:")
    assert asked == [__file__]
