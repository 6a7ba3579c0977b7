"""PyTorch with its caching off: a small convnet trained with AdamW, then tensors that pass between two side streams.

Every tensor is a cudaMalloc, every drop a cudaFree. Losses are printed to the last bit: the flags below make PyTorch
deterministic.
"""
import os
import time

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
import torch

torch.use_deterministic_algorithms(True)
torch.backends.cudnn.benchmark = False
torch.manual_seed(0)
dev = "cuda"


def conv(a, b):
    return torch.nn.Sequential(torch.nn.Conv2d(a, b, 3, stride=2, padding=1), torch.nn.BatchNorm2d(b), torch.nn.ReLU())


def train(steps):
    body = torch.nn.Sequential(conv(3, 32), conv(32, 64), conv(64, 128)).to(dev)
    head = torch.nn.Linear(128, 10).to(dev)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-3)
    losses = []
    for i in range(steps):
        n = 16 + 8 * (i % 7)
        x, y = torch.randn(n, 3, 64, 64, device=dev), torch.randint(0, 10, (n,), device=dev)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(head(body(x).mean((2, 3))), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [l.item().hex() for l in losses]


def side_streams(rounds):
    """Temporaries of one stream, read on the other behind an event and dropped at once, as cudaFree allows."""
    main, streams = torch.cuda.current_stream(), [torch.cuda.Stream(), torch.cuda.Stream()]
    sums = []
    for i in range(rounds):
        n = 64 + 32 * (i % 13)
        x = torch.randint(-3, 4, (n, n), device=dev).float()
        ready = main.record_event()
        first, second = streams[i % 2], streams[1 - i % 2]
        with torch.cuda.stream(first):
            first.wait_event(ready)
            y = torch.remainder(x @ x, 5)
            made = first.record_event()
        with torch.cuda.stream(second):
            second.wait_event(made)
            z = torch.remainder(y @ x + y, 7)
            del y
            junk = torch.full((n, n), 99.0, device=dev)
            done = second.record_event()
        main.wait_event(done)
        sums.append((z - junk).double().sum())
        del x, z, junk
    return [int(s.item()) for s in sums]


train(2), side_streams(2)
torch.manual_seed(1)
torch.cuda.synchronize()
t0 = time.perf_counter()
losses, sums = train(25), side_streams(200)
print(f"SECONDS {time.perf_counter() - t0:.3f}")
print("RESULT losses", *losses)
print("RESULT side streams", hash(tuple(sums)))
