"""First uses of the device inside others' code: autograd, modes, threads, compilers and the rest of PyTorch."""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from first_uses_support import AS_WARM, KINDS, Kind, Tied, as_warm, kind, told, train, weights
from torch import nn


# -- autograd, modes, threads -----------------------------------------------------------------------------------------
@kind
def autograd_function(device: str) -> Any:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return (x.to(device) * 2).cpu()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * 2

    x = weights(3).requires_grad_()
    Double.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    return x.grad


@kind
def in_backward(device: str) -> Any:
    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                held = grads[0].to(device).requires_grad_()
                (held.exp().sum()).backward()
            assert held.grad is not None
            return held.grad.cpu()

    x = weights(3).requires_grad_()
    Late.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    return [x.grad, train(Tied().to(device), device)]


@kind
def hook_in_backward(device: str) -> Any:
    x = weights(3).requires_grad_()
    x.register_hook(lambda grad: (grad.to(device) * 3).cpu())
    (x * 2).sum().backward()
    return x.grad


@kind
def checkpoint(device: str) -> Any:
    from torch.utils.checkpoint import checkpoint as run

    x = weights(3, 4).requires_grad_()
    grads: list[Any] = []
    for reentrant in (False, True):
        run(lambda value: (value.to(device).sin() * 2).cpu(), x, use_reentrant=reentrant).sum().backward()
        grads.append(x.grad)
    return grads


@kind
def checkpoint_module(device: str) -> Any:
    from torch.utils.checkpoint import checkpoint as run

    model = Tied().to(device)
    run(model, weights(3, 4).to(device), use_reentrant=False).sum().backward()
    return [p.grad for p in model.parameters()]


@kind
def in_inference_mode(device: str) -> Any:
    with torch.inference_mode():
        first = (torch.ones(3, device=device) * 2).tolist()
    return [first, train(Tied().to(device), device), torch.ones(2, device=device).is_inference()]


@kind
def under_no_grad(device: str) -> Any:
    with torch.no_grad():
        x = torch.ones(3, device=device) * 2
    return [x, train(Tied().to(device), device)]


@kind
def in_thread(device: str) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(train(Tied().to(device), device)))
    thread.start()
    thread.join()
    return [results, train(Tied().to(device), device)]


@kind
def in_eight_threads(device: str) -> Any:
    results: list[Any] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        model = Tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        barrier.wait()
        try:
            results.append(train(model.to(device), device, optimizer))
        except Exception as error:
            results.append([f"{type(error).__name__}: {error}"])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@kind
def in_forked_child(device: str) -> Any:
    if "warm" in sys.argv:
        return [6.0, 0]  # a child of a process that has used the device may not use it
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, json.dumps(torch.arange(4.0, device=device).sum().item()).encode())
        finally:
            os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    return [json.loads(os.read(read, 100) or "null"), status]


@kind
def in_finalizer(device: str) -> Any:
    results: list[Any] = []

    class Ends:
        def __del__(self) -> None:
            results.append((torch.ones(3, device=device) * 2).tolist())

    ends = [Ends()]
    ends.append(ends)  # type: ignore[arg-type]
    del ends
    gc.collect()
    return [results, torch.ones(2, device=device)]


