/* The library's figures on a GPU, a line each: name, value, unit. bench.sh compiles and runs it.
 *
 *   figures pairs       one hot pair, glibc's, random sizes, threads, cudaMalloc and cudaFree
 *   figures w6          fragmentation: device memory taken, host memory, time
 *   figures w6_limited  fragmentation under a limit that GPUPOOL_MAX_MEM sets: what failed, time
 *   figures w6_peak     the most bytes that fragmentation asks for at a time; needs no GPU
 *
 * The library is opened from GPUPOOL_SO; preloaded or not is for the caller to say. The workloads are those of
 * benches/figures.rs. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gpupool.h"

#define MIB 1048576.0

static int (*pool_malloc)(void **, size_t, cudaStream_t);
static int (*pool_free)(void *, cudaStream_t);
static int (*pool_stats)(gpupoolStats_t *);
static int (*pool_trim)(size_t);

static void need(int ok, const char *what) {
  if (!ok) {
    fprintf(stderr, "figures: %s failed\n", what);
    exit(1);
  }
}

static void *symbol(void *library, const char *name) {
  void *found = dlsym(library, name);
  need(found != NULL, name);
  return found;
}

static void open_pool(void) {
  const char *path = getenv("GPUPOOL_SO");
  void *library = dlopen(path ? path : "libgpupool.so", RTLD_NOW | RTLD_LOCAL);
  need(library != NULL, "opening the library that GPUPOOL_SO names");
  *(void **)&pool_malloc = symbol(library, "gpupoolMalloc");
  *(void **)&pool_free = symbol(library, "gpupoolFree");
  *(void **)&pool_stats = symbol(library, "gpupoolGetStats");
  *(void **)&pool_trim = symbol(library, "gpupoolTrim");
}

static void *take(size_t size, cudaStream_t stream) {
  void *p = NULL;
  need(pool_malloc(&p, size, stream) == 0, "gpupoolMalloc");
  return p;
}

static void give(void *p, cudaStream_t stream) { need(pool_free(p, stream) == 0, "gpupoolFree"); }

static cudaStream_t new_stream(void) {
  cudaStream_t stream;
  need(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == 0, "cudaStreamCreateWithFlags");
  return stream;
}

static double now(void) { /* nanoseconds */
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e9 + t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *values, int n) {
  qsort(values, n, sizeof *values, ascending);
  return values[n / 2];
}

static int times(int full, int quick) {
  const char *text = getenv("FIGURES_QUICK");
  return text && strcmp(text, "0") != 0 ? quick : full;
}

/* C++'s std::mt19937_64: the workloads are those of the peers' benchmark, number by number. */
typedef struct {
  uint64_t state[312];
  int at;
} rng_t;

static void seed(rng_t *r, uint64_t value) {
  r->state[0] = value;
  for (int i = 1; i < 312; i++) {
    uint64_t last = r->state[i - 1];
    r->state[i] = 6364136223846793005u * (last ^ (last >> 62)) + i;
  }
  r->at = 312;
}

static uint64_t next(rng_t *r) {
  if (r->at == 312) {
    for (int i = 0; i < 312; i++) {
      uint64_t x = (r->state[i] & ~(uint64_t)0x7fffffff) | (r->state[(i + 1) % 312] & 0x7fffffff);
      r->state[i] = r->state[(i + 156) % 312] ^ (x >> 1) ^ (x & 1 ? 0xb5026f5aa96619e9u : 0);
    }
    r->at = 0;
  }
  uint64_t x = r->state[r->at++];
  x ^= (x >> 29) & 0x5555555555555555u;
  x ^= (x << 17) & 0x71d67fffeda60000u;
  x ^= (x << 37) & 0xfff7eee000000000u;
  return x ^ (x >> 43);
}

/* A size whose logarithm is spread evenly. */
static size_t draw(rng_t *r, double lo, double hi) {
  return (size_t)exp(log(lo) + (double)next(r) / 18446744073709551616.0 * (log(hi) - log(lo)));
}

static void *array(size_t n, size_t each) {
  void *p = malloc(n * each);
  need(p != NULL, "malloc");
  memset(p, 1, n * each); /* its pages are there already when time and memory are measured */
  return p;
}

/* Turn by turn, so that both see the same machine. */
static void pairs(void) {
  enum { MOST = 101, N = 20000 };
  double ours[MOST], theirs[MOST];
  int reps = times(MOST, 5);
  cudaStream_t stream = new_stream();
  for (int r = 0; r < reps; r++) {
    for (int i = 0; i < 100; i++) give(take(512, stream), stream);
    double t0 = now();
    for (int i = 0; i < N; i++) give(take(512, stream), stream);
    double t1 = now();
    for (int i = 0; i < N; i++) {
      void *p = malloc(512);
      __asm__ volatile("" : "+r"(p) : : "memory"); /* the compiler must not see through the pair */
      free(p);
    }
    ours[r] = (t1 - t0) / N;
    theirs[r] = (now() - t1) / N;
  }
  printf("hot_pair_ns %.3f ns\n", median(ours, reps));
  printf("malloc_glibc_pair_ns %.3f ns\n", median(theirs, reps));
}

