"""Programs that ask PyTorch about the machine, compile, profile, or use several processes, on the CPU only."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def other_devices() -> Any:
    others = [torch.cuda, torch.backends.mps, torch.xpu, torch.mtia, torch.cpu]
    return [[other.is_available() for other in others], torch.cuda.device_count(), torch.cpu.current_device(),
            torch.get_device_module("cpu").__name__, torch.cuda.is_initialized()]  # fmt: skip


def choosing_a_device_by_hand() -> Any:
    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    return [device, _model().to(device)(torch.ones(1, 4, device=device))]


def using_cuda() -> Any:
    return torch.cuda.current_device()


def accelerator_available() -> Any:
    return torch.accelerator.is_available()


def accelerator_name() -> Any:
    return torch.accelerator.current_accelerator()


def accelerator_count() -> Any:
    return torch.accelerator.device_count()


def accelerator_in_c() -> Any:
    return torch._C._get_accelerator()


def accelerator_module() -> Any:
    return torch.get_device_module().__name__


def accelerator_synchronized() -> Any:
    return torch.accelerator.synchronize()


def accelerator_memory() -> Any:
    return torch.accelerator.memory_allocated()


def pinned_memory() -> Any:
    return torch.ones(2).pin_memory()


def pinned_factory() -> Any:
    return torch.ones(2, pin_memory=True)


def compiled_over_pinned_queries() -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.is_pinned() else x - 1

    return torch.compile(step, backend="eager")(torch.ones(2))


def pinned_queries() -> Any:
    return [torch.ones(2).is_pinned(), torch.ones(2).untyped_storage().is_pinned()]


def pinned_for_cuda() -> Any:
    return torch.ones(2).pin_memory("cuda")


def pinned_storage() -> Any:
    return torch.UntypedStorage(8).pin_memory().nbytes()


def copies_that_need_not_block() -> Any:
    x = torch.ones(2)
    return [x.to("cpu", non_blocking=True) is x, torch.zeros(2).copy_(x, non_blocking=True), x.cpu() is x]


def streams() -> Any:
    with torch.cpu.stream(torch.cpu.current_stream()):
        torch.cpu.synchronize()
    return [torch.cpu.device_count(), torch.cuda.Stream.__name__]


def stream_objects() -> Any:
    return torch.Stream()


def event_objects() -> Any:
    return torch.Event().query()


def configuration() -> Any:
    shown = [torch.__config__.show(), torch.__config__.parallel_info(), torch.backends.mkldnn.is_available()]
    return [
        *shown,
        torch.backends.cpu.get_capabilities(),
        torch.backends.opt_einsum.is_available(),
        torch.get_num_threads() > 0,
    ]


def backend_flags() -> Any:
    with torch.backends.mkldnn.flags(enabled=False):
        inside = torch.backends.mkldnn.enabled
    return [
        inside,
        torch.backends.cudnn.enabled,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    ]


def deterministic_algorithms() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return [torch.empty(2).isnan(), torch.zeros(3).index_add(0, torch.tensor([0, 0]), torch.ones(2))]
    finally:
        torch.use_deterministic_algorithms(False)


def public_names() -> Any:
    """Names in a few namespaces; this device's own would be one too many."""
    return [
        sorted(vars(space))
        for space in (torch.optim, torch.utils.data, torch.nn.parallel, torch.accelerator, torch.amp)
    ]


def names_of_methods() -> Any:
    return [torch.Tensor.pin_memory.__name__, nn.DataParallel.__init__.__name__, torch.accelerator.synchronize.__doc__]


def scripted() -> Any:
    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        for _ in range(n):
            x = x * 2
        return x

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "m.pt"))
        torch.jit.save(torch.jit.script(_model()), path)
        loaded = torch.jit.load(path)
    return [torch.jit.script(f)(torch.ones(2), 3), loaded(torch.ones(1, 4))]


def traced() -> Any:
    traced = torch.jit.trace(_model(), torch.ones(1, 4))
    frozen = torch.jit.freeze(traced.eval())
    return [frozen(torch.ones(2, 4)), str(traced.graph)]


def fx_graphs() -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return [torch.fx.symbolic_trace(_model()).code, make_fx(lambda x: torch.softmax(x, 0))(torch.ones(2)).code]