@kind
def warnings_as_errors(device: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return train(Tied().to(device), device)


@as_warm
def dispatch_mode(device: str) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        x = torch.ones(3, device=device) + 1
    return [x, seen]


@kind
def function_mode(device: str) -> Any:
    from torch.overrides import TorchFunctionMode

    seen: list[str] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    with Watch():
        x = torch.ones(3, device=device) + 1
    return [x, seen]


@kind
def fake_mode(device: str) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(2, 3, device=device)
        y = (x @ x.t() + torch.tensor(1.0, device=device)).sum(0)
        z = torch.empty(3).to(device)
        told = [list(y.shape), y.device.type == device, list(z.shape), z.device.type == device]
        copied = copy.deepcopy(x)
        told += [list(copied.shape), copied.device.type == device]
    return [told, torch.ones(2, device=device) + 1]


@as_warm
def make_fx(device: str) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx as trace

    graph = trace(lambda x: (x.to(device) * 2).sum().cpu())(weights(3))
    return [[n.op for n in graph.graph.nodes if "device" not in str(n.target)], graph(weights(3))]


@kind
def jit_trace(device: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda x: (x.to(device) * 2).sum().cpu(), weights(3))
    return [traced(weights(4)), str(traced.graph).count("aten::")]


@kind
def func_vmap(device: str) -> Any:
    return torch.func.vmap(lambda row: (row.to(device) * torch.arange(4.0, device=device)).sum())(weights(3, 4))


@kind
def func_grad(device: str) -> Any:
    return torch.func.grad(lambda x: x.to(device).sin().sum().cpu())(weights(3))


@kind
def func_jacobian(device: str) -> Any:
    return torch.func.jacfwd(lambda x: x.to(device).sin())(weights(3))


# -- compilers --------------------------------------------------------------------------------------------------------
@kind
def compile_model(device: str) -> Any:
    model = torch.compile(Tied().to(device), backend="aot_eager")
    return train(model, device)


@kind
def compile_frontend(device: str) -> Any:
    options = {"backend": "reference"}
    return train(torch.compile(Tied().to(device), backend="torchport", options=options), device)


@kind
def compile_frontend_on_cpu(device: str) -> Any:
    options = {"backend": "reference"}
    first = train(torch.compile(Tied(), backend="torchport", options=options), "cpu")
    return [first, torch.ones(2, device=device)]


@kind
def compile_frontend_writes_a_scalar(device: str) -> Any:
    """The first compilation changes how Dynamo takes such an input, which it has traced once by then."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + y

    x = torch.tensor(3.0, dtype=torch.float64)
    result = torch.compile(fn, backend="torchport", options={"backend": "reference"})(x, torch.ones(2).double())
    return [x, result, torch.ones(2, device=device)]


@kind
def compile_with_move_inside(device: str) -> Any:
    return torch.compile(lambda x: (x.to(device) * 2 + 1).sum().cpu(), backend="aot_eager")(weights(3))


@kind
def compile_with_break_inside(device: str) -> Any:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        z = torch.ones(3, device=device)
        torch._dynamo.graph_break()
        return (z * y.to(device)).sum()

    return torch.compile(fn, backend="eager")(weights(3))


@kind
def compile_module_to(device: str) -> Any:
    def fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model.to(device)
        return model(x.to(device))

    model = Tied()
    weight = model.outer.weight
    out = torch.compile(fn, backend="eager")(model, weights(3, 4))
    return [out, weight is model.outer.weight]


@kind
def exported_module(device: str) -> Any:
    from torch.export import export
    from torch.export.passes import move_to_device_pass

    program = move_to_device_pass(export(Tied(), (weights(3, 4),)), device)
    return program.module()(weights(3, 4).to(device))


@kind
def export_with_move_inside(device: str) -> Any:
    class Moves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(device) * 2).sum().cpu()

    return torch.export.export(Moves(), (weights(3),)).module()(weights(3))


@kind
def aot(device: str) -> Any:
    import torchport

    with tempfile.TemporaryDirectory() as folder:
        torchport.aot.lower(Tied(), (weights(3, 4),), backend="reference").save(f"{folder}/m.pt2")
        forward = torchport.runtime.load(f"{folder}/m.pt2").load_method("forward")
        return [forward(weights(3, 4)), torch.ones(2, device=device)]


@kind
def custom_op(device: str) -> Any:
    @torch.library.custom_op(f"first_uses::twice_{device}", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    try:
        return [twice(weights(3).to(device)), twice(weights(3))]
    finally:
        twice._lib._destroy()


@kind
def custom_op_that_moves(device: str) -> Any:
    @torch.library.custom_op(f"first_uses::moves_{device}", mutates_args=())
    def moves(x: torch.Tensor) -> torch.Tensor:
        return (x.to(device) * 2).cpu()

    try:
        return moves(weights(3))
    finally:
        moves._lib._destroy()


# -- the rest of PyTorch ----------------------------------------------------------------------------------------------
@kind
def optimizer_global_hook(device: str) -> Any:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    seen: list[float] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append(torch.ones(3, device=device).sum().item()))
        for _ in range(2)
    ]
    try:
        first = train(Tied(), "cpu")
    finally:
        for handle in handles:
            handle.remove()
    return [first, seen]


@kind
def optimizer_closure(device: str) -> Any:
    x = weights(3).requires_grad_()
    optimizer = torch.optim.LBFGS([x], max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (x.to(device) ** 2).sum()
        loss.backward()
        return loss.item()

    optimizer.step(closure)  # type: ignore[arg-type]
    return x


@kind
def autocast(device: str) -> Any:
    with torch.autocast(device, torch.bfloat16):
        a = weights(3, 3).to(device)
        b = a @ a
        d = torch.nn.functional.linear(weights(2, 3).to(device), a)
    return [b, d.dtype, a.dtype]


@kind
def autocast_module(device: str) -> Any:
    model = Tied()
    with torch.autocast(device, torch.bfloat16):
        out = model.to(device)(weights(3, 4).to(device))
    return [out.dtype, out.float()]


@kind
def grad_scaler(device: str) -> Any:
    scaler = torch.amp.GradScaler(device, init_scale=4.0)  # type: ignore[attr-defined]
    x = weights(3).to(device).requires_grad_()
    optimizer = torch.optim.SGD([x], lr=0.1)
    scaler.scale(x.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return [x, scaler.get_scale()]


@as_warm
def manual_seed(device: str) -> Any:
    torch.manual_seed(3)
    return [torch.rand(3, device=device), torch.randn(3, device=device), torch.randperm(5, device=device)]


@as_warm
def manual_seed_then_module(device: str) -> Any:
    torch.manual_seed(3)
    model = nn.Linear(3, 3).to(device)
    return [model.weight, nn.functional.dropout(torch.ones(8, device=device)), torch.rand(2)]


@as_warm
def rng_state(device: str) -> Any:
    state = torch.get_device_module(device).get_rng_state()
    drawn = torch.rand(3, device=device)
    torch.get_device_module(device).set_rng_state(state)
    return [torch.rand(3, device=device).equal(drawn), state.shape]


@as_warm
def fork_rng(device: str) -> Any:
    torch.manual_seed(3)
    with torch.random.fork_rng(devices=[0], device_type=device):
        inside = torch.rand(2, device=device)
    return [inside, torch.rand(2, device=device)]


def _module_call(name: str, *args: Any) -> Kind:
    def call(device: str) -> Any:
        module: Any = torch.get_device_module(device)
        return getattr(module, name)(*args)

    return call


for _name in ("synchronize", "device_count", "memory_allocated", "mem_get_info", "current_device", "get_device_name",
              "get_rng_state", "initial_seed", "empty_cache", "get_device_properties", "is_available"):  # fmt: skip
    KINDS[f"module_{_name}"] = _module_call(_name)
    AS_WARM.add(f"module_{_name}")
ACCELERATOR = ("synchronize", "memory_allocated", "max_memory_allocated", "empty_cache",
               "current_device_index", "device_count", "is_available", "current_stream")  # fmt: skip
for _name in ACCELERATOR:
    KINDS[f"accelerator_{_name}"] = lambda device, name=_name: (
        str(getattr(torch.accelerator, name)()),
        torch.ones(2, device=device),
    )
    AS_WARM.add(f"accelerator_{_name}")


@as_warm
def generator(device: str) -> Any:
    return torch.Generator(device=device).initial_seed()


@as_warm
def event_and_stream(device: str) -> Any:
    return [told(lambda: torch.Stream(device=device)), told(lambda: torch.Event(device=device))]


@as_warm
def dlpack(device: str) -> Any:
    return [torch.from_dlpack(weights(3).to(device)), told(lambda: weights(3).to(device).numpy())]


@as_warm
def nested(device: str) -> Any:
    def make(layout: torch.layout) -> Any:
        return torch.nested.nested_tensor([weights(2), weights(3)], layout=layout, device=device).shape[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [told(lambda: make(torch.jagged)), told(lambda: make(torch.strided))]


@as_warm
def sparse(device: str) -> Any:
    indices, values = [[0, 1], [1, 0]], [1.0, 2.0]
    return [
        told(lambda: torch.sparse_coo_tensor(indices, values, (2, 2), device=device).to_dense()),
        told(lambda: torch.eye(2).to_sparse().to(device).to_dense()),
        told(lambda: torch.eye(2).to_sparse_csr().to(device).to_dense()),
    ]


@kind
def profiler(device: str) -> Any:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        x = (weights(3).to(device) * 2).sum().item()
    return [x, any(event.key == "aten::mul" for event in profile.key_averages())]


@kind
def profiler_default(device: str) -> Any:
    with torch.profiler.profile() as profile:
        x = train(Tied().to(device), device)
    return [x, len(profile.key_averages()) > 0]


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """Four rows."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return weights(4, 3)[index]


@kind
def data_loader_pinned(device: str) -> Any:
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, pin_memory=device != "cpu", num_workers=1)
    return [batch.to(device, non_blocking=True) for batch in loader]