typedef struct {
  size_t at, size;
} step_t;

/* W2: random sizes, so many blocks live. */
static void churn(int live) {
  enum { MOST = 7 };
  double values[MOST];
  int reps = times(MOST, 3), n = times(200000, 10000);
  size_t steps = n / 4 + (size_t)reps * n, k = 0;
  rng_t r;
  seed(&r, 7);
  void **blocks = array(live, sizeof *blocks);
  step_t *step = array(steps, sizeof *step);
  cudaStream_t stream = new_stream();
  for (int i = 0; i < live; i++) blocks[i] = take(draw(&r, 256, 512 << 10), stream);
  for (size_t i = 0; i < steps; i++) {
    step[i].at = next(&r) % live;
    step[i].size = draw(&r, 256, 512 << 10);
  }
  for (int rep = -1; rep < reps; rep++) { /* the first warms up */
    int pairs = rep < 0 ? n / 4 : n;
    double t0 = now();
    for (int i = 0; i < pairs; i++, k++) {
      give(blocks[step[k].at], stream);
      blocks[step[k].at] = take(step[k].size, stream);
    }
    if (rep >= 0) values[rep] = (now() - t0) / n;
  }
  printf("random_%d_live_ns %.3f ns\n", live, median(values, reps));
  for (int i = 0; i < live; i++) give(blocks[i], stream);
  free(blocks);
  free(step);
}

typedef struct {
  int index, n;
  cudaStream_t stream;
  pthread_barrier_t *go, *done;
} worker_t;

static void *work(void *argument) {
  worker_t *w = argument;
  cudaSetDevice(0);
  rng_t r;
  seed(&r, w->index);
  void *live[32];
  size_t sizes[256];
  for (int i = 0; i < 32; i++) live[i] = take(draw(&r, 256, 64 << 10), w->stream);
  for (int i = 0; i < 256; i++) sizes[i] = draw(&r, 256, 64 << 10);
  pthread_barrier_wait(w->go);
  for (int i = 0; i < w->n; i++) {
    give(live[i % 32], w->stream);
    live[i % 32] = take(sizes[(i * 7) & 255], w->stream);
  }
  pthread_barrier_wait(w->done);
  for (int i = 0; i < 32; i++) give(live[i], w->stream);
  return NULL;
}

/* W4: threads with a stream each, small live sets. */
static void threads(int count) {
  enum { MOST = 7, THREADS = 16 };
  double values[MOST];
  int reps = times(MOST, 3), n = times(400000, 10000);
  pthread_barrier_t go, done;
  pthread_barrier_init(&go, NULL, count + 1);
  pthread_barrier_init(&done, NULL, count + 1);
  cudaStream_t streams[THREADS];
  for (int i = 0; i < count; i++) streams[i] = new_stream();
  for (int rep = -1; rep < reps; rep++) { /* the first warms up */
    pthread_t thread[THREADS];
    worker_t w[THREADS];
    for (int i = 0; i < count; i++) {
      w[i] = (worker_t){i, n, streams[i], &go, &done};
      need(pthread_create(&thread[i], NULL, work, &w[i]) == 0, "pthread_create");
    }
    pthread_barrier_wait(&go);
    double t0 = now();
    pthread_barrier_wait(&done);
    if (rep >= 0) values[rep] = (double)n * count / (now() - t0) * 1e3;
    for (int i = 0; i < count; i++) pthread_join(thread[i], NULL);
  }
  printf("threads_%d_mpairs %.3f Mpairs/s\n", count, median(values, reps));
}

static void streamless(void) {
  enum { MOST = 7 };
  double values[MOST];
  int reps = times(MOST, 3), n = times(5000, 500);
  for (int rep = -1; rep < reps; rep++) { /* the first warms up */
    double t0 = now();
    for (int i = 0; i < n; i++) {
      void *p = NULL;
      need(cudaMalloc(&p, 1 << 20) == 0 && cudaFree(p) == 0, "cudaMalloc, cudaFree");
    }
    if (rep >= 0) values[rep] = (now() - t0) / n;
  }
  printf("streamless_pair_ns %.3f ns\n", median(values, reps));
}

/* W6, drawn beforehand. A `size` is to allocate, as the last of the live blocks; 0 is to free the one at `at`, whose place the
 * last takes. */
typedef struct {
  step_t *ops;
  size_t count, peak;
  int mallocs;
} phases_t;

