"""The conformance kit against backends whose faults are known: each run must find exactly those."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import torchport
from torchport import cli
from torchport.testing import Plan, Report, conform, read_report
from torchport.testing.plan import FAILED

FAKES = Path(__file__).parents[1] / "support" / "conform_fakes.py"
FEW = "^(sin|cos|add)$"
LAZY = ("lazy", "float32", "forward")


def run(name: str, **options: object) -> Report:
    values = {"ops": FEW, "variants": ("forward", "backward"), "samples": 2, "case_seconds": 60.0, **options}
    date = str(values.pop("date", ""))
    return conform(Plan(f"{FAKES}:{name}", **values), date=date)  # type: ignore[arg-type]


def bad(report: Report) -> set[str]:
    """The operators and variants with a failure."""
    return {f"{k[0]} {k[3]}" for k, cell in report.cells.items() if any(cell.counts[s] for s in FAILED)}


def test_a_slightly_wrong_operator_is_found_with_its_error() -> None:
    report = run("SlightlyWrong")
    assert bad(report) == {"sin forward", "cos backward"}  # the derivative of cos is sin
    assert report.totals()["native"] > 5
    failure = next(f for f in report.failures if f.case.op == "sin")
    assert failure.status == "wrong"
    assert failure.largest_rel == pytest.approx(1e-3, rel=0.01)
    assert failure.largest_abs is not None
    assert "float32[" in failure.arguments
    assert str(failure.case) in failure.reproducer


def test_a_crash_is_the_result_of_its_case_and_the_run_goes_on() -> None:
    report = run("Crashing")
    assert bad(report) == {"sin forward", "cos backward"}
    assert {f.status for f in report.failures} == {"crashed"}
    assert all("SIGSEGV" in f.message for f in report.failures)
    assert any("conform_fakes.py" in f.detail for f in report.failures)  # the Python stack of the crash
    assert report.cells["add", "lazy", "float32", "forward"].counts["native"] == 2
    assert report.cells["sin", "lazy", "float32", "backward"].worst == "native"


@pytest.mark.slow
def test_a_hang_is_the_result_of_its_case_and_the_run_goes_on() -> None:
    # The bound is for a loaded machine: the first case of a process pays for PyTorch's lazy imports.
    report = run("Hanging", ops="^(sin|add)$", case_seconds=25.0, samples=1)
    assert bad(report) == {"sin forward"}
    assert {f.status for f in report.failures} == {"hung"}
    assert report.cells["add", "lazy", "float32", "forward"].counts["native"] == 1


def test_five_operators_are_native_and_the_rest_is_named() -> None:
    report = run("FiveOps", ops="^(sin|add|mul|mm|sigmoid|nn.functional.(silu|softsign))$", variants=("forward",))
    assert report.cells.pop(("nn.functional.softsign", *LAZY)).host_ops == {"aten::abs", "aten::div.Tensor"}  # not add
    how = {key[0]: cell.worst for key, cell in report.cells.items()}
    native = dict.fromkeys(("add", "mm", "mul", "sigmoid"), "native")
    assert how == {**native, "sin": "fallback", "nn.functional.silu": "decomposed"}
    assert report.cells["sin", "lazy", "float32", "forward"].host_ops == {"aten::sin"}
    assert not report.failed


def test_eager_mode_says_whether_a_kernel_or_a_compiled_operator_did_it() -> None:
    for name, how in (("FiveOps", "native"), ("SlightlyWrong", "kernel")):  # the latter has reference's boxed kernel
        report = run(name, ops="^(mul|add)$", variants=("forward",), frontends=("eager",))
        assert {cell.worst for cell in report.cells.values()} == {how}


def test_another_index_and_inference_mode_are_frontends() -> None:
    frontends = ("indexed", "inference")
    report = run(
        "FiveOps", ops="^(mul|square)$", variants=("forward", "backward", "inplace", "out"), frontends=frontends
    )
    assert not report.failed
    found = {(frontend, variant) for _, frontend, _, variant in report.cells}
    values = {(frontend, variant) for frontend in frontends for variant in ("forward", "inplace", "out")}
    assert found == {*values, ("indexed", "backward")}  # there are no gradients in inference mode
    wrong = run("SlightlyWrong", ops="^(sin|add)$", variants=("forward",), frontends=frontends)
    assert {(failure.case.op, failure.case.frontend) for failure in wrong.failures} == {
        ("sin", frontend) for frontend in frontends
    }


def test_without_the_host_what_needs_it_is_not_supported_by_the_backends_word() -> None:
    report = run("FiveOps", ops="^(sin|add)$", variants=("forward",), strict=True)
    assert report.cells["add", "lazy", "float32", "forward"].worst == "native"
    cell = report.cells["sin", "lazy", "float32", "forward"]
    assert cell.worst == "unsupported"
    assert "this engine has five operators" in cell.reason
    assert not report.failed


def test_the_same_run_gives_the_same_report_whatever_the_number_of_processes() -> None:
    date = "2026-01-31"  # else midnight may pass between the two
    one, two = (run("SlightlyWrong", jobs=jobs, date=date).to_json() for jobs in (1, 2))
    for data in (one, two):
        data.pop("seconds")
        data.pop("cpu_seconds")
        for failure in data["failures"]:
            failure.pop("seconds")
    assert one == two


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("Unloadable", torchport.BackendUnavailable, "no such chip"),
        ("CrashingAtStart", torchport.BackendUnavailable, "SIGSEGV"),
        ("Nothing", torchport.BackendNotFound, "has no 'Nothing'"),
    ],
)
def test_a_backend_that_cannot_be_loaded_is_one_error(name: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        run(name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ops": "^no_such_operator$"}, "no operator's name matches"),
        ({"ops": "("}, "regular expression"),
        ({"frontends": ("cellar",)}, "no frontend 'cellar'"),
    ],
)
def test_a_wrong_plan_is_one_error(options: dict[str, object], said: str) -> None:
    with pytest.raises(torchport.TorchportError, match=said):
        run("FiveOps", **options)


def test_command_writes_reports_and_fails_on_failures_or_only_on_regressions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--ops", "^(sin|add)$", "--variants", "forward", "--samples", "2"]
    good, wrong = tmp_path / "good", tmp_path / "wrong"
    assert cli.main(["conform", "reference", *few, "--out", str(good)]) == 0
    assert "100.00%" in capsys.readouterr().out
    target = f"{FAKES}:SlightlyWrong"
    assert cli.main(["conform", target, *few, "--out", str(wrong)]) == 1
    assert "wrong" in capsys.readouterr().out
    page = (wrong / "report.html").read_text()
    assert "slightly_wrong" in page
    baseline = ["--baseline", str(wrong / "report.json")]
    assert cli.main(["conform", target, *few, "--out", str(tmp_path / "again"), *baseline]) == 0
    capsys.readouterr()
    assert cli.main(["compare", str(good / "report.json"), str(wrong / "report.json")]) == 1
    assert capsys.readouterr().out.startswith("regression: 1\n  sin forward float32 lazy: native → wrong")
    assert cli.main(["compare", str(wrong / "report.json"), str(good / "report.json")]) == 0
    assert capsys.readouterr().out.startswith("fixed: 1\n")


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    plan = Plan("reference", "^(sin|cos|add)$", variants=("forward",), samples=2)
    whole = conform(plan, journal)
    *lines, last, took = journal.read_text().splitlines()
    journal.write_text("\n".join([*lines, took, last[: len(last) // 2]]))  # stopped while writing
    told: list[int] = []
    again = conform(plan, journal, resume=True, progress=lambda done, total, report, name: told.append(done))
    assert told == [3]
    assert again.totals() == whole.totals()
    assert again.seconds > json.loads(took)["seconds"]  # of both parts
    third = conform(plan, journal, resume=True, progress=lambda done, total, report, name: told.append(done))
    assert told == [3]
    assert third.totals() == whole.totals()
    with pytest.raises(torchport.TorchportError, match="other settings"):
        conform(dataclasses.replace(plan, samples=3), journal, resume=True)


def test_a_time_bound_says_what_was_not_run(tmp_path: Path) -> None:
    report = conform(Plan("reference", "^nn.functional.[a-c]", variants=("forward",), budget=0.001))
    assert report.totals()["not run"] > 10
    assert not report.failed
    report.write(tmp_path / "report.json")
    assert read_report(tmp_path / "report.json").to_json() == json.loads((tmp_path / "report.json").read_text())