@kind
def data_loader_that_moves(device: str) -> Any:
    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(rows).to(device)

    return list(torch.utils.data.DataLoader(Rows(), batch_size=2, collate_fn=collate))


def _ours(device: str, make: Callable[[Any], Any]) -> str:
    if device == "cpu":
        return "cpu"
    import torchport

    return make(torchport)


@kind
def torchport_use(device: str) -> Any:
    return train(Tied().to(_ours(device, lambda t: t.use("reference"))), device)


@kind
def torchport_device(device: str) -> Any:
    model = Tied()
    weight = model.outer.weight
    where = _ours(device, lambda t: t.device("add_sub"))
    model.to(where)
    return [weight is model.outer.weight, train(model, where)]


@kind
def torchport_mode(device: str) -> Any:
    if device == "cpu":
        return train(Tied(), device)
    import torchport

    with torchport.mode("eager"):
        return train(Tied().to(device), device)


@as_warm
def torchport_sync(device: str) -> Any:
    import torchport

    torchport.sync()
    return [torch.ones(2, device=device), torchport.metrics.report() != "", torchport.explain("aten::add.Tensor") != ""]


@kind
def to_padded_and_bool(device: str) -> Any:
    mask = weights(4).to(device) > 0
    return [weights(4).to(device)[mask], bool(mask.any())]


@as_warm
def data_assignment(device: str) -> Any:
    model = Tied()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device)
    return [told(lambda: model.outer(weights(3, 4).to(device))), model.outer.weight.device.type == device]


@kind
def swapped_by_choice(device: str) -> Any:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = Tied()
        weight = model.outer.weight
        model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return [weight is model.outer.weight, train(model, device)]