def exported() -> Any:
    program = torch.export.export(_model(), (torch.ones(2, 4),), dynamic_shapes=({0: torch.export.Dim("n")},))
    with tempfile.TemporaryDirectory() as folder:
        torch.export.save(program, Path(folder, "m.pt2"))
        loaded = torch.export.load(Path(folder, "m.pt2"))
    return [
        loaded.module()(torch.ones(3, 4)),
        program.graph_module.code,
        program.run_decompositions().graph_module.code,
    ]


def compiled() -> Any:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.rand(2) if torch.accelerator.current_stream is None else x * 2
        return y.sin() + 1

    torch._dynamo.reset()
    model = torch.compile(_model(), backend="aot_eager")
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()
    return [model(torch.ones(3, 4)), x.grad, torch.compile(f, backend="eager", fullgraph=True)(torch.ones(2))]


def compiled_over_a_break() -> Any:
    def f(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    torch._dynamo.reset()
    counted = torch._dynamo.explain(f)(torch.ones(2))
    return [torch.compile(f, backend="aot_eager")(torch.ones(2)), counted.graph_count, counted.graph_break_count]


def compiled_backends() -> Any:
    return torch._dynamo.list_backends()


def profiled() -> Any:
    with torch.profiler.profile() as profile, torch.profiler.record_function("mine"):
        torch.ones(2) @ torch.ones(2)
    names = [event.key for event in profile.key_averages()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        kinds = sorted({event.get("cat", "") for event in json.loads(path.read_text())["traceEvents"]})
    return [names, kinds, profile.key_averages().table().splitlines()[1], torch.profiler.supported_activities()]


def profiled_the_old_way() -> Any:
    with torch.autograd.profiler.profile() as profile:
        torch.ones(2).add(1)
    return [event.name for event in profile.function_events]


def timed() -> Any:
    from torch.utils.benchmark import Timer

    return Timer("x + 1", globals={"x": torch.ones(1)}).timeit(3).number_per_run


def custom_operators() -> Any:
    @torch.library.custom_op("coexist::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, grad: grad * 2)
    x = torch.ones(2, requires_grad=True)
    twice(x).sum().backward()
    return [
        twice(x),
        x.grad,
        torch.library.opcheck(twice, (torch.ones(2),)),
        twice(torch.ones(2, device="meta")).device,
    ]


def custom_libraries() -> Any:
    library = torch.library.Library("coexist_lib", "DEF")
    library.define("plus(Tensor x, Tensor(a!) y) -> Tensor")
    library.impl("plus", lambda x, y: x + y.add_(1), "CPU")
    return [torch.ops.coexist_lib.plus(torch.ones(1), torch.ones(1)), str(torch.ops.coexist_lib.plus.default._schema)]


def operator_that_is_not_there() -> Any:
    return torch.ops.coexist_none.nothing(torch.ones(1))


def dispatch_table() -> Any:
    lines = torch._C._dispatch_dump_table("aten::add.Tensor").splitlines()
    return [line for line in lines if line.startswith(("CPU:", "Autograd", "CUDA:", "Meta:"))]


def queue_between_processes() -> Any:
    context = torch.multiprocessing.get_context("fork")
    queue, answer, done = context.SimpleQueue(), context.SimpleQueue(), context.Event()

    def work() -> None:
        queue.get().add_(1)
        answer.put(torch.arange(3))
        done.wait(60)  # what is shared is had from the process that made it

    child = context.Process(target=work)
    child.start()
    shared = torch.zeros(2).share_memory_()
    queue.put(shared)
    got = answer.get().clone()
    done.set()
    child.join()
    return [shared, got, child.exitcode, torch.multiprocessing.get_sharing_strategy()]


def forked_child() -> Any:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.manual_seed(0)
            os.write(writer, json.dumps((_model()(torch.ones(1, 4)) + torch.rand(1)).tolist()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    return [said, os.waitpid(child, 0)[1]]


class _Process:
    """One process alone in a group, as every test of a program for many begins."""

    def __init__(self, backend: str | None) -> None:
        self.backend = backend

    def __enter__(self) -> Any:
        import torch.distributed as dist

        dist.init_process_group(self.backend, store=dist.HashStore(), rank=0, world_size=1)
        return dist

    def __exit__(self, *exc: object) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


def process_group() -> Any:
    with _Process("gloo") as dist:
        x = torch.ones(2)
        dist.all_reduce(x)
        gathered: list[Any] = [None]
        dist.all_gather_object(gathered, {"a": 1})
        dist.barrier()
        dist.broadcast_object_list(gathered)
        return [x, gathered, dist.get_backend(), dist.get_world_size(dist.new_group([0])), dist.get_backend_config()]


def process_group_without_a_name() -> Any:
    with _Process(None) as dist:
        x = torch.ones(2)
        dist.all_reduce(x)
        dist.barrier()
        return [x, dist.get_backend()]  # the configuration has the accelerator's backend, too, as on other machines


def distributed_data_parallel() -> Any:
    with _Process("gloo"):
        model = nn.parallel.DistributedDataParallel(_model())
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return [loss, model.module[0].weight.grad, model.device_type]


def device_meshes() -> Any:
    with _Process("gloo") as dist:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        tensor = dist.tensor.distribute_tensor(torch.ones(2, 2), mesh, [dist.tensor.Shard(0)])
        return [repr(mesh), (tensor @ tensor).full_tensor(), mesh.device_type]


def fully_sharded() -> Any:
    from torch.distributed.fsdp import fully_shard

    with _Process("gloo"):
        model = fully_shard(_model())
        model(torch.ones(2, 4)).sum().backward()
        return [model[0].weight.device, model[0].weight.grad.full_tensor(), repr(model[0].weight.device_mesh)]


def distributed_checkpoint() -> Any:
    import torch.distributed.checkpoint as checkpoint

    with tempfile.TemporaryDirectory() as folder, _Process("gloo"):
        checkpoint.save({"x": torch.arange(3)}, checkpoint_id=folder)
        state = {"x": torch.zeros(3, dtype=torch.long)}
        checkpoint.load(state, checkpoint_id=folder)
        return state


def distributed_checkpoint_in_the_background() -> Any:
    import torch.distributed.checkpoint as checkpoint

    with tempfile.TemporaryDirectory() as folder, _Process("cpu:gloo"):
        checkpoint.async_save({"x": torch.arange(3)}, checkpoint_id=folder).result()
        return sorted(path.name for path in Path(folder).iterdir())


def processes_of_torchrun() -> Any:
    from torch.distributed.run import determine_local_world_size

    return [determine_local_world_size(count) for count in ("auto", "cpu", "3")]


def subgroups() -> Any:
    with _Process("gloo") as dist:
        group, groups = dist.new_subgroups(1)
        return [dist.get_world_size(group), len(groups)]


def random_state_of_everything() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = torch.rand(1)
    return [first, torch.random.default_generator.device]


def module_shown_after_use() -> Any:
    return [repr(torch.accelerator), repr(torch.cpu), hasattr(torch, "privateuseone"), hasattr(torch.Tensor, "is_cuda")]


def memory_formats() -> Any:
    x = torch.ones(1, 2, 2, 2).to(memory_format=torch.channels_last)
    return [
        x.stride(),
        nn.Conv2d(2, 2, 1).to(memory_format=torch.channels_last).weight.stride(),
        x.contiguous().stride(),
    ]


def mobile_and_onednn() -> Any:
    return [torch.ones(2, 2).to_mkldnn().to_dense(), torch.ones(2, 2).to_mkldnn().layout]


def hub_and_models_of_others() -> Any:
    from torch.nn.utils import convert_parameters, skip_init

    vector = convert_parameters.parameters_to_vector(_model().parameters())
    return [vector.shape, skip_init(nn.Linear, 2, 2).weight.device, torch.hub.get_dir() == torch.hub.get_dir()]


def tensors_named_by_type() -> Any:
    return torch.tensor([1.0]).type("torch.cuda.FloatTensor")


def stochastic_weights_on_a_device() -> Any:
    return torch.optim.swa_utils.AveragedModel(_model(), device="cpu")(torch.ones(1, 4))


def logging() -> Any:
    torch._logging.set_logs()
    return torch.typename(torch.ones(1))
