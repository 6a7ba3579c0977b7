"""PyTorch with its caching on and CUDA graphs: torch.compile's own, and one captured by hand.

The caching allocator asks for segments also while a stream is being captured; graphs keep theirs between replays.
"""
import os
import time

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import torch

dev = "cuda"


def model():
    torch.manual_seed(0)
    layers = [l for _ in range(4) for l in (torch.nn.Linear(256, 256), torch.nn.GELU())]
    return torch.nn.Sequential(*layers).to(dev)


def compiled(steps):
    m = model()
    f = torch.compile(m, mode="reduce-overhead")
    optimizer = torch.optim.SGD(m.parameters(), lr=1e-2)
    losses = []
    for i in range(steps):
        torch.manual_seed(100 + i)
        x = torch.randn(64, 256, device=dev)
        torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        loss = (f(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if i % 5 == 4:
            torch.cuda.empty_cache()
    return losses


def captured(steps):
    m = model()
    x = torch.zeros(64, 256, device=dev)

    def f():
        big = torch.ones(2048, 2048, device=dev)  # 16 MiB: a segment of its own, asked for during the capture
        return m(x).pow(2).sum() + big.sum() + torch.nn.functional.gelu(m(x + 1)).sum()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):
            f()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = f()
    results = []
    for i in range(steps):
        torch.manual_seed(200 + i)
        x.copy_(torch.randn(64, 256, device=dev))
        graph.replay()
        results.append(y.item().hex())
        # Memory that comes and goes between the replays must not be the graph's.
        junk = [torch.full((1 << (10 + k),), 7.0, device=dev) for k in range(14)]
        del junk
        torch.cuda.empty_cache()
    return results


t0 = time.perf_counter()
by_hand = captured(20)
print(f"SECONDS {time.perf_counter() - t0:.3f}")
print("RESULT captured", *by_hand)
# The compiler may time its kernels and choose others the next time: not to the last bit.
try:
    print("RESULT compiled", *(f"{l:.5g}" for l in compiled(20)))
except Exception as e:
    print(f"skipped: torch.compile: {type(e).__name__}: {str(e)[:200]!r}")
