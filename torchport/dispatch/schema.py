"""Operator schemas: ``namespace::name.overload(Tensor self, int dim=-1, *, Tensor(a!) out) -> Tensor(a!)``.

Reads the grammar of PyTorch's ``native_functions.yaml`` (``aten/src/ATen/native/README.md``) as far as dispatch needs
it: argument names, kinds and defaults, and which arguments carry tensors.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torchport.core.errors import DispatchError

__all__ = ["MISSING", "Argument", "Schema", "check_arity", "operator_name", "parse_schema"]

_TYPE_NAMES = (
    "Tensor int SymInt float SymFloat bool SymBool complex Scalar number str Device Layout ScalarType MemoryFormat "
    "Generator Dimname DimnameList Storage Stream QScheme Any NoneType None DispatchKeySet AnyEnumType Capsule "
    "PyObject AnyClassType AnyListType AnyTupleType DeviceIndex"
)
_TYPES = frozenset(_TYPE_NAMES.split())
_NAME = re.compile(r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)+(?:\.[A-Za-z_]\w*)?")
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<number>-?(?:\d+\.\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|\d+(?:[eE][-+]?\d+)?)j?)
      | (?P<word>-?[A-Za-z_]\w*(?:(?:::|\.)[A-Za-z_]\w*)*)
      | (?P<mark>->|\.\.\.|[()\[\]?,=*!|])
    )""",
    re.VERBOSE,
)

MISSING: Final = object()
"""Stands for "no default", and for a default that only PyTorch can evaluate (a memory format)."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: its type as written, and what dispatch needs to know of it."""

    name: str
    type: str
    kwarg_only: bool
    has_default: bool
    default: object = MISSING
    """The default's value; MISSING when there is none or it is a PyTorch constant."""

    @property
    def carries_tensors(self) -> bool:
        """Whether the argument takes part in dispatch: Tensor, Tensor?, Tensor[] and Tensor?[]."""
        return re.sub(r"\(.*?\)", "", self.type) in _DISPATCH_TYPES


_DISPATCH_TYPES = frozenset({"Tensor", "Tensor?", "Tensor[]", "Tensor?[]"})