/* 6 GiB live; FIGURES_W6_MIB sets another cap, and scales the sizes with it. */
static phases_t draw_phases(void) {
  const char *text = getenv("FIGURES_W6_MIB");
  size_t cap = (text ? strtoull(text, NULL, 10) : 6144) << 20;
  need(cap > 0, "reading FIGURES_W6_MIB");
  double scale = cap / (6144 * MIB);
  phases_t w = {NULL, 0, 0, times(30000, 3000)};
  w.ops = array(2 * (size_t)w.mallocs, sizeof *w.ops);
  size_t *live = array(w.mallocs, sizeof *live), blocks = 0, bytes = 0;
  rng_t r;
  seed(&r, 11);
  for (int i = 0; i < w.mallocs; i++) {
    double hi = (i / 2000) % 3 == 0 ? 64 : (i / 2000) % 3 == 1 ? 4 : 512;
    size_t size = draw(&r, 4096 * scale, hi * MIB * scale);
    while (bytes + size > cap && blocks > 0) {
      size_t at = next(&r) % blocks;
      bytes -= live[at];
      live[at] = live[--blocks];
      w.ops[w.count++] = (step_t){at, 0};
    }
    w.ops[w.count++] = (step_t){0, size};
    live[blocks++] = size;
    bytes += size;
    if (bytes > w.peak) w.peak = bytes;
  }
  free(live);
  return w;
}

/* Memory of this process's own, in KiB. */
static double anonymous_kib(void) {
  FILE *file = fopen("/proc/self/smaps_rollup", "r");
  const char *name = "Anonymous: %lf";
  if (file == NULL) {
    file = fopen("/proc/self/status", "r");
    name = "RssAnon: %lf";
  }
  need(file != NULL, "reading /proc/self/status");
  char line[256];
  double kib = -1;
  while (kib < 0 && fgets(line, sizeof line, file) != NULL) sscanf(line, name, &kib);
  fclose(file);
  need(kib >= 0, "finding this process's memory");
  return kib;
}

static size_t free_bytes(void) {
  size_t idle, total;
  need(cudaMemGetInfo(&idle, &total) == 0, "cudaMemGetInfo");
  return idle;
}

/* The driver's word, or the pool's own, whichever is more: a preloaded library may answer for the driver. */
static size_t taken(size_t before) {
  gpupoolStats_t stats;
  need(pool_stats(&stats) == 0, "gpupoolGetStats");
  size_t idle = free_bytes(), used = before > idle ? before - idle : 0;
  return stats.held > used ? stats.held : used;
}

static void fragmentation(int limited) {
  phases_t w = draw_phases();
  cudaStream_t stream = new_stream();
  void **live = array(w.mallocs, sizeof *live);
  size_t before = free_bytes(), device = 0, blocks = 0;
  int mallocs = 0, fails = 0;
  double host_before = anonymous_kib(), host = 0, looking = 0, t0 = now();
  for (size_t i = 0; i <= w.count; i++) {
    if (i < w.count && w.ops[i].size == 0) { /* what failed is NULL, and freed as that */
      give(live[w.ops[i].at], stream);
      live[w.ops[i].at] = live[--blocks];
      continue;
    }
    if (i < w.count) {
      fails += pool_malloc(&live[blocks++], w.ops[i].size, stream) != 0;
      mallocs++;
    }
    if (i == w.count || mallocs % 500 == 0) {
      double look = now(), kib = anonymous_kib();
      size_t bytes = taken(before);
      if (bytes > device) device = bytes;
      if (kib > host) host = kib;
      looking += now() - look;
    }
  }
  double us = (now() - t0 - looking) / 1e3 / mallocs;
  if (limited) {
    printf("w6_limited_fails %d fails\nw6_limited_us_per_op %.3f us\n", fails, us);
    printf("w6_limited_ratio %.3f ratio\n", (double)device / w.peak);
    return;
  }
  need(fails == 0, "an allocation of W6");
  /* The driver's own bookkeeping is in it: an upper bound. */
  printf("host_bytes_per_device_mib %.3f B/MiB\n", (host - host_before) * 1024 / (device / MIB));
  printf("w6_ratio %.3f ratio\nw6_us_per_op %.3f us\n", (double)device / w.peak, us);
}

int main(int argc, char **argv) {
  const char *what = argc == 2 ? argv[1] : "";
  if (strcmp(what, "w6_peak") == 0) {
    printf("%zu\n", draw_phases().peak);
    return 0;
  }
  int known = strcmp(what, "pairs") == 0 || strcmp(what, "w6") == 0 || strcmp(what, "w6_limited") == 0;
  if (!known) {
    fprintf(stderr, "usage: figures pairs | w6 | w6_limited | w6_peak\n");
    return 2;
  }
  need(cudaFree(0) == 0, "starting CUDA");
  open_pool();
  if (strcmp(what, "pairs") != 0) {
    fragmentation(strcmp(what, "w6_limited") == 0);
    return 0;
  }
  pairs();
  churn(100);
  churn(10000);
  threads(1);
  threads(2);
  need(pool_trim(0) == 0, "gpupoolTrim");
  streamless();
  return 0;
}
