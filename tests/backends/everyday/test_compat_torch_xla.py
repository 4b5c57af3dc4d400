"""A training script for PyTorch/XLA runs with one import changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchport

SCRIPT = """
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch_xla

xm, pl, xr = torch_xla.core.xla_model, torch_xla.distributed.parallel_loader, torch_xla.runtime


class MNIST(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, kernel_size=5)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 8, kernel_size=5)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc1 = nn.Linear(128, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = self.bn1(F.relu(F.max_pool2d(self.conv1(x), 2)))
        x = self.bn2(F.relu(F.max_pool2d(self.conv2(x), 2)))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


torch.manual_seed(1)
images, labels = torch.rand(16, 1, 28, 28), torch.randint(0, 10, (16,))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=4)
device = xm.xla_device()
model = MNIST().to(device).train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
seen = []
for epoch in range(4):
    for step, (data, target) in enumerate(pl.MpDeviceLoader(loader, device)):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        xm.optimizer_step(optimizer)
        xm.add_step_closure(lambda value: seen.append(value.item()), args=(loss.detach(),))
    xm.mark_step()
torch_xla.sync()
xm.wait_device_ops()
xm.master_print(f"loss {seen[0]:.2f} -> {seen[-1]:.2f}, {xr.world_size()} process on {xr.device_type()}")
"""


def test_the_tutorial_runs_with_one_import_changed(capsys: pytest.CaptureFixture[str]) -> None:
    script = SCRIPT.replace("import torch_xla\n", "from torchport.compat import torch_xla\n")
    assert script != SCRIPT
    names: dict[str, Any] = {"__name__": "script"}
    with torchport.config.override(backend="reference"):
        exec(compile(script, "<script>", "exec"), names)
    assert names["device"].type == "port"
    assert len(names["seen"]) == 16
    assert names["seen"][-1] < names["seen"][0]
    assert capsys.readouterr().out.startswith("loss ")


def test_what_is_not_there_says_so() -> None:
    from torchport.compat import torch_xla

    with pytest.warns(UserWarning, match="TORCHPORT_CACHE_DIR=/nowhere"):
        torch_xla.runtime.initialize_cache("/nowhere")
    with torchport.config.override(backend="reference"):
        assert torch_xla.device() == torchport.device("reference")
        assert torch_xla.device_count() == 1
        with pytest.raises(torchport.BackendUnavailable, match="TPU"):
            torch_xla.core.xla_model.xla_device(devkind="TPU")
    with torch_xla.step():
        x = torch.ones(2, device=torchport.device("reference")) + 1
    assert x.tolist() == [2.0, 2.0]
