"""What a job of the demo is: a program that takes a device, and what it hands back to be compared."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias

import torch

__all__ = ["JOBS", "DemoJob", "Outcome", "Steps", "load_job"]


@dataclass(frozen=True)
class Outcome:
    """What a job computed: ``values`` to compare between devices, and what to show a person."""

    values: torch.Tensor
    result: str
    passed: bool = True
    tables: tuple[tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...]], ...] = ()
    """Title, column names, rows."""
    text: str = ""


Steps: TypeAlias = Generator[str, None, Outcome]
"""A running job: yields after every step what a progress bar may say about it, and returns its outcome."""


@dataclass(frozen=True)
class DemoJob:
    """A program and how long it runs; ``run(device, steps)`` is plain PyTorch and knows nothing of torchport."""

    title: str
    short: str
    run: Callable[[str, int], Steps]
    steps: int
    quick_steps: int


JOBS = ("minilm", "digits", "gpt2")


def load_job(name: str) -> DemoJob:
    """The job of that name; imports what it needs (transformers, scikit-learn, …)."""
    return importlib.import_module(f".{name}", __package__).JOB
