"""Programs that build and train models on the CPU only: each public function is one."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, 12).reshape(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def data_parallel() -> Any:
    model = _model()
    wrapped = nn.DataParallel(model)
    out = wrapped(torch.ones(3, 4))
    out.sum().backward()
    return [out, out.device, model[0].weight.device, model[0].weight.grad, wrapped.device_ids, wrapped.module is model]


def data_parallel_with_indices() -> Any:
    wrapped = nn.DataParallel(_model(), device_ids=[0], output_device=0, dim=0)
    return [wrapped(torch.ones(3, 4)), wrapped.device_ids, list(wrapped.state_dict())]


def data_parallel_without_parameters() -> Any:
    wrapped = nn.DataParallel(nn.ReLU())
    return [wrapped(torch.tensor([-1.0, 1.0])), wrapped(torch.ones(1)).device]


def data_parallel_trained() -> Any:
    model = nn.DataParallel(_model())
    losses = _trained(model, torch.optim.SGD(model.parameters(), 0.1))
    return [losses, copy.deepcopy(model).state_dict(), repr(model)]


def data_parallel_function() -> Any:
    return nn.parallel.data_parallel(_model(), torch.ones(3, 4))


def data_parallel_parts() -> Any:
    return nn.parallel.replicate(_model(), [0])


def data_parallel_attributes() -> Any:
    wrapped = nn.DataParallel(_model())
    wrapped.module.register_buffer("scale", torch.ones(2, requires_grad=True))
    wrapped.zero_grad()
    wrapped.eval()
    return [
        [name for name, _ in wrapped.named_modules()],
        [name for name, _ in wrapped.named_parameters()],
        [(name, buffer.requires_grad) for name, buffer in wrapped.named_buffers()],
        [wrapped.training, wrapped.module.training, wrapped.dim, wrapped.output_device, wrapped.module[0].in_features],
        sorted(set(vars(wrapped)) - set(vars(nn.Module()))),
    ]


def data_parallel_state() -> Any:
    wrapped, other = nn.DataParallel(_model()), nn.DataParallel(_model().double())
    file = io.BytesIO()
    torch.save(wrapped.state_dict(), file)
    loaded = other.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    try:
        other.module.load_state_dict(wrapped.state_dict())
    except RuntimeError as error:
        return [loaded, other.state_dict(), str(error)]


def data_parallel_nested_arguments() -> Any:
    class Nested(nn.Module):
        def forward(self, first: Any, *more: Any, scale: Any = 1.0, **named: Any) -> Any:
            return [first, (first.sin(), [more, named]), {"scaled": first * scale}]

    wrapped, x = nn.DataParallel(Nested()), torch.arange(4.0).reshape(2, 2)
    return [
        wrapped(x),
        wrapped(x, (x, [x]), None, scale=2.0, also={"x": x}),
        wrapped(first=x),
        wrapped(torch.empty(0, 2)),
        nn.parallel.data_parallel(Nested(), (x, "text"), module_kwargs={"scale": x}),
    ]


def data_parallel_under_modes() -> Any:
    wrapped, x = nn.DataParallel(_model()), torch.ones(3, 4)
    with torch.no_grad():
        without_grad = wrapped(x).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = wrapped(x)
    with torch.inference_mode():
        inferred = wrapped(x).is_inference()
    return [without_grad, low.dtype, inferred, torch.func.functional_call(wrapped, dict(wrapped.state_dict()), (x,))]


def data_parallel_recurrent_and_sparse() -> Any:
    torch.manual_seed(0)
    rnn, rows = nn.DataParallel(nn.LSTM(3, 4, batch_first=True)), nn.DataParallel(nn.Embedding(5, 2, sparse=True))
    out, (hidden, _) = rnn(torch.ones(2, 5, 3))
    (out.sum() + hidden.sum() + rows(torch.tensor([1, 1, 3])).sum()).backward()
    return [out, [p.grad for p in rnn.parameters()], rows.module.weight.grad.to_dense(), rows.module.weight.grad.layout]


def data_parallel_errors() -> Any:
    class Fails(nn.Module):
        def forward(self, *args: Any) -> Any:
            return {}["wonderful"]

    def lazy() -> Any:
        return nn.DataParallel(nn.LazyLinear(2))(torch.ones(2, 3))

    tensor, model = torch.ones(4, 2), _model()
    attempts = [
        lambda: nn.DataParallel(Fails())(tensor),
        lazy,
        lambda: nn.DataParallel(model, device_ids=[]).device_ids,
        lambda: nn.DataParallel(model, device_ids=["cpu"]),
        lambda: nn.DataParallel(model, device_ids=[torch.device("cuda", 0)])(torch.ones(1, 4)),
        lambda: nn.DataParallel(model)(),
        lambda: nn.parallel.replicate(nn.LazyLinear(2), [0, 1]),
        lambda: nn.parallel.scatter(tensor, ["cpu", "cpu"]),
        lambda: nn.parallel.gather([tensor, tensor], "cpu"),
        lambda: nn.parallel.gather([tensor, tensor], -1),
        lambda: nn.parallel.comm.broadcast(tensor, [0]),
        lambda: nn.parallel.comm.scatter(tensor, devices=["cpu"]),
        lambda: nn.parallel.comm.gather([tensor], destination="cpu"),
        lambda: nn.parallel.comm.reduce_add([tensor, tensor]),
    ]
    found = []
    for attempt in attempts:
        try:
            found.append(attempt())
        except Exception as error:
            found.append(f"{type(error).__name__}: {str(error).splitlines()[:1]}")
    return found


def optimizers() -> Any:
    found = {}
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam):
        model = _model()
        found[kind.__name__] = _trained(model, kind(model.parameters(), lr=0.01))
    return found


def fused_and_foreach_optimizers() -> Any:
    found = []
    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}, {"capturable": False, "amsgrad": True}):
        model = _model()
        found.append(_trained(model, torch.optim.AdamW(model.parameters(), lr=0.01, **options)))
    return found


def capturable_optimizer() -> Any:
    model = _model()
    return _trained(model, torch.optim.Adam(model.parameters(), lr=0.01, capturable=True))


def lbfgs() -> Any:
    x = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.LBFGS([x], lr=0.5, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (x - 3).square().sum()
        loss.backward()
        return loss

    return [optimizer.step(closure), x]


def optimizer_state() -> Any:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters())
    _trained(model, optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    fresh = torch.optim.Adam(model.parameters())
    fresh.load_state_dict(torch.load(file))
    return [
        _trained(model, fresh, 1),
        fresh.state_dict()["state"][0]["step"],
        copy.deepcopy(fresh).param_groups[0]["lr"],
    ]


def optimizer_hooks() -> Any:
    called: list[str] = []
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: called.append(str(p.grad.shape)))
    _trained(model, optimizer, 1)
    return called


def schedulers() -> Any:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=4)
    rates = []
    for _ in range(3):
        _trained(model, optimizer, 1)
        scheduler.step()
        rates.append(scheduler.get_last_lr())
    return rates


def averaged_models() -> Any:
    model = _model()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    _trained(model, torch.optim.SGD(model.parameters(), 0.1))
    averaged.update_parameters(model)
    return averaged(torch.ones(1, 4))


def gradient_scaler() -> Any:
    scaler = torch.amp.GradScaler("cpu")
    x = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([x], 0.1)
    scaler.scale(x.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return [x, scaler.get_scale()]


def gradient_scaler_without_a_device() -> Any:
    return torch.amp.GradScaler().is_enabled()


def gradient_clipping() -> Any:
    model = _model()
    model(torch.ones(2, 4)).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return [norm, nn.utils.parameters_to_vector(p.grad for p in model.parameters()).norm()]


def autocast() -> Any:
    model = _model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.ones(2, 4))
        inside = [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), (out + 1).dtype]
    return [out.dtype, inside, torch.is_autocast_enabled("cpu"), torch.amp.is_autocast_available("cpu")]


def autocast_without_a_known_device() -> Any:
    with torch.autocast("cuda"):
        return torch.ones(2, 2) @ torch.ones(2, 2)


def custom_autocast() -> Any:
    class Twice(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu"):
        y = Twice.apply(x)
    y.sum().backward()
    return [y.dtype, x.grad]


def modules_moved() -> Any:
    model = _model()
    weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = [model.to("cpu")[0].weight is weight, model.double()[0].weight is weight, model.half()[0].weight.dtype]
    meta = model.to("meta")
    return [kept, meta[0].weight is weight, meta[0].weight.device, optimizer.param_groups[0]["params"][0].device]


def modules_made_empty() -> Any:
    model = _model().to_empty(device="meta").to_empty(device="cpu")
    return [p.device for p in model.parameters()]


def module_to_a_device_that_is_not_there() -> Any:
    return _model().cuda()


def tied_weights() -> Any:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    pair = nn.ModuleList([first, second]).to(torch.float64)
    return [
        pair[0].weight is pair[1].weight,
        len(list(pair.parameters())),
        copy.deepcopy(pair)[0].weight is pair[0].weight,
    ]


def swapped_parameters() -> Any:
    model = _model()
    weight = model[0].weight
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return [model.double()[0].weight is weight, weight.dtype]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def module_functions_that_count() -> Any:
    shapes: list[Any] = []

    def noted(x: torch.Tensor) -> torch.Tensor:
        shapes.append([x.shape, float(x.max())])
        return x * 2

    _model()._apply(noted)
    return shapes


def lazy_modules() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()).to("cpu")
    return [repr(model), model(torch.ones(2, 5)).shape, model[0].weight.shape]


def state_dicts() -> Any:
    model = _model()
    state = model.state_dict()
    other = _model().double()
    missing = other.load_state_dict({"0.weight": state["0.weight"]}, strict=False)
    with torch.device("meta"):
        bare = _model()
    bare.load_state_dict(state, assign=True)
    return [missing, other[0].weight.dtype, bare[0].weight.device, list(state)]


def state_dict_that_does_not_fit() -> Any:
    return _model().load_state_dict(nn.Linear(1, 1).state_dict())


def module_hooks() -> Any:
    called: list[Any] = []
    model = _model()
    model.register_forward_pre_hook(lambda module, args: called.append(args[0].shape))
    model.register_full_backward_hook(lambda module, grad_in, grad_out: called.append(grad_out[0].shape))
    model[0].register_state_dict_post_hook(lambda *_: called.append("state"))
    model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    model.state_dict()
    return called


def layers() -> Any:
    torch.manual_seed(1)
    image, words = torch.rand(2, 3, 8, 8), torch.rand(2, 5, 8)
    made = [nn.Conv2d(3, 4, 3)(image), nn.BatchNorm2d(3)(image), nn.MaxPool2d(2)(image), nn.GroupNorm(3, 3)(image)]
    made += [
        nn.LSTM(8, 4, batch_first=True)(words)[0],
        nn.GRU(8, 4)(words)[1],
        nn.MultiheadAttention(8, 2)(words, words, words)[0],
    ]
    made += [
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()(words),
        nn.EmbeddingBag(9, 2)(torch.ones(2, 3, dtype=int)),
    ]
    return [x.double().sum() for x in made] + [nn.SyncBatchNorm(3)]


def synchronized_batch_norm() -> Any:
    return nn.SyncBatchNorm(3)(torch.rand(2, 3))


def attention() -> Any:
    q = torch.arange(24.0).reshape(1, 2, 3, 4) / 24
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return [
        plain,
        F.scaled_dot_product_attention(q, q, q),
        F.scaled_dot_product_attention(q, q, q, attn_mask=torch.eye(3) > 0),
    ]


def flexible_attention() -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128)
    return [mask.kv_num_blocks, mask.kv_num_blocks.device, mask.shape]


def losses() -> Any:
    x, y = torch.linspace(-1, 1, 6).reshape(2, 3), torch.tensor([0, 2])
    right = (x > 0).float()
    return [F.cross_entropy(x, y), F.mse_loss(x, -x), F.binary_cross_entropy_with_logits(x, right), F.ctc_loss(
        torch.zeros(4, 1, 3).log_softmax(2), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2]))]  # fmt: skip


def custom_functions() -> Any:
    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, limit: float) -> torch.Tensor:
            ctx.save_for_backward(x)
            ctx.limit = limit
            return x.clamp(-limit, limit)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            (x,) = ctx.saved_tensors
            return grad * (x.abs() < ctx.limit), None

    x = torch.linspace(-2, 2, 5, dtype=torch.float64, requires_grad=True)
    Clipped.apply(x, 1.5).sum().backward()
    return [x.grad, torch.autograd.gradcheck(torch.sin, (torch.ones(2, dtype=torch.float64, requires_grad=True),))]


def gradients() -> Any:
    x = torch.arange(1.0, 4.0, requires_grad=True)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    x.register_hook(lambda grad: grad * 10)
    (x * 2).sum().backward()
    with torch.inference_mode():
        inside = (x * 2).is_inference()
    return [second, x.grad, inside, torch.is_grad_enabled(), x.grad_fn, (x * 2).grad_fn.name()]


def anomaly() -> Any:
    x = torch.zeros(1, requires_grad=True)
    with torch.autograd.detect_anomaly():
        (x.sqrt() * 0).backward()


def forward_derivatives() -> Any:
    import torch.autograd.forward_ad as fwad

    with fwad.dual_level():
        dual = fwad.make_dual(torch.ones(2), torch.full((2,), 2.0))
        return fwad.unpack_dual(dual.square()).tangent


def saved_tensor_hooks() -> Any:
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        (x * x).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        y = (x * x).sum()
    y.backward()
    return x.grad


def saved_in_pinned_memory() -> Any:
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        (x * x).sum().backward()
    return x.grad


def checkpoints() -> Any:
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    found = []
    for reentrant in (True, False):
        torch.manual_seed(4)
        x = torch.ones(2, 4, requires_grad=True)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        y = checkpoint(model, x, use_reentrant=reentrant)
        y = checkpoint_sequential(model, 2, y, use_reentrant=reentrant)
        y.sum().backward()
        found += [y, x.grad]
    return found


def parametrizations() -> Any:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    pruned = nn.utils.prune.l1_unstructured(nn.Linear(2, 2), "weight", 0.5)
    return [layer(torch.ones(1, 2)), copy.deepcopy(layer)(torch.ones(1, 2)), pruned.weight, list(pruned.state_dict())]


def distributions() -> Any:
    torch.manual_seed(2)
    normal = torch.distributions.Normal(0.0, torch.ones(2))
    return [
        normal.rsample(),
        normal.log_prob(torch.zeros(2)),
        torch.distributions.Categorical(torch.ones(3)).sample((2,)),
    ]


@contextmanager
def _rows(**options: Any) -> Iterator[Any]:
    data = torch.utils.data.TensorDataset(torch.arange(10.0).reshape(5, 2), torch.arange(5))
    loader = torch.utils.data.DataLoader(data, batch_size=2, **options)
    yield loader
    del loader


def loaders() -> Any:
    found = []
    for options in ({}, {"shuffle": True, "generator": torch.Generator().manual_seed(1)}, {"drop_last": True}):
        with _rows(**options) as loader:
            found.append(list(loader))
    torch.manual_seed(0)
    with _rows(sampler=torch.utils.data.WeightedRandomSampler([1.0, 2.0], 3)) as loader:
        found.append(list(loader))
    return found


def loader_with_workers() -> Any:
    with _rows(num_workers=1, persistent_workers=True) as loader:
        return [list(loader), [[x.is_shared() for x in batch] for batch in loader]]


def loader_with_pinned_memory() -> Any:
    with _rows(pin_memory=True) as loader:
        return [[x, x.device] for batch in loader for x in batch]


def loader_with_workers_and_pinned_memory() -> Any:
    with _rows(pin_memory=True, num_workers=1) as loader:
        return list(loader)


def loader_whose_worker_fails() -> Any:
    class Broken(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __getitem__(self, index: int) -> Any:
            raise ValueError(f"row {index}")

        def __len__(self) -> int:
            return 2

    return list(torch.utils.data.DataLoader(Broken(), num_workers=1))
