"""Programs that use tensors of the CPU only: each public function is one, and what it returns is compared."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch


def elementwise() -> Any:
    x = torch.linspace(-2, 2, 9)
    return [x.sin(), x.exp().log1p(), x.clamp(-1, 1), (x > 0).where(x, x), torch.lerp(x, -x, 0.25), x.sign()]


def reductions() -> Any:
    x = torch.arange(12.0).reshape(3, 4)
    return [x.sum(), x.mean(0), x.var(1), x.max(1), x.argmin(), x.norm(), x.cumsum(1), x.logsumexp(0)]


def reading_values() -> Any:
    x = torch.arange(4)
    return [x.tolist(), x[2].item(), bool(x[0]), int(x[3]), float(x[1]), len(x), [int(v) for v in x], f"{x[1]:d}"]


def printing() -> Any:
    shown = [torch.arange(3), torch.ones(2, dtype=torch.half), torch.empty(0), torch.eye(2).to_sparse()]
    return [repr(x) for x in shown] + [str(torch.nn.Linear(2, 3)), repr(torch.ones(1, requires_grad=True) * 2)]


def indexing() -> Any:
    x = torch.arange(24).reshape(2, 3, 4).clone()
    x[0, :, 1:3] = -1
    x[x % 5 == 0] = 7
    return [x, x[1, [0, 2]], x[..., None].shape, x.gather(2, torch.tensor([[[0]], [[3]]])), x.nonzero().shape]


def views_and_writes() -> Any:
    x = torch.zeros(4, 4)
    x.t()[1].add_(1)
    x.diagonal().fill_(5)
    x.view(-1).unfold(0, 2, 5).mul_(2)
    return [x, x.as_strided((2, 2), (1, 5), 2), x._base is None, x[0]._base is x, x.data.data_ptr() == x.data_ptr()]


def in_place_without_gradient() -> Any:
    x = torch.ones(3, requires_grad=True)
    x.add_(1)
    return x


def out_arguments() -> Any:
    out = torch.empty(0)
    torch.add(torch.ones(3), 2, out=out)
    return [out, torch.max(torch.eye(2), 1, out=(torch.empty(2), torch.empty(2, dtype=torch.long)))]


def dtypes() -> Any:
    x = torch.tensor([1.6, -2.5, 3.0])
    kinds = [torch.half, torch.bfloat16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]
    return [x.abs().to(kind) for kind in kinds] + [
        torch.result_type(x, 1j),
        torch.promote_types(torch.int8, torch.half),
    ]


def complex_numbers() -> Any:
    z = torch.tensor([1 + 2j, -3j])
    return [z.conj(), z.conj().is_conj(), z.real, torch.view_as_real(z), z.abs(), z.angle(), z @ z, z.conj().imag.neg()]


def fft() -> Any:
    x = torch.arange(8.0)
    return [torch.fft.fft(x), torch.fft.irfft(torch.fft.rfft(x)), torch.fft.fftshift(x), torch.stft(
        torch.arange(16.0), 8, window=torch.ones(8), return_complex=True).shape]  # fmt: skip


def linalg() -> Any:
    a = torch.tensor([[4.0, 1.0], [2.0, 3.0]])
    return [torch.linalg.det(a), torch.linalg.inv(a), torch.linalg.solve(a, torch.ones(2)), torch.linalg.qr(a).R.abs(),
            torch.linalg.eigvals(a), torch.linalg.svdvals(a), torch.linalg.matrix_exp(a * 0.1)]  # fmt: skip


def singular_matrix() -> Any:
    return torch.linalg.inv(torch.zeros(2, 2))


def shape_mismatch() -> Any:
    return torch.ones(2, 3) @ torch.ones(2, 3)


def unknown_device() -> Any:
    return torch.ones(1, device="cuda")


def to_a_device_that_is_not_there() -> Any:
    return torch.ones(1).xpu()


def random_numbers() -> Any:
    torch.manual_seed(3)
    drawn = [
        torch.rand(3),
        torch.randn(2),
        torch.randint(9, (4,)),
        torch.randperm(5),
        torch.bernoulli(torch.ones(2) / 2),
    ]
    return [
        *drawn,
        torch.multinomial(torch.ones(4), 2),
        torch.empty(2).normal_(),
        torch.dropout(torch.ones(8), 0.5, True),
    ]


def random_state() -> Any:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = torch.rand(2)
    torch.set_rng_state(state)
    with torch.random.fork_rng():
        torch.rand(7)
    return [first, torch.rand(2), torch.initial_seed(), state.shape, isinstance(torch.seed(), int)]


def generators() -> Any:
    generator = torch.Generator().manual_seed(11)
    drawn = torch.rand(3, generator=generator)
    other = torch.Generator(device="cpu")
    other.set_state(generator.get_state())
    return [drawn, torch.rand(2, generator=other), torch.rand(2, generator=generator), str(other.device)]


def generator_of_another_device() -> Any:
    return torch.Generator(device="cuda")


def numpy_both_ways() -> Any:
    x = torch.arange(3.0)
    array = x.numpy()
    array[0] = 9
    back = torch.from_numpy(np.arange(4)[::2])
    mixed = [np.add(x, 1), np.asarray(x), torch.as_tensor(array).data_ptr() == x.data_ptr()]
    return [x, back, back.stride(), *mixed, x.__array__().dtype, torch.tensor(np.float64(2))]


def numpy_refused() -> Any:
    return torch.ones(2, requires_grad=True).numpy()


def dlpack() -> Any:
    x = torch.arange(4)
    return [torch.from_dlpack(x).data_ptr() == x.data_ptr(), np.from_dlpack(x), x.__dlpack_device__(),
            torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))]  # fmt: skip


def array_interface_and_buffer() -> Any:
    return [
        torch.frombuffer(bytearray(b"\1\0\2\0"), dtype=torch.int16),
        torch.asarray([1, 2]),
        torch.ones(2).__array__(),
    ]


def storages() -> Any:
    x = torch.arange(4, dtype=torch.int32)
    storage = x.untyped_storage()
    storage[0] = 5
    other = torch.UntypedStorage(8)
    other.fill_(1)
    made = torch.empty(0, dtype=torch.int16).set_(other)
    resized = torch.UntypedStorage(4)
    resized.resize_(16)
    return [x, storage.nbytes(), made, resized.nbytes(), storage.device, storage.is_pinned(), x.is_shared(), len(other),
            storage.data_ptr() == x.data_ptr(), other.tolist(),
            torch.UntypedStorage(2, device="meta").device]  # fmt: skip


def typed_storages() -> Any:
    return [torch.FloatStorage(3).fill_(2).tolist(), torch.ones(2).storage().tolist(), torch.ones(2).storage_type()]


def shared_memory() -> Any:
    x = torch.ones(3)
    shared = x.share_memory_()
    model = torch.nn.Linear(2, 2).share_memory()
    return [shared is x, x.is_shared(), all(p.is_shared() for p in model.parameters()), x.untyped_storage().is_shared()]


def deep_copies() -> Any:
    x = torch.ones(2, requires_grad=True)
    x.grad = torch.full((2,), 3.0)
    pair = copy.deepcopy([x, x])
    shallow = copy.copy(x)
    tied = torch.arange(6.0)
    base, view = copy.deepcopy((tied, tied[2:]))
    view.zero_()
    return [pair[0] is pair[1], pair[0].grad, shallow is x, base, copy.deepcopy(x.detach()).requires_grad]


def deep_copy_of_a_result() -> Any:
    return copy.deepcopy(torch.ones(2, requires_grad=True) * 2)


def pickled_tensors() -> Any:
    x = torch.arange(6).reshape(2, 3)
    parameter = torch.nn.Parameter(torch.ones(2))
    back = pickle.loads(pickle.dumps({"x": x.t(), "p": parameter, "d": torch.device("cpu"), "t": torch.half}))
    return [back, back["x"].stride(), type(back["p"]).__name__, pickle.loads(pickle.dumps(torch.Size([2])))]


def saved_and_loaded() -> Any:
    x = torch.arange(4.0)
    file = io.BytesIO()
    torch.save({"x": x, "view": x[1:], "n": 3, "names": ["a"]}, file)
    size = len(file.getvalue())
    file.seek(0)
    back = torch.load(file)
    back["x"][1] = 9
    return [back, size]


def saved_bytes() -> Any:
    file = io.BytesIO()
    torch.save([torch.arange(3), torch.nn.Linear(1, 1).state_dict().keys()], file, _use_new_zipfile_serialization=False)
    return [len(file.getvalue()), file.getvalue()[:16]]


def loaded_in_other_ways() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.pt")
        torch.save(torch.nn.Linear(2, 2).state_dict(), path)
        found = [torch.load(path, mmap=True), torch.load(path, map_location="meta"),
                 torch.load(path, map_location={"a": "b"}),
                 torch.load(path, map_location=lambda storage, place: [place, storage][1])]  # fmt: skip
        with torch.serialization.skip_data():
            torch.save(torch.ones(2), Path(folder, "y.pt"))
        return [{name: (v.shape, v.device) for name, v in each.items()} for each in found]


def loading_what_is_not_allowed() -> Any:
    file = io.BytesIO()
    torch.save(torch.nn.Linear(1, 1), file)
    file.seek(0)
    return torch.load(file)


def loading_for_a_device_that_is_not_there() -> Any:
    file = io.BytesIO()
    torch.save(torch.ones(1), file)
    file.seek(0)
    return torch.load(file, map_location="cuda")


def serialization_hooks() -> Any:
    with torch.serialization.safe_globals([torch.nn.Linear]):
        allowed = torch.nn.Linear in torch.serialization.get_safe_globals()
    return [
        allowed,
        torch.serialization.location_tag(torch.UntypedStorage(1)),
        torch.serialization.get_default_load_endianness(),
    ]


def sparse() -> Any:
    coo = torch.sparse_coo_tensor([[0, 1], [1, 0]], [2.0, 3.0], (2, 2))
    csr = torch.eye(3).to_sparse_csr()
    return [coo.coalesce().values(), torch.sparse.mm(coo, torch.ones(2, 2)), csr.crow_indices(), csr @ torch.ones(3, 1),
            (coo + coo).to_dense(), coo.is_coalesced(), pickle.loads(pickle.dumps(coo)).to_dense()]  # fmt: skip


def nested() -> Any:
    strided = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)])
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=torch.jagged)
    return [strided.to_padded_tensor(-1.0), jagged.values(), [t.shape for t in jagged.unbind()], (jagged * 2).offsets()]


def quantized() -> Any:
    q = torch.quantize_per_tensor(torch.tensor([-1.0, 0.3, 2.0]), 0.1, 2, torch.quint8)
    channels = torch.quantize_per_channel(torch.eye(2), torch.tensor([0.1, 0.2]), torch.tensor([0, 0]), 0, torch.qint8)
    return [q.int_repr(), q.dequantize(), q.q_scale(), channels.dequantize(), torch.backends.quantized.engine]


def named_dimensions() -> Any:
    x = torch.ones(2, 3, names=("n", "c"))
    return [x.names, x.sum("c").names, x.align_to("c", "n").shape]


def meta_tensors() -> Any:
    x = torch.empty(2, 3, device="meta")
    return [
        (x @ x.t()).shape,
        x.device,
        torch.nn.Linear(2, 3, device="meta").weight.device,
        torch.empty_like(x, device="cpu").shape,
    ]


def meta_values() -> Any:
    return torch.ones(1, device="meta").item()


def default_device() -> Any:
    with torch.device("meta"):
        inside = torch.nn.Linear(2, 2).weight.device
    torch.set_default_device("cpu")
    try:
        return [inside, torch.ones(1).device, torch.get_default_device()]
    finally:
        torch.set_default_device(None)


def default_dtype() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return [torch.ones(1).dtype, torch.tensor(1.0).dtype, torch.get_default_dtype()]
    finally:
        torch.set_default_dtype(before)


def device_objects() -> Any:
    devices = [torch.device("cpu"), torch.device("cuda", 1), torch.device("meta"), torch.device(type="cpu", index=0)]
    return [
        devices,
        [d.index for d in devices],
        devices[0] == torch.device("cpu", 0),
        pickle.loads(pickle.dumps(devices)),
    ]


def device_that_has_no_name() -> Any:
    return torch.device("nothing")


def tensor_attributes() -> Any:
    x = torch.ones(2)
    return [
        x.is_cpu,
        x.is_cuda,
        x.is_xpu,
        x.is_mps,
        x.is_meta,
        x.get_device(),
        x.layout,
        x.is_pinned(),
        x.element_size(),
    ]


def subclasses() -> Any:
    class Counted(torch.Tensor):
        calls = 0

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.calls += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(2).as_subclass(Counted)
    y = (x + 1).sum()
    return [type(y).__name__, Counted.calls, copy.deepcopy(x).as_subclass(torch.Tensor), type(x.data).__name__]


def wrapper_subclasses() -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(torch.ones(2), torch.zeros(2))
    return [(x + 1).a, (x + 1).b, pickle.loads(pickle.dumps(x)).a, copy.deepcopy(x).b, x.device]


def function_modes() -> Any:
    class Noted(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            noted.append(torch.overrides.resolve_name(func) or getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    noted: list[Any] = []
    with Noted():
        x = torch.ones(2) + 1
        copy.deepcopy(x)
        x.pin_memory if x.is_pinned() else x.untyped_storage()
        torch.nn.Linear(2, 2).to(torch.float64)
    return noted


def dispatch_modes() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            noted.append(str(func))
            return func(*args, **(kwargs or {}))

    noted: list[str] = []
    with Noted():
        x = torch.ones(2, requires_grad=True)
        torch.nn.functional.gelu(x).sum().backward()
        torch.nn.Linear(2, 2).to(torch.half)
        copy.deepcopy(x.detach())
    return noted


def fake_tensors() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2, 3))
        made = torch.empty(3, 4)
        module = torch.nn.Linear(4, 2)
        return [(x @ made).shape, module(made).device, repr(x), copy.deepcopy(x).shape, made.untyped_storage().nbytes()]


def threads() -> Any:
    import threading

    results: dict[int, Any] = {}
    workers = [threading.Thread(target=lambda i=i: results.update({i: torch.full((2,), i).sum()})) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [results[i] for i in range(3)]


def vmap_and_grad() -> Any:
    f = torch.func.vmap(torch.func.grad(lambda x: (x * x).sum()))
    jacobian = torch.func.jacrev(torch.sin)(torch.arange(2.0))
    return [f(torch.arange(6.0).reshape(3, 2)), jacobian, torch.func.hessian(torch.sum)(torch.ones(2)),
            torch.func.vmap(lambda x: x + torch.rand(1), randomness="same")(torch.zeros(2)).shape]  # fmt: skip


def functional_call() -> Any:
    model = torch.nn.Linear(2, 1)
    state = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    params, buffers = torch.func.stack_module_state([torch.nn.Linear(2, 1) for _ in range(2)])
    return [torch.func.functional_call(model, state, torch.ones(1, 2)), params["weight"].shape, buffers]


def functionalize() -> Any:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[0].add_(1)
        return y

    return [torch.func.functionalize(f)(torch.zeros(2)), torch.func.functionalize(f)(torch.zeros(2, 2)).stride()]


def scripted_types() -> Any:
    return [
        torch.finfo(torch.half).max,
        torch.iinfo(torch.int8),
        torch.Size([1, 2]).numel(),
        torch.is_tensor(3),
        torch.ones(1).type(),
    ]


def tensor_types() -> Any:
    return [torch.ones(2).type("torch.DoubleTensor"), torch.FloatTensor([1, 2]), torch.LongTensor(2).fill_(3)]


def factories_from_others() -> Any:
    x = torch.ones(2, dtype=torch.half)
    return [x.new_zeros(2), torch.zeros_like(x), torch.full((2,), 3), torch.tril_indices(2, 2),
            torch.complex(x.float(), x.float()),
            torch.linspace(torch.tensor(0.0), 1, 3), torch.arange(3, device="cpu"), torch.scalar_tensor(2)]  # fmt: skip


def swapped_tensors() -> Any:
    a, b = torch.ones(2), torch.zeros(3)
    torch.utils.swap_tensors(a, b)
    return [a, b]


def foreach() -> Any:
    xs = [torch.ones(2), torch.ones(3)]
    torch._foreach_add_(xs, 2)
    return [xs, torch._foreach_norm(xs), torch._foreach_mul(xs, [1.0, 2.0])]


def comparing() -> Any:
    torch.testing.assert_close(torch.ones(2), torch.ones(2))
    return torch.testing.assert_close(torch.ones(2), torch.zeros(2))
