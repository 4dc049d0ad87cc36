"""Dense attention of one query by others: cuDNN, PyTorch, FlashInfer; over the same arrays.

What does not take a shape raises, and the benchmark writes down why.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from kernel_shapes import Inputs, Shape
from kernel_sides import Run, Side, loop

PAGE = 16  # tokens of a page of FlashInfer's


def other_sides(shape: Shape, x: Inputs) -> Iterator[Side]:
    """`jax.nn.dot_product_attention` by cuDNN, PyTorch's and FlashInfer's attention."""
    size = shape.decode_bytes() - shape.heads * shape.tokens * 8  # no bias, no positions
    # What is made here lives as long as its loop: keys and values once more, in their layouts.
    for name, make in (("cudnn", cudnn), ("torch", torch_sdpa), ("flashinfer", flashinfer)):
        if name != "cudnn" and importlib.util.find_spec(name) is None:
            continue
        yield Side(
            "decode_attention", name, size, lambda calls, make=make: make(shape, x, calls),
            threads=False,
        )  # fmt: skip


def cudnn(shape: Shape, x: Inputs, calls: int) -> Run:
    """Over keys and values in the layout that it takes, `[B, S, H, D]`."""
    scale = shape.model.channels**-0.5

    def attention(q, k, v):
        rows = q.reshape(shape.batch, 1, shape.model.query_heads, -1)
        out = jax.nn.dot_product_attention(rows, k, v, scale=scale, implementation="cudnn")
        return out.reshape(q.shape)

    k, v = (jax.block_until_ready(jnp.swapaxes(rows, 1, 2)) for rows in (x.k, x.v))
    return loop(attention, x.q, k, v)(calls)


def torch_sdpa(shape: Shape, x: Inputs, calls: int) -> Run:
    """`scaled_dot_product_attention` over the same memory."""
    import torch

    q = torch.from_dlpack(x.q.reshape(shape.batch, shape.model.query_heads, 1, -1))
    k, v = (torch.from_dlpack(rows) for rows in (x.k, x.v))
    attention = torch.nn.functional.scaled_dot_product_attention
    return _launched(lambda: attention(q, k, v, enable_gqa=True), calls)


def flashinfer(shape: Shape, x: Inputs, calls: int) -> Run:
    """One row as it lies, several rows from pages of 16 tokens."""
    import flashinfer  # pyright: ignore[reportMissingImports]
    import torch

    model = shape.model
    q = torch.from_dlpack(x.q.reshape(shape.batch, model.query_heads, -1))
    k, v = (torch.from_dlpack(rows) for rows in (x.k, x.v))
    if shape.batch == 1:
        decode = flashinfer.single_decode_with_kv_cache
        return _launched(
            lambda: decode(q[0], k[0], v[0], kv_layout="HND", use_tensor_cores=True), calls
        )
    pages = shape.tokens // PAGE
    k, v = (_pages(rows) for rows in (k, v))
    workspace = torch.empty(2**28, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "HND", use_tensor_cores=True
    )  # fmt: skip
    count = shape.batch * pages
    wrapper.plan(
        torch.arange(0, count + 1, pages, dtype=torch.int32, device=q.device),
        torch.arange(count, dtype=torch.int32, device=q.device),
        torch.full((shape.batch,), PAGE, dtype=torch.int32, device=q.device),
        model.query_heads, model.kv_heads, model.channels, PAGE,
        q_data_type=q.dtype, kv_data_type=k.dtype,
    )  # fmt: skip
    return _launched(lambda: wrapper.run(q, (k, v)), calls)


def _pages(rows):
    """`[B, H, S, D]` to pages `[B · S / 16, H, 16, D]`."""
    batch, heads, _, channels = rows.shape
    cut = rows.reshape(batch, heads, -1, PAGE, channels).transpose(1, 2)
    return cut.reshape(-1, heads, PAGE, channels).contiguous()


def _launched(call: Callable, calls: int) -> Run:
    """All calls as one graph, where there are graphs: launches one by one would be counted too."""
    import torch

    if not torch.cuda.is_available():

        def one_by_one():
            out = None
            for _ in range(calls):
                out = call()
            return out

        return one_by_one
    out = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            out = call()

    def replay():
        graph.replay()
        torch.cuda.synchronize()
        return out

    return replay
