/* What the programs of this folder share: checks, a clock, random numbers, and kernels that write late. */
#ifndef GPU_H
#define GPU_H
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned long long u64;

/* A call that the program cannot go on without. */
#define MUST(call) \
  do { \
    int e_ = (int)(call); \
    if (e_) { printf("%s:%d: %s answered %d\n", __FILE__, __LINE__, #call, e_); fflush(stdout); exit(2); } \
  } while (0)

static inline double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
/* xorshift: the same numbers every run. */
static inline unsigned next_random(u64 *state) {
  *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
  return (unsigned)(*state >> 20);
}

__host__ __device__ static inline unsigned pattern(unsigned tag, size_t i) {
  return (tag * 2654435761u) ^ ((unsigned)i * 40503u + 1u);
}
__device__ static inline void spin(long long cycles) {
  for (long long t0 = clock64(); clock64() - t0 < cycles;) {
  }
}
/* Waits, then writes: what is still to come when the host has long gone on. */
__global__ static void late_fill(unsigned *p, size_t words, unsigned tag, long long cycles) {
  spin(cycles);
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < words; i += (size_t)gridDim.x * blockDim.x)
    p[i] = pattern(tag, i);
}
/* Waits, then counts the words that are not the tag's, and adds up what it read. */
__global__ static void late_verify(const unsigned *p, size_t words, unsigned tag, long long cycles, u64 *foreign,
                                   u64 *sum) {
  spin(cycles);
  u64 bad = 0, total = 0;
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < words; i += (size_t)gridDim.x * blockDim.x) {
    unsigned seen = p[i];
    bad += seen != pattern(tag, i);
    total += seen;
  }
  if (bad) atomicAdd(foreign, bad);
  if (sum) atomicAdd(sum, total);
}
enum { GRID = 8, BLOCK = 256, CYCLES_A_US = 2000 };
#endif
