"""Numba's device arrays with its own memory manager: made, copied both ways and on the device, dropped."""
import time

import numpy
from numba import cuda

rng = numpy.random.RandomState(0)
host = rng.randint(0, 1 << 30, 1_000_000).astype(numpy.int64)


def step(i):
    n = 128 + 4999 * (i % 97)
    a = cuda.to_device(host[:n] + i)
    b = cuda.device_array(n, dtype=numpy.int64)
    b.copy_to_device(a)
    c = cuda.device_array((n // 8, 8), dtype=numpy.float32)
    c.copy_to_device(numpy.full((n // 8, 8), i, numpy.float32))
    del a
    return int(b.copy_to_host().sum()) + int(c.copy_to_host().sum())


step(0)
t0 = time.perf_counter()
total = [step(i) for i in range(400)]
print(f"SECONDS {time.perf_counter() - t0:.3f}")
print("RESULT", hash(tuple(total)))
