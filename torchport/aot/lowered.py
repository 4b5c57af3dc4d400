"""A lowered program in memory: call it, look at it, save it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..backend.arrays import array_to_tensor
from ..backend.interface import Backend
from ..backend.registry import Registry
from ..core.errors import ErrorCode, MethodError, ProgramError
from ..core.specs import CompileSpecs, TensorSpec
from ..program import document as doc
from ..program.archive import ALIGNMENT
from ..program.loader import SegmentInfo
from ..program.method import Method
from ..program.package import Package
from ..program.program import Program
from .emit import Constants, file_spec
from .save import Saved, save_program

__all__ = ["Left", "LoweredProgram", "Piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One delegate before it was compiled."""

    backend: Backend
    specs: CompileSpecs
    graph: fx.GraphModule


@dataclass(frozen=True, slots=True)
class Left:
    """An operator that no backend took, and why."""

    op: str
    reason: str
    module: str
    source: str


class _Snapshot:
    """Values as they are now, each memory copied once: training on must change neither the program nor the file."""

    def __init__(self, constants: Constants) -> None:
        self.memory: dict[str, memoryview] = {}
        """The copies' bytes, by entry."""
        self._copies: dict[int, tuple[str, torch.UntypedStorage]] = {}
        self.constants = [self._constant(*one) for one in zip(constants.names, constants.tensors, strict=True)]

    def _copy(self, storage: torch.UntypedStorage) -> tuple[str, torch.UntypedStorage]:
        known = self._copies.get(storage.data_ptr())
        if known is None or not storage.nbytes():
            known = self._copies[storage.data_ptr()] = (f"memory/{len(self.memory)}", storage.clone())
            raw: Any = torch.empty(0, dtype=torch.uint8).set_(known[1])
            self.memory[known[0]] = memoryview(raw.numpy())
        return known

    def _constant(self, name: str, tensor: torch.Tensor) -> doc.Constant:
        entry, _ = self._copy(tensor.untyped_storage())
        offset = int(tensor.storage_offset()) * tensor.dtype.itemsize
        return doc.Constant(name, file_spec(TensorSpec.of(tensor)), entry, offset)

    def _frozen_tensor(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout is not torch.strided:
            return value
        if value.is_conj() or value.is_neg():
            return value.detach().clone()
        _, storage = self._copy(value.untyped_storage())
        shape, strides = tuple(value.shape), tuple(value.stride())
        copy = torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), shape, strides)
        return torch.nn.Parameter(copy, value.requires_grad) if isinstance(value, torch.nn.Parameter) else copy

    def frozen(self, exported: ExportedProgram) -> ExportedProgram:
        """The exported program with the copies for its weights."""
        return ExportedProgram(
            root=exported.graph_module,
            graph=exported.graph,
            graph_signature=exported.graph_signature,
            state_dict={name: self._frozen_tensor(value) for name, value in exported.state_dict.items()},
            range_constraints=exported.range_constraints,
            module_call_graph=exported.module_call_graph,
            example_inputs=exported.example_inputs,
            constants={name: self._frozen_tensor(value) for name, value in exported.constants.items()},
            verifiers=exported.verifiers,
        )


def _tensor(value: Any, output: doc.Output) -> Any:
    """An output as a tensor, if it is one."""
    if output.spec is None or isinstance(value, torch.Tensor):
        return value
    return array_to_tensor(value, getattr(torch, output.spec.dtype))


def _registry_of(backends: Iterable[Backend]) -> Registry:
    """The backends a program was lowered for, which need not be registered."""
    registry = Registry()
    for backend in backends:
        if backend.name not in registry.names():
            registry.register(backend)
    return registry


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _counts(rows: Sequence[Sequence[str]], left: Sequence[Left]) -> str:
    taken = sum(int(row[2]) for row in rows[1:])
    return f"{taken} operators in {len(rows) - 1} delegates, {len(left)} left"


