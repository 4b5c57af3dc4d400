"""The ``torchport`` command. Thin: parses, calls, prints; each subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import __version__
from .cache import command as cache
from .core.errors import TorchportError

__all__ = ["main"]


class _UsageError(Exception):
    """The command line is wrong; the text says how."""


class _CommandLine(argparse.ArgumentParser):
    """Reports a wrong command line as an exception, so that every error leaves the same way."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: Any = None) -> None:
        out = file if file is not None else sys.stderr
        if message and out is not None:  # pyright: ignore[reportUnnecessaryComparison]
            out.write(message)  # argparse's own would not say that nothing could be written


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parser() -> argparse.ArgumentParser:
    parser = _CommandLine(prog="torchport", description="PyTorch programs on backends written in Python.")
    parser.add_argument("--version", action="version", version=f"torchport {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="three real models on the port device, compared with CPU eager")
    demo.add_argument("--backends", type=_names, metavar="A,B", help="default: every installed one that runs here")
    demo.add_argument("--only", choices=("minilm", "digits", "gpt2"), help="one job instead of all three")
    demo.add_argument("--quick", action="store_true", help="fewer steps and smaller models: a look, not a result")
    demo.add_argument("--steps", type=_positive, metavar="N", help="training steps of each job, instead of its own")
    demo.set_defaults(run=_demo)

    backends = commands.add_parser("backends", help="which backends are installed, and why one cannot run")
    backends.set_defaults(run=_backends)

    doctor = commands.add_parser(
        "doctor", help="versions, backends, compilers, and what other libraries have to be told"
    )
    doctor.set_defaults(run=_doctor)

    inspect = commands.add_parser("inspect", help="what is in a program file: methods, delegates, sizes, versions")
    inspect.add_argument("file", metavar="FILE.pt2")
    inspect.add_argument("--header", action="store_true", help="compare the document's checksum only, not all data's")
    inspect.set_defaults(run=_inspect)

    explain = commands.add_parser("explain", help="where an operator goes on a device, and why")
    explain.add_argument("op", metavar="OP", help="an operator such as aten::add.Tensor")
    explain.add_argument(
        "--device",
        help="for tensors of this device, such as port; or a backend: its name, package.module:Class, or file.py:Class",
    )
    explain.set_defaults(run=_explain)

    new = commands.add_parser("new", help="a package with a backend of your own that already runs, and its tests")
    new.add_argument("name", metavar="NAME", help="the backend's name: lower-case letters, digits, underscores")
    new.add_argument("--dir", metavar="DIR", help="the folder to make (default: torchport-NAME)")
    new.add_argument(
        "--from",
        dest="kind",
        metavar="KIND",
        default="reference",
        help="what it begins as: fx (an engine with a front end for FX graphs), table (one that is emitted to), "
        "onnx (one that reads ONNX), pjrt (a plugin); default: reference, which hands everything over",
    )
    new.set_defaults(run=_new)

    warm = commands.add_parser("warm", help="run a script, and compile all it needs into the disk cache in parallel")
    warm.add_argument("--workers", type=_positive, metavar="N", help="processes that compile (default: one per core)")
    warm.add_argument("script", metavar="SCRIPT")
    warm.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    warm.set_defaults(run=_warm)

    from .testing.command import add_commands, load_backend  # on demand: a command pays for what it uses

    explain.set_defaults(load_backend=load_backend)
    cache.add_commands(commands)
    add_commands(commands)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    from .demo.main import run_demo  # on demand: a command pays for what it uses

    return run_demo(backends=arguments.backends, only=arguments.only, quick=arguments.quick, steps=arguments.steps)


def _backends(arguments: argparse.Namespace) -> int:
    from .backend.registry import registry  # on demand: a command pays for what it uses

    rows = registry.list()
    if not rows:
        raise TorchportError("no backend is installed; a package brings one by the entry point torchport.backends")
    width = max(len(row.name) for row in rows)
    for row in rows:
        state = "available" if row.available else f"unavailable: {row.reason}"
        print(f"{row.name:<{width}}  {state}  ({row.source})")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from .debug.doctor import report  # on demand: a command pays for what it uses

    print(report())
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from .program.inspect import describe  # on demand: a command pays for what it uses

    print(describe(arguments.file, "header" if arguments.header else "full"))
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    from .debug.explain import explain_cli  # on demand: a command pays for what it uses

    device = arguments.device
    place, _, attribute = (device or "").rpartition(":")
    if place and not attribute.isdecimal():  # file.py:Class; "port:1" is a device
        device = arguments.load_backend(device).name
    print(explain_cli(arguments.op, device))
    return 0


def _warm(arguments: argparse.Namespace) -> int:
    from .run.warm_script import warm  # on demand: a command pays for what it uses

    print(warm(arguments.script, arguments.args, arguments.workers))
    return 0


def _new(arguments: argparse.Namespace) -> int:
    from .scaffold import new_package  # on demand: a command pays for what it uses

    folder = new_package(arguments.name, Path(arguments.dir) if arguments.dir else None, arguments.kind)
    print(f"{folder} is there. Next:\n")
    print(f"  pip install -e {shlex.quote(f'{folder}[test]')}\n  torchport conform {arguments.name} --quick")
    return 0


class _Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM): what Ctrl-C cleans up is cleaned up."""


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Have SIGTERM raise :class:`_Terminated`, so that worker processes and temporary files go, too."""

    def terminate(number: int, frame: object) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(argv: Sequence[str] | None) -> int:
    """Do what the command line says. What was printed has been written when this returns."""
    try:
        arguments = _parser().parse_args(argv)
        return arguments.run(arguments)
    finally:
        if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison]  # it was closed by the caller
            sys.stdout.flush()


def _tell(message: str) -> None:
    """Say why the command ends, in one line."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # there may be nobody to tell
        print(f"torchport: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _give_up_output() -> None:
    """Have Python's end not try again to write what could not be written."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0, or 1 where a command found failures; 2 for an error, which is told in one line; 130 after Ctrl-C and 143 after
    SIGTERM; 141, as of a process that SIGPIPE ended, where the reader of the output has gone.
    """
    try:
        with _ending_in_order():
            return _run(argv)
    except (_UsageError, TorchportError, ModuleNotFoundError) as error:
        _tell(str(error))
        return 2
    except _Terminated:
        _tell("terminated")
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        _tell("interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        _give_up_output()
        return 141
    except OSError as error:
        _tell(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        _give_up_output()
        return 2


if __name__ == "__main__":
    sys.exit(main())
