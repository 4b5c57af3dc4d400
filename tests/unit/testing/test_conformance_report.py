"""Reports: counting, JSON, comparison, and the page in a browser. No torch, no engine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from torchport.core.errors import TorchportError
from torchport.testing.difference import changes, difference_text
from torchport.testing.limits import Limit, find_limit, read_limits
from torchport.testing.page import render, write_page
from torchport.testing.plan import Case, Plan, Result, Share, Subject, Unit, units_of
from torchport.testing.report import Report, read_report
from torchport.testing.table import command_of, markdown

ABOUT = {"name": "<chip>", "version": "1", "class": "chip.Chip", "torch": "2.13.0", "torchport": "0"}


def report(*results: tuple[str, str], **more: str) -> Report:
    """A report of (``op/variant/dtype/sample/frontend``, status)."""
    made = Report.new(ABOUT, Plan("chip"), more)
    made.add(Result(Case.parse(case), status, f"</script>{status}") for case, status in results)
    return made


# -- counting and JSON -------------------------------------------------------------------------------------------------
def test_totals_and_rate() -> None:
    made = report(
        ("add/forward/float32/0/lazy", "native"),
        ("add/forward/float32/1/lazy", "wrong"),
        ("add/out/float32/0/eager", "fallback"),
        ("sin/forward/int64/0/lazy", "limit"),
        ("sin/forward/int64/1/lazy", "skipped"),
    )
    assert made.totals({"op": "add", "frontend": "lazy"}) == {"native": 1, "wrong": 1}
    assert made.rate(made.totals()) == pytest.approx(2 / 3)
    assert made.failed
    assert made.cells["add", "lazy", "float32", "forward"].worst == "wrong"
    assert made.cells["sin", "lazy", "int64", "forward"].worst == "limit"
    assert "66.66%" in made.summary()


def test_json_comes_back_as_it_was(tmp_path: Path) -> None:
    made = report(("add/forward/float32/0/lazy", "native"), ("add/forward/float32/1/lazy", "raised"))
    infinite = Result(Case("mul", "forward", "float32", 2, "lazy"), "wrong", "far off", float("inf"), float("nan"))
    made.add([infinite])
    path = tmp_path / "report.json"
    made.write(path)
    again = read_report(path)
    again.write(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(path.read_text())
    assert next(f for f in again.failures if f.case.op == "mul").largest_abs == float("inf")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}', '{"schema": 1, "backend": {}}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(TorchportError, match=r"report\.json"):
        read_report(path)
    with pytest.raises(TorchportError, match="cannot be read"):
        read_report(tmp_path / "nothing.json")


def test_a_case_has_one_name() -> None:
    case = Case("nn.functional.gelu", "forward", "float32", 3, "lazy")
    assert Case.parse(str(case)) == case
    for wrong in ("add", "add/forward/float32/x/lazy", "a/b/c/1/d/e"):
        with pytest.raises(TorchportError, match="names no case"):
            Case.parse(wrong)


# -- comparison --------------------------------------------------------------------------------------------------------
def test_regressions_come_first() -> None:
    old = report(
        ("a/forward/float32/0/lazy", "native"),
        ("b/forward/float32/0/lazy", "wrong"),
        ("c/forward/float32/0/lazy", "native"),
        ("d/forward/float32/0/lazy", "native"),
        ("f/forward/float32/0/lazy", "fallback"),
        ("g/forward/float32/0/lazy", "native"),
    )
    new = report(
        ("a/forward/float32/0/lazy", "native"),
        ("b/forward/float32/0/lazy", "native"),
        ("c/forward/float32/0/lazy", "crashed"),
        ("d/forward/float32/0/lazy", "fallback"),
        ("e/forward/float32/0/lazy", "raised"),
        ("f/forward/float32/0/lazy", "native"),
    )
    found = changes(old, new)
    kinds = [
        ("regression", "c"),
        ("new failure", "e"),
        ("gone", "g"),
        ("degraded", "d"),
        ("improved", "f"),
        ("fixed", "b"),
    ]
    assert [(c.kind, c.op) for c in found] == kinds
    assert difference_text(old, new, found).startswith("regression: 1\n  c forward float32 lazy: native → crashed")
    assert not changes(old, old)


# -- limits ------------------------------------------------------------------------------------------------------------
def test_a_limit_covers_what_its_row_says() -> None:
    row = Limit("a*,b", "out", "*", "lazy", re.compile("^raised: no "), "because")
    covered = Result(Case("abs", "out", "int64", 0, "lazy"), "raised", "no such thing")
    assert find_limit([row], covered) is row
    for other in (
        Result(Case("cos", "out", "int64", 0, "lazy"), "raised", "no such thing"),
        Result(Case("abs", "out", "int64", 0, "aot"), "raised", "no such thing"),
        Result(Case("abs", "out", "int64", 0, "lazy"), "wrong", "no such thing"),
    ):
        assert find_limit([row], other) is None


def test_our_tables_can_be_read_and_a_malformed_one_names_its_line(tmp_path: Path) -> None:
    from torchport.testing.limits import DEVICE_TABLE

    assert len(read_limits(DEVICE_TABLE)) > 5
    path = tmp_path / "table.txt"
    for text in ("# comment\na | b | c\n", "\na | b | c | d | ( | why\n"):
        path.write_text(text)
        with pytest.raises(TorchportError, match=r"table\.txt:2"):
            read_limits(path)


# -- plans -------------------------------------------------------------------------------------------------------------
def test_units_are_a_seeded_choice() -> None:
    subjects = [Subject(f"op{n}", ("float32", "int64"), ("forward", "backward", "error")) for n in range(60)]
    frontends = {"lazy": None, "aot": 2}
    plan = Plan("chip", dtypes=("float32", "int64"), samples=5)
    units = units_of(plan, subjects, frontends)
    assert units == units_of(plan, subjects, frontends)
    assert units != units_of(Plan("chip", dtypes=("float32", "int64"), samples=5, seed=1), subjects, frontends)
    assert [u.dtype for u in units] == ["float32"] * 60 + ["int64"] * 60
    every = ("forward", "backward", "error")
    assert units[0].shares == (Share("lazy", every, 5), Share("aot", every, 2))
    assert "error" not in units[-1].shares[0].variants
    quick = units_of(Plan("chip", quick=True), subjects, frontends)
    forward = [u for u in quick if u == Unit(u.op, "float32", (Share("lazy", ("forward",), 1),))]
    assert {u.op for u in forward} == {s.name for s in subjects}


def test_a_quick_run_that_is_cut_short_has_seen_every_kind() -> None:
    variants = ("forward", "backward", "view", "edge", "out")
    subjects = [Subject(f"op{n}", ("float32",), variants) for n in range(100)]
    quick = units_of(Plan("chip", quick=True), subjects, {"lazy": None, "aot": 2})
    tenth = quick[: len(quick) // 10]
    kinds = {(share.frontend, variant) for unit in tenth for share in unit.shares for variant in share.variants}
    assert {("lazy", variant) for variant in variants} <= kinds
    forward = [at for at, unit in enumerate(quick) if unit.shares[0] == Share("lazy", ("forward",), 1)]
    assert len(forward) == 100
    assert max(forward) < 0.93 * len(quick)


def test_nothing_judged_is_no_pass() -> None:
    made = report(("add/forward/float32/0/lazy", "skipped"), ("mul/view/float32/0/lazy", "native"))
    rows = {line.split("  ")[0]: line for line in made.summary().splitlines()}
    assert "–" in rows["lazy forward"]
    assert "100.00%" in rows["lazy view"]
    assert "100.00%" not in rows["lazy forward"]


def test_a_summary_says_what_ran_on_the_host_and_how_much_was_not_reached() -> None:
    made = report(("add/forward/float32/0/lazy", "native"))
    assert "host" not in made.summary()
    assert "reached" not in made.summary()
    case = Case("sin", "forward", "float32", 0, "lazy")
    made.add([Result(case, "fallback", host_ops=("aten::sin",))])
    made.add([Result(Case("mul", "forward", "float32", at, "lazy"), "not run") for at in range(2)])
    assert "aten::sin (1)" in made.summary()
    assert "50% of the cases were reached" in made.summary()


# -- the page ----------------------------------------------------------------------------------------------------------
def test_page_holds_its_data_and_loads_nothing() -> None:
    made = report(("add/forward/float32/0/lazy", "wrong"))
    text = render(made, changes(report(("add/forward/float32/0/lazy", "native")), made))
    assert "&lt;chip>" in text
    assert text.count("</script>") == 2  # a message with that text must not end the element
    assert not re.search(r"(src|href)\s*=|@import|url\(|fetch\(", text)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))  # type: ignore[union-attr]
    assert data["changes"][0]["kind"] == "regression"
    assert data["failures"][0]["message"] == "</script>wrong"


DRIVE = """
<script>
const out = {}, $$ = s => [...document.querySelectorAll(s)];
const names = () => $$("#ops tr.op td.name").map(td => td.textContent);
const timed = f => { const t = performance.now(); f(); document.body.offsetHeight; return performance.now() - t; };
out.rows = names().length;
out.count = $$("#count")[0].textContent;
const box = $$(".tall")[0];
for (let n = 0; n < 20; n++) { box.scrollTop = box.scrollHeight; box.onscroll(); }
out.scrolled = names().length;
out.title = document.querySelector("#rate").textContent;
out.search = timed(() => { const i = $$("#search")[0]; i.value = "op77"; i.dispatchEvent(new Event("input")); });
out.found = names();
$$("#search")[0].value = ""; $$("#search")[0].dispatchEvent(new Event("input"));
out.sort = timed(() => $$("#ops th button[data-key=failed]")[0].click());
out.first = names()[0];
out.open = timed(() => $$("#ops tr.op")[0].click());
out.detail = $$("#ops tr.detail")[0].textContent;
$$("#ops tr.op")[0].click(); out.closed = $$("#ops tr.detail").length;
const chip = $$(".chip").find(c => c.textContent.includes("wrong"));
chip.click(); out.wrong = names(); chip.click();
out.order = $$("#ops th[aria-sort]").map(th => th.getAttribute("aria-sort"));
document.body.innerHTML = "<pre>" + JSON.stringify(out).replace(/</g, "&lt;") + "</pre>";
</script>
"""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --dump-dom"
)


@pytest.mark.skipif(
    CHROMIUM is None, reason="needs a program named chromium, chromium-browser or google-chrome, and there is none"
)
def test_page_in_a_browser(tmp_path: Path) -> None:
    frontends, dtypes = ("lazy", "eager", "compile", "aot"), ("float32", "float64", "bfloat16", "int64", "bool")
    rows = [(f"op{n}/forward/{t}/0/{d}", "native") for n in range(800) for d in frontends for t in dtypes]
    made = report(*rows, ("op123/backward/float32/4/lazy", "wrong"))
    path = tmp_path / "report.html"
    write_page(path, made)
    path.write_text(path.read_text().replace("</body>", f"{DRIVE}</body>"))
    command = [str(CHROMIUM), *FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}", f"file://{path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    assert found, done.stdout[-2000:]
    seen = json.loads(found.group(1).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert (seen["rows"], seen["count"], seen["scrolled"]) == (100, "800 of 800", 800)  # drawn as they come into sight
    assert seen["title"] == "99.99%"
    assert seen["found"] == ["op77", *(f"op77{n}" for n in range(10))]
    assert seen["first"] == "op123"
    assert "op123/backward/float32/4/lazy" in seen["detail"]
    assert "</script>wrong" in seen["detail"]
    assert seen["closed"] == 0
    assert seen["wrong"] == ["op123"]
    assert seen["order"] == ["descending"]


# -- the table ---------------------------------------------------------------------------------------------------------
def test_markdown_names_the_command_the_totals_and_every_reason() -> None:
    made = Report.new(ABOUT, Plan("chip", frontends=("lazy", "aot"), dtypes=("float32", "int64"), samples=2))
    made.add(
        [
            Result(Case.parse("add/forward/float32/0/lazy"), "native"),
            Result(Case.parse("add/forward/int64/0/aot"), "fallback", host_ops=("aten::add",)),
            Result(Case.parse("sin/out/float32/0/lazy"), "limit", "no | such unit [raised: x]"),
            *(Result(Case("mul", "forward", "float32", n, "lazy"), "native") for n in range(20_000)),
            Result(Case.parse("cos/forward/float32/0/lazy"), "wrong", "1 | 2\nthree"),
        ]
    )
    text = markdown([made])
    assert "`torchport conform chip --dtypes float32,int64 --frontends lazy,aot --samples 2`" in text
    assert "| lazy, forward | 99.99% | 20,001 | 0 | 1 | 0 |" in text  # rounded down
    assert "| `aten::add` | 1 | `add` |" in text
    assert "| no \\| such unit | 1 | `sin` |" in text
    assert "| `cos/forward/float32/0/lazy` | wrong | 1 \\| 2 three |" in text
    assert command_of(Report.new(ABOUT, Plan("chip"))) == "torchport conform chip"


def test_the_date_of_a_report_is_handed_in_or_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Midnight may pass between two reports, or between a report's beginning and its end."""
    from datetime import UTC, datetime, timedelta

    from torchport.testing import report as module

    days = iter(range(100))

    class Passing(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC) + timedelta(days=next(days))

    monkeypatch.setattr(module, "datetime", Passing)
    made = [module.Report.new({}, Plan("x")) for _ in range(2)]
    assert [report.to_json()["backend"]["date"] for report in made] == ["2026-01-31", "2026-02-01"]
    assert made[0].to_json() == made[0].to_json()
    same = [module.Report.new({}, Plan("x"), date="2026-01-31").to_json() for _ in range(2)]
    assert same[0] == same[1]