class LoweredProgram:
    """What :func:`lower` made. Calling it runs the delegates, as the saved file does, in the model's own signature."""

    def __init__(
        self,
        *,
        document: doc.Document,
        debug: doc.DebugInfo,
        blobs: Mapping[str, bytes],
        constants: Constants,
        exported: Mapping[str, ExportedProgram],
        pieces: Mapping[str, Sequence[Piece]],
        left: Mapping[str, Sequence[Left]],
        graphs: Mapping[str, fx.GraphModule],
    ) -> None:
        snapshot = _Snapshot(constants)
        self._exported = {name: snapshot.frozen(program) for name, program in exported.items()}
        document.constants, self._memory = snapshot.constants, snapshot.memory
        entries: dict[str, bytes | memoryview] = {**blobs, **self._memory}
        document.digests = {name: (len(data), "") for name, data in entries.items()}
        self._document = document
        self._debug = debug
        self._blobs = dict(blobs)
        self.pieces = {name: tuple(found) for name, found in pieces.items()}
        """The delegates' graphs before they were compiled, with backend and specs, by method."""
        self.left = {name: tuple(found) for name, found in left.items()}
        """The operators that stayed, by method."""
        self._graphs = dict(graphs)
        self._methods: dict[str, Method] = {}

        def view(name: str, segment: SegmentInfo) -> memoryview:
            return memoryview(entries[name])

        def external(constant: doc.Constant) -> memoryview:
            raise ProgramError(f"constant {constant.name!r} is not in memory", code=ErrorCode.INTERNAL)

        package = Package(document, view, external, lambda: debug, sum(map(len, entries.values())))
        self.program = Program(package, _registry_of(piece.backend for found in pieces.values() for piece in found))
        """The program as :func:`torchport.runtime.load` would give it."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods' names; the first is what calling runs."""
        return self.program.methods

    # -- running ---------------------------------------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the first method, with the arguments and the result of the model that was lowered."""
        return self.run(self.methods[0], *args, **kwargs)

    def run(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a method. Raises as :class:`torchport.runtime.Method` does. Buffers keep their values between calls."""
        loaded = self._methods.get(method)
        if loaded is None:
            state = next((one.state for one in self._methods.values()), None)
            loaded = self._methods[method] = self.program.load_method(method, state=state)
        flat = self.flatten(method, args, kwargs)
        spec = self._exported[method].call_spec
        assert spec.out_spec is not None
        results = list(loaded(*flat))
        if not any(isinstance(value, torch.Tensor) for value in flat):  # the runtime cannot tell what is wanted
            outputs = self._document.methods[self._variants(method)[-1]].outputs
            results = [_tensor(value, output) for value, output in zip(results, outputs, strict=True)]
        return tree_unflatten(results, spec.out_spec)

    def flatten(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """A method's inputs in order, from the model's arguments. Raises :class:`MethodError` if they do not fit."""
        spec = self._exported[method].call_spec
        assert spec.in_spec is not None
        names = list(tree_unflatten(list(range(spec.in_spec.num_leaves)), spec.in_spec)[1])
        if set(kwargs) != set(names):
            raise MethodError(f"method {method!r} takes keyword arguments {names}, but got {sorted(kwargs)}")
        flat, given = tree_flatten((args, {name: kwargs[name] for name in names}))
        if given != spec.in_spec:
            raise MethodError(
                f"the arguments have another structure than when the model was exported: {given}, not {spec.in_spec}"
            )
        return flat

    def _named(self, method: str) -> str:
        """A method's name, the first by default. Raises :class:`MethodError` (``NOT_FOUND``)."""
        return self.program.meta(method or self.methods[0]).name

    def _variants(self, method: str) -> list[str]:
        """The methods of the document that a method is: itself, or its variants, the largest last."""
        dynamic = self._document.dynamic.get(method)
        if dynamic is None:
            return [method]
        return [
            doc.variant_name(method, sizes) for sizes in sorted(dynamic.variants, key=lambda one: (math.prod(one), one))
        ]

    # -- looking -----------------------------------------------------------------------------------------------------
    def _delegate_rows(self, method: str) -> list[list[str]]:
        rows = [["delegate", "backend", "operators", "inputs", "constants", "bytes"]]
        described = self._document.methods[method]
        for index, (piece, delegate) in enumerate(zip(self.pieces[method], described.delegates, strict=True)):
            ops = sum(node.op == "call_function" for node in piece.graph.graph.nodes)
            size = len(self._blobs[delegate.entry])
            given = len(delegate.inputs) - len(delegate.constants)
            rows.append(
                [f"#{index}", delegate.backend, str(ops), str(given), str(len(delegate.constants)), f"{size:,}"]
            )
        return rows

    def report(self) -> str:
        """What went to whom; what stayed, how often, why, and where the first comes from. As text.

        For a method with sizes that change: its variants, whether inputs are padded, and the rest of the largest one.
        """
        parts: list[str] = []
        for method in self.methods:
            *others, name = self._variants(method)
            left, rows = self.left[name], self._delegate_rows(name)
            parts.append(f"method {method}: {_counts(rows, left)}")
            if method in self._document.dynamic:
                parts.append(self._variants_report(method, [*others, name]))
            if self.pieces[name]:
                parts.append(_table(rows))
            if left:
                counts = Counter((one.op, one.reason) for one in left)
                first = {(one.op, one.reason): one for one in reversed(left)}
                table = [["left", "times", "module", "line", "reason"]]
                for (op, reason), count in counts.most_common():
                    one = first[op, reason]
                    table.append([op, str(count), one.module, one.source, reason])
                parts.append(_table(table))
        return "\n\n".join(parts)

    def _variants_report(self, method: str, names: Sequence[str]) -> str:
        dynamic = self._document.dynamic[method]
        ranges = ", ".join(f"{one.name}={one.least}..{one.most}" for one in dynamic.symbols)
        how = "inputs are padded up to a variant's" if dynamic.padded else f"inputs are not padded: {dynamic.reason}"
        rows = [["variant", "operators", "delegates", "left", "bytes"]]
        for name in names:
            table = self._delegate_rows(name)[1:]
            size = sum(len(self._blobs[one.entry]) for one in self._document.methods[name].delegates)
            ops = sum(int(row[2]) for row in table)
            rows.append([name, str(ops), str(len(table)), str(len(self.left[name])), f"{size:,}"])
        return f"sizes {ranges}; {how}\n{_table(rows)}"

    def graph_module(self, method: str = "") -> tuple[fx.GraphModule, ExportedProgram]:
        """The outer graph of a method, whose inputs are those of the exported program that is returned with it.

        Raises :class:`MethodError` for a method with sizes that change.
        """
        name = self._named(method)
        if name not in self._exported or name in self._document.dynamic:
            raise MethodError(
                f"method {name!r} has sizes that change, and each variant a graph of its own; lower the model for one "
                "set of shapes, without dynamic_shapes=",
                code=ErrorCode.NOT_SUPPORTED,
            )
        return self._graphs[name], self._exported[name]

    def graph(self, method: str = "") -> str:
        """The outer graph of a method, where each delegate is one call, and every delegate's graph. As text.

        Of a method with sizes that change, the graph of the largest variant; ``method`` may be a variant's name.
        """
        name = self._named(method)
        if name in self._document.dynamic:
            name = self._variants(name)[-1]
        parts = [f"method {name}", str(self._graphs[name].graph).strip()]
        for index, piece in enumerate(self.pieces[name]):
            parts += [f"\ndelegate_{index}: {piece.backend.name}", str(piece.graph.graph).strip()]
        return "\n".join(parts)

    # -- saving --------------------------------------------------------------------------------------------------------
    def save(
        self,
        path: str | os.PathLike[str],
        *,
        external_weights: str | os.PathLike[str] | None = None,
        alignment: int = ALIGNMENT,
        exported_model: bool | None = None,
    ) -> Saved:
        """Write the program as one ``.pt2`` file. All or nothing: a killed process leaves the old file or the new one.

        ``exported_model``: whether PyTorch's exported model is in the file as well, so that ``torch.export.load`` opens
        it. ``None``: yes, unless delegates' bytes hold weights (``Capabilities.embeds_constants``), which would be in
        the file twice.

        ``external_weights``: a ``.safetensors`` file for the weights, written if it does not exist; a plain name is one
        beside the program. If it exists, weights that are in it, by name or by value, are left out of the program:
        several programs share a checkpoint.
        ``alignment``: what delegates' bytes and weights are aligned to in the file, and (up to a page) in memory where
        it is mapped: a power of two from 64 to 32,768.
        Returns sizes. Raises :class:`ProgramError` where a file cannot be written.
        """
        if exported_model is None:
            pieces = [piece for found in self.pieces.values() for piece in found]
            exported_model = not any(piece.backend.capabilities.embeds_constants for piece in pieces)
        exported = self._exported if exported_model else {}
        return save_program(
            path, self._document, self._debug, exported, self._blobs, self._memory, external_weights, alignment
        )
