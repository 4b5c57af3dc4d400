"""The peer of :mod:`.recurrent` on XLA: the same classifier written by hand in JAX, each layer a ``jax.lax.scan``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["programs"]


def programs(kind: str, steps: int) -> dict[str, Callable[[], object]]:
    """Inference and a training step with AdamW, each compiled whole by ``jax.jit``, to a value that is read."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    gates, width, layers = {"LSTM": 4, "GRU": 3}[kind], 256, 3
    rng = np.random.default_rng(0)

    def uniform(*shape: int) -> Any:
        return jnp.asarray(rng.uniform(-1 / 16, 1 / 16, shape), jnp.float32)

    weights: Any = [
        {"x": uniform(64 if n == 0 else width, gates * width), "h": uniform(width, gates * width),
         "bx": uniform(gates * width), "bh": uniform(gates * width)}
        for n in range(layers)
    ]  # fmt: skip
    params: Any = {"layers": weights, "head": uniform(width, 10), "bias": uniform(10)}
    x, labels = uniform(16, steps, 64), jnp.asarray(rng.integers(0, 10, 16))

    def lstm(w: Any, state: Any, projected: Any) -> Any:
        h, c = state
        i, f, g, o = jnp.split(projected + h @ w["h"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def gru(w: Any, state: Any, projected: Any) -> Any:
        (h,) = state
        xr, xz, xn = jnp.split(projected, 3, axis=-1)
        hr, hz, hn = jnp.split(h @ w["h"] + w["bh"], 3, axis=-1)
        r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
        h = (1 - z) * jnp.tanh(xn + r * hn) + z * h
        return (h,), h

    def logits(params: Any, x: Any) -> Any:
        sequence = jnp.swapaxes(x, 0, 1)
        zeros = jnp.zeros((16, width), jnp.float32)
        for w in params["layers"]:
            bias = w["bx"] + w["bh"] if kind == "LSTM" else w["bx"]
            projected = sequence @ w["x"] + bias  # of all steps at once
            cell, state = (lstm, (zeros, zeros)) if kind == "LSTM" else (gru, (zeros,))
            _, sequence = lax.scan(lambda s, p, w=w, cell=cell: cell(w, s, p), state, projected)
        return sequence[-1] @ params["head"] + params["bias"]

    def loss(params: Any, x: Any, labels: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(logits(params, x)), labels[:, None], axis=1).mean()

    def adamw(params: Any, m: Any, v: Any, step: Any, x: Any, labels: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, labels)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, grads)
        rate, scale = 1e-3 / (1 - 0.9**step), jnp.sqrt(1 - 0.999**step)
        params = jax.tree.map(lambda p, m, v: p * (1 - 1e-5) - rate * m / (jnp.sqrt(v) / scale + 1e-8), params, m, v)
        return value, params, m, v

    infer = jax.jit(lambda params, x: logits(params, x).sum())
    train = jax.jit(adamw, donate_argnums=(0, 1, 2))
    zeros = jax.tree.map(jnp.zeros_like, params)
    state: list[Any] = [jax.tree.map(jnp.copy, params), zeros, jax.tree.map(jnp.copy, zeros), 0]

    def step() -> object:
        state[3] += 1
        value, *state[:3] = train(*state[:3], jnp.float32(state[3]), x, labels)
        return float(value)

    return {"inference": lambda: float(infer(params, x)), "training": step}
