"""Programs with tiers look on disk for what an earlier one has compiled, long before they would compile it."""

from __future__ import annotations

from pathlib import Path

from test_disk_cache import _ended, _start  # pyright: ignore[reportPrivateUsage]

LOOP = """
    from torchport.worker.service import service
    config = torchport.config
    config.tiers, config.compile_after = "on", {after}
    torchport.use("kept", 0)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3, 3), {between}] * 8).to("port")
    with torch.no_grad():
        for _ in range(3000):
            model(torch.ones(2, 3, device="port")).sum().item()
            if torchport.metrics.counter("TakenOver"):
                break
            service.wait(120)
    print(torchport.metrics.counter("TakenOver") > 0, torchport.metrics.counter("CompileWorkers") > 0)
    """


def test_what_an_earlier_program_left_takes_over_long_before_it_would_be_compiled(tmp_path: Path) -> None:
    """Each program is a process of its own, in which compiling is never worth it but for the first and the last."""

    def ran(after: float, between: str = "nn.Tanh()", folder: Path = tmp_path) -> tuple[str, str]:
        *_, told, _ = _ended(_start(LOOP.format(after=after, between=between), folder))
        return told, (folder / "compiled").read_text() if (folder / "compiled").exists() else ""

    (tmp_path / "empty").mkdir()
    assert ran(1e9, folder=tmp_path / "empty") == ("False False", "")  # nothing is there: nobody is asked to look
    told, compiled_once = ran(0.0)
    assert told == "True True"
    assert compiled_once
    assert ran(1e9) == ("True True", compiled_once)
    # For another graph no process is started, though there are entries: no program has left what it needs.
    assert ran(1e9, "nn.Sigmoid()") == ("False False", compiled_once)
    told, compiled_twice = ran(0.5, "nn.Sigmoid()")
    assert told == "True True"
    assert len(compiled_twice.split()) > len(compiled_once.split())
    # What was noted and is gone is looked for once more, and then no longer.
    for kept in tmp_path.rglob("*.entry"):
        kept.unlink()
    assert ran(1e9)[0] == "False True"
    assert ran(1e9)[0] == "False False"