@dataclass(frozen=True, slots=True)
class Schema:
    """A parsed schema."""

    text: str
    name: str
    """``namespace::name.overload``; no dot when there is no overload."""
    arguments: tuple[Argument, ...]
    returns: tuple[str, ...]
    varargs: bool = False
    positional: tuple[Argument, ...] = field(init=False)
    keyword_only: tuple[Argument, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "positional", tuple(a for a in self.arguments if not a.kwarg_only))
        object.__setattr__(self, "keyword_only", tuple(a for a in self.arguments if a.kwarg_only))

    def __str__(self) -> str:
        return self.text

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments in the schema's form: positional ones by position, the rest by name. Misfits: ``DispatchError``.

        A gap before a positional argument given by name is filled with its default; where that is a PyTorch constant,
        what follows stays by name.
        """
        if self.varargs:
            return tuple(args), dict(kwargs)
        if len(args) > len(self.positional):
            raise DispatchError(
                f"{self.name} takes {len(self.positional)} positional arguments, got {len(args)}\n  {self}"
            )
        rest = dict(kwargs)
        bound = list(args)
        named: dict[str, Any] = {}
        for argument, _ in zip(self.positional, args, strict=False):
            if argument.name in rest:
                raise DispatchError(f"{self.name} got argument {argument.name!r} twice\n  {self}")
        for argument in self.positional[len(args) :]:
            if not rest:
                if not argument.has_default:
                    raise DispatchError(f"{self.name} needs argument {argument.name!r}\n  {self}")
                continue
            value = rest.pop(argument.name, MISSING)
            if value is MISSING:
                if not argument.has_default:
                    raise DispatchError(f"{self.name} needs argument {argument.name!r}\n  {self}")
                value = argument.default if any(a.name in rest for a in self.positional) else MISSING
            if value is not MISSING and len(bound) == self.positional.index(argument):
                bound.append(value)
            elif value is not MISSING:
                named[argument.name] = value
        for argument in self.keyword_only:
            if argument.name in rest:
                named[argument.name] = rest.pop(argument.name)
            elif not argument.has_default:
                raise DispatchError(f"{self.name} needs keyword argument {argument.name!r}\n  {self}")
        if rest:
            raise DispatchError(f"{self.name} has no argument {', '.join(map(repr, rest))}\n  {self}")
        return tuple(bound), named


class _Parser:
    """Recursive descent over the tokens of one schema."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str]] = []
        self.at = 0

    def fail(self, why: str) -> DispatchError:
        return DispatchError(
            f"malformed schema: {why}\n  {self.text}\n"
            "  write it as 'namespace::name.overload(Tensor self, int dim=-1, *, bool flag=False) -> Tensor'"
        )

    def tokenize(self, text: str) -> None:
        at = 0
        while text[at:].strip():
            found = _TOKEN.match(text, at)
            if found is None:
                raise self.fail(f"unexpected {text[at:].strip()[:10]!r}")
            self.tokens.append((str(found.lastgroup), found[str(found.lastgroup)]))
            at = found.end()
        self.tokens.append(("end", ""))

    @property
    def token(self) -> str:
        kind, text = self.tokens[self.at]
        return text if kind != "string" else ""

    def take(self, mark: str) -> bool:
        if self.token == mark:
            self.at += 1
            return True
        return False

    def need(self, mark: str) -> None:
        if not self.take(mark):
            raise self.fail(f"expected {mark!r}, found {self.tokens[self.at][1] or 'the end'!r}")

    def word(self, what: str) -> str:
        kind, text = self.tokens[self.at]
        if kind != "word":
            raise self.fail(f"expected {what}, found {text or 'the end'!r}")
        self.at += 1
        return text

    def parse(self) -> Schema:
        found = re.match(r"\s*([^\s(]*)\s*(?=\()", self.text)
        if found is None or not _NAME.fullmatch(found[1]):
            raise self.fail("it must begin with 'namespace::name(' or 'namespace::name.overload('")
        self.tokenize(self.text[found.end() :])
        self.need("(")
        arguments, varargs = self.arguments()
        self.need("->")
        returns = self.returns()
        if self.tokens[self.at][0] != "end":
            raise self.fail(f"unexpected {self.token!r} after the return type")
        return Schema(self.text.strip(), found[1], tuple(arguments), tuple(returns), varargs)

    def arguments(self) -> tuple[list[Argument], bool]:
        arguments: list[Argument] = []
        kwarg_only = varargs = False
        while not self.take(")"):
            if arguments or kwarg_only or varargs:
                self.need(",")
            if self.take("..."):
                varargs = True
            elif self.take("*"):
                if kwarg_only:
                    raise self.fail("more than one '*'")
                kwarg_only = True
            else:
                arguments.append(self.argument(kwarg_only))
        names = [argument.name for argument in arguments]
        for name in names:
            if names.count(name) > 1:
                raise self.fail(f"argument {name!r} is named twice")
        return arguments, varargs

    def argument(self, kwarg_only: bool) -> Argument:
        type_text = self.type()
        name = self.word("an argument name")
        if not self.take("="):
            return Argument(name, type_text, kwarg_only, has_default=False)
        default = self.literal()
        sized = re.search(r"\[(\d+)\]\??$", type_text)
        if sized and isinstance(default, (int, float)):
            default = [default] * int(sized[1])  # int[2] padding=0 means [0, 0]
        return Argument(name, type_text, kwarg_only, has_default=True, default=default)

    def returns(self) -> list[str]:
        if not self.take("("):
            return [self.one_return()]
        found: list[str] = []
        while not self.take(")"):
            if found:
                self.need(",")
            found.append(self.one_return())
        return found

    def one_return(self) -> str:
        if self.take("..."):
            return "..."
        found = self.type()
        if self.tokens[self.at][0] == "word":
            self.at += 1  # a return may have a name
        return found

    def type(self) -> str:
        if self.take("("):
            inner = self.type_list(")")
            text = f"({', '.join(inner)})"
        else:
            text = self.base_type()
        while True:
            if self.take("["):
                size = ""
                if self.tokens[self.at][0] == "number":
                    size = self.token
                    self.at += 1
                self.need("]")
                text += f"[{size}]"
            elif self.take("?"):
                text += "?"
            elif self.token == "(":
                text += self.alias_mark()
            else:
                return text

    def base_type(self) -> str:
        name = self.word("a type")
        known = name in _TYPES or "." in name or name[0].islower()
        if name in ("Dict", "Future", "RRef", "Await", "Union", "Optional", "List"):
            self.need("(")
            return f"{name}({', '.join(self.type_list(')'))})"
        if not known:
            raise self.fail(f"unknown type {name!r}")
        return name

    def type_list(self, end: str) -> list[str]:
        found: list[str] = []
        while not self.take(end):
            if found:
                self.need(",")
            found.append(self.type())
        return found

    def alias_mark(self) -> str:
        """``(a)``, ``(a!)``, ``(a|b)``, ``(a -> *)``: kept as written."""
        start = self.at
        self.need("(")
        while self.token not in (")", ""):
            if self.tokens[self.at][0] == "mark" and self.token not in ("!", "|", "->", "*"):
                raise self.fail(f"unexpected {self.token!r} in an alias annotation")
            self.at += 1
        self.need(")")
        return "".join(text for _, text in self.tokens[start : self.at])

    def literal(self) -> object:
        kind, text = self.tokens[self.at]
        if kind in ("number", "string"):
            self.at += 1
            return ast.literal_eval(text)
        if kind == "word":
            self.at += 1
            known: dict[str, object] = {"None": None, "True": True, "False": False}
            return known.get(text, MISSING)
        self.need("[")
        items: list[object] = []
        while not self.take("]"):
            if items:
                self.need(",")
            items.append(self.literal())
        return MISSING if any(item is MISSING for item in items) else items


def parse_schema(text: str) -> Schema:
    """Parse one schema. Malformed text: ``DispatchError`` that says where."""
    return _Parser(text).parse()


def operator_name(text: str) -> str:
    """Check ``namespace::name`` or ``namespace::name.overload``; ``.default`` is dropped, as in PyTorch's own names."""
    if not _NAME.fullmatch(text):
        raise DispatchError(f"operator name {text!r}: write 'namespace::name' or 'namespace::name.overload'")
    return text.removesuffix(".default")


def check_arity(schema: Schema, function: Callable[..., Any], leading: int, what: str) -> None:
    """``DispatchError`` unless ``function`` takes every call the schema allows, after ``leading`` arguments of ours.

    Both extremes are tried: only the required arguments, and all of them. Functions without a signature pass.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    extra = (None,) * leading
    required = tuple(a for a in schema.positional if not a.has_default)
    for positional, by_name in (
        (required, [a for a in schema.keyword_only if not a.has_default]),
        (schema.positional, list(schema.keyword_only)),
    ):
        try:
            signature.bind(*extra, *positional, **{a.name: a for a in by_name})
        except TypeError as error:
            before = "(the key set first) " if leading else ""
            raise DispatchError(
                f"{what}: the kernel's signature {signature} does not take the schema's arguments {before}: {error}\n"
                f"  {schema}\n  arguments with a default in the schema may be left out of a call: give them one too"
            ) from None
