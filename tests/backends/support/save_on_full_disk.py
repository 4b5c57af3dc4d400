"""Save a program again and again where little room is left: ``save_on_full_disk.py ENGINE FOLDER FREE...`` in bytes.

Prints how often the new file and the old one were there afterwards. All but errors in words end it with a trace.
Mounts a file system per size, so it runs in a mount namespace of its own (``unshare -m``, or ``unshare -Urm``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from torchport import aot, runtime
from torchport.core.errors import ErrorCode, ProgramError


def main(engine: str, folder: Path, sizes: list[int]) -> None:
    """Save with each of these numbers of bytes free."""
    torch.manual_seed(0)
    x = torch.ones(2, 384)
    lowered = aot.lower(nn.Sequential(nn.Linear(384, 384), nn.ReLU()), (x,), backend=engine)
    expected = lowered(x)
    lowered.save(folder / "first.pt2")
    old = (folder / "first.pt2").read_bytes()
    (folder / "first.pt2").unlink()
    place = folder / "full"
    place.mkdir()
    found: Counter[str] = Counter()
    page = os.sysconf("SC_PAGE_SIZE")
    for number, free in enumerate(sizes):
        size = -(-len(old) // page) * page + free
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "torchport-test", str(place)], check=True)
        try:
            path = place / "m.pt2"
            path.write_bytes(old)
            more = {"external_weights": "w.safetensors"} if number % 2 and engine == "reference" else {}
            failed: ProgramError | None = None
            try:
                lowered.save(path, **more)
            except ProgramError as error:
                failed = error
            found["new" if failed is None else "old"] += 1
            names = {"m.pt2", *(more.values() if failed is None else ())}
            if failed is not None:
                assert failed.code == ErrorCode.ACCESS_FAILED, failed
                assert "No space left" in str(failed), failed
                assert path.read_bytes() == old
            assert set(os.listdir(place)) == names, (free, os.listdir(place))
            program = runtime.load(path.read_bytes(), external_data={"w.safetensors": place / "w.safetensors"})
            (result,) = program.load_method()(x)
            torch.testing.assert_close(result, expected)
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)
    print(dict(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(size) for size in sys.argv[3:]])
