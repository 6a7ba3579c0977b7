/* 10,000 rounds of cudaMalloc, kernels and cudaFree, built as nvcc builds by default: with the static runtime, which
 * no preload of cudaMalloc reaches. Every block is filled, lives a while, is verified, and freed with its work still
 * pending. argv: rounds. ptds.cu builds the same with per-thread default streams and four threads. */
#include "gpu.h"
#include <pthread.h>

#ifndef THREADS
#define THREADS 1
#endif
enum { LIVE = 48, STREAMS = 3 };

static int rounds = 10000;
static u64 *counts; /* foreign words, sum */

static void *work(void *arg) {
  int me = (int)(intptr_t)arg;
  u64 rng = 88172645463325252ull + (u64)me * 7919;
  struct { unsigned *p; size_t words; unsigned tag; cudaStream_t s; } live[LIVE] = {}, *b;
  cudaStream_t s[STREAMS] = {0};
  MUST(cudaStreamCreateWithFlags(&s[1], cudaStreamNonBlocking));
  MUST(cudaStreamCreate(&s[2]));
  for (int i = 0; i < rounds / THREADS + LIVE; i++) {
    int draining = i >= rounds / THREADS;
    b = &live[draining ? i - rounds / THREADS : (int)(next_random(&rng) % LIVE)];
    if (b->p) {
      late_verify<<<GRID, BLOCK, 0, b->s>>>(b->p, b->words, b->tag, 0, counts, counts + 1);
      MUST(cudaGetLastError());
      MUST(cudaFree(b->p));
      b->p = NULL;
    }
    if (draining) continue;
    /* 512 bytes to 2 MiB, each power as likely as the next. */
    b->words = (size_t)128 << next_random(&rng) % 12;
    b->words += next_random(&rng) % b->words;
    b->tag = (unsigned)(me * 1000003 + i);
    b->s = s[next_random(&rng) % STREAMS];
    MUST(cudaMalloc((void **)&b->p, b->words * 4));
    late_fill<<<GRID, BLOCK, 0, b->s>>>(b->p, b->words, b->tag, 0);
    MUST(cudaGetLastError());
  }
  MUST(cudaDeviceSynchronize());
  MUST(cudaStreamDestroy(s[1]));
  MUST(cudaStreamDestroy(s[2]));
  return NULL;
}

int main(int argc, char **argv) {
  pthread_t t[THREADS];
  u64 seen[2];
  if (argc > 1) rounds = atoi(argv[1]);
  MUST(cudaMalloc((void **)&counts, sizeof seen));
  MUST(cudaMemset(counts, 0, sizeof seen));
  MUST(cudaDeviceSynchronize());
  double t0 = now_s();
  for (int i = 0; i < THREADS; i++) MUST(pthread_create(&t[i], NULL, work, (void *)(intptr_t)i));
  for (int i = 0; i < THREADS; i++) MUST(pthread_join(t[i], NULL));
  printf("SECONDS %.3f\n", now_s() - t0);
  MUST(cudaMemcpy(seen, counts, sizeof seen, cudaMemcpyDeviceToHost));
  MUST(cudaFree(counts));
  printf("RESULT foreign %llu sum %llu\n", seen[0], seen[1]);
  return seen[0] != 0;
}
