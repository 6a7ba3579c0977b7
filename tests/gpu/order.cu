/* Does freed memory reach a stream before the work on it is done? A kernel waits some microseconds and then writes
 * to a block, which is freed as soon as the kernel is launched, and asked for again at once for another stream. That
 * stream writes its own pattern, and counts later how many words are not its own any more.
 *   order [streams|destroyed|pinned|peer] [rounds, 10,000] [broken]
 * streams: a blocking stream, two non-blocking ones, and the per-thread default streams of three threads, at once.
 * destroyed: each writes late from a stream that is destroyed before the free. pinned: late copies into pinned host
 * memory that the CPU writes to. peer: a kernel of another device is the next user. broken: the next user takes the
 * block without free and malloc, which must be found. Prints `N rounds, M foreign writes`; exits 1 when M > 0. */
#include "gpu.h"
#include <pthread.h>
#include <unistd.h>

enum { THREADS = 3, HELD = 6, SIZES = 4 };

static int rounds = 10000, destroyed, broken;
static cudaStream_t shared_streams[3];
static u64 *foreign;
/* Few sizes, or blocks would seldom meet again; small and large ones go different ways in an allocator. */
static const size_t words_of[SIZES] = {128, 4096, 65536 + 128, 786432};

typedef struct {
  unsigned *p, tag;
  size_t words;
  cudaStream_t s;
  int own; /* the stream is this block's own */
} held_t;

static cudaStream_t new_stream(unsigned r) {
  cudaStream_t s;
  MUST(cudaStreamCreateWithFlags(&s, r % 4 ? cudaStreamNonBlocking : cudaStreamDefault));
  return s;
}
/* Frees with the verifying kernel still to run: one more late user. */
static void give_up(held_t *h, long long cycles) {
  if (!h->p) return;
  late_verify<<<GRID, BLOCK, 0, h->s>>>(h->p, h->words, h->tag, cycles, foreign, NULL);
  MUST(cudaGetLastError());
  if (h->own) MUST(cudaStreamDestroy(h->s));
  MUST(cudaFree(h->p));
  h->p = NULL;
}

static void *work(void *arg) {
  int me = (int)(intptr_t)arg;
  u64 rng = 0x9e3779b97f4a7c15ull + (u64)me * 7919;
  held_t held[HELD] = {};
  for (int i = 0; i < rounds / THREADS; i++) {
    unsigned r = next_random(&rng);
    size_t words = words_of[r % SIZES];
    long long late = (5 + r / SIZES % 40) * CYCLES_A_US;
    cudaStream_t streams[4] = {shared_streams[0], shared_streams[1], shared_streams[2], cudaStreamPerThread};
    unsigned from = next_random(&rng) % 4, to = (from + 1 + next_random(&rng) % 3) % 4;
    unsigned *p, tag = (unsigned)(i * THREADS + me) * 2 + 1;
    cudaStream_t a = destroyed ? new_stream(r) : streams[from];
    MUST(cudaMalloc((void **)&p, words * 4));
    late_fill<<<GRID, BLOCK, 0, a>>>(p, words, tag, late);
    MUST(cudaGetLastError());
    if (destroyed) MUST(cudaStreamDestroy(a));
    if (!broken) MUST(cudaFree(p));
    held_t *h = &held[i % HELD];
    give_up(h, late);
    h->words = words, h->tag = tag + 1, h->own = destroyed;
    if (broken) h->p = p;
    else MUST(cudaMalloc((void **)&h->p, words * 4));
    /* Often under the handle that the destroyed one had. */
    h->s = destroyed ? new_stream(r / 7) : streams[to];
    late_fill<<<GRID, BLOCK, 0, h->s>>>(h->p, h->words, h->tag, 0);
    /* Counted once when the late writer should be through, and again when the block is given up. */
    late_verify<<<GRID, BLOCK, 0, h->s>>>(h->p, h->words, h->tag, 2 * late, foreign, NULL);
    MUST(cudaGetLastError());
  }
  for (int i = 0; i < HELD; i++) give_up(&held[i], 0);
  MUST(cudaStreamSynchronize(cudaStreamPerThread));
  return NULL;
}

static void on_streams(void) {
  pthread_t t[THREADS];
  MUST(cudaStreamCreate(&shared_streams[0]));
  for (int i = 1; i < 3; i++) MUST(cudaStreamCreateWithFlags(&shared_streams[i], cudaStreamNonBlocking));
  for (int i = 0; i < THREADS; i++) MUST(pthread_create(&t[i], NULL, work, (void *)(intptr_t)i));
  for (int i = 0; i < THREADS; i++) MUST(pthread_join(t[i], NULL));
}

/* The CPU is no stream: a pinned block may be had again only when the copies into it have finished. */
static u64 pinned(void) {
  u64 rng = 88172645463325252ull, bad = 0;
  cudaStream_t s[3];
  unsigned *source, *busy;
  struct { unsigned *p, tag; size_t words; } held[HELD] = {}, *h;
  MUST(cudaStreamCreate(&s[0]));
  for (int i = 1; i < 3; i++) MUST(cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking));
  MUST(cudaMalloc((void **)&source, words_of[SIZES - 1] * 4));
  MUST(cudaMemset(source, 0xa5, words_of[SIZES - 1] * 4));
  MUST(cudaMalloc((void **)&busy, 512));
  MUST(cudaDeviceSynchronize());
  for (int i = 0; i < rounds + HELD; i++) {
    unsigned r = next_random(&rng), *old = NULL;
    size_t words = words_of[r % SIZES];
    h = &held[i % HELD];
    if (i < rounds) {
      cudaStream_t a = s[r / SIZES % 3];
      MUST(cudaMallocHost((void **)&old, words * 4));
      late_fill<<<1, 32, 0, a>>>(busy, 128, 0, (10 + r / 16 % 60) * CYCLES_A_US);
      MUST(cudaGetLastError());
      MUST(cudaMemcpyAsync(old, source, words * 4, cudaMemcpyDeviceToHost, a));
      if (!broken) MUST(cudaFreeHost(old));
    }
    if (h->p) {
      for (size_t k = 0; k < h->words; k++) bad += ((volatile unsigned *)h->p)[k] != pattern(h->tag, k);
      MUST(cudaFreeHost(h->p));
      h->p = NULL;
    }
    if (i >= rounds) continue;
    h->words = words, h->tag = (unsigned)i;
    if (broken) h->p = old;
    else MUST(cudaMallocHost((void **)&h->p, words * 4));
    for (size_t k = 0; k < words; k++) h->p[k] = pattern(h->tag, k);
  }
  return bad;
}

/* Another device's kernels are ordered by nothing of this one's: cudaFree's wait is all that stands between. */
static u64 peer(void) {
  u64 rng = 88172645463325252ull, bad = 0, *foreign1;
  cudaStream_t s0, s1;
  MUST(cudaSetDevice(1));
  MUST(cudaDeviceEnablePeerAccess(0, 0));
  MUST(cudaStreamCreateWithFlags(&s1, cudaStreamNonBlocking));
  MUST(cudaMalloc((void **)&foreign1, sizeof bad));
  MUST(cudaMemset(foreign1, 0, sizeof bad));
  MUST(cudaDeviceSynchronize());
  MUST(cudaSetDevice(0));
  MUST(cudaStreamCreateWithFlags(&s0, cudaStreamNonBlocking));
  for (int i = 0; i < rounds; i++) {
    unsigned r = next_random(&rng), *p, *q;
    size_t words = words_of[r % SIZES];
    long long late = (5 + r / SIZES % 40) * CYCLES_A_US;
    MUST(cudaMalloc((void **)&p, words * 4));
    late_fill<<<GRID, BLOCK, 0, s0>>>(p, words, 2 * i + 1, late);
    MUST(cudaGetLastError());
    q = p;
    if (!broken) {
      MUST(cudaFree(p));
      MUST(cudaMalloc((void **)&q, words * 4));
    }
    MUST(cudaSetDevice(1));
    late_fill<<<GRID, BLOCK, 0, s1>>>(q, words, 2 * i, 0);
    late_verify<<<GRID, BLOCK, 0, s1>>>(q, words, 2 * i, 2 * late, foreign1, NULL);
    MUST(cudaGetLastError());
    /* The free must not have to know of the other device's work. */
    MUST(cudaStreamSynchronize(s1));
    MUST(cudaSetDevice(0));
    MUST(cudaFree(q));
  }
  MUST(cudaMemcpy(&bad, foreign1, sizeof bad, cudaMemcpyDefault));
  return bad;
}

int main(int argc, char **argv) {
  const char *variant = argc > 1 ? argv[1] : "streams";
  u64 bad = 0;
  int devices = 0, reach = 0;
  if (argc > 2) rounds = atoi(argv[2]);
  broken = argc > 3 && !strcmp(argv[3], "broken");
  destroyed = !strcmp(variant, "destroyed");
  MUST(cudaGetDeviceCount(&devices));
  MUST(cudaMalloc((void **)&foreign, sizeof bad));
  MUST(cudaMemset(foreign, 0, sizeof bad));
  MUST(cudaDeviceSynchronize());
  double t0 = now_s();
  if (!strcmp(variant, "peer")) {
    if (devices < 2) return puts("skipped: one device"), 0;
    MUST(cudaDeviceCanAccessPeer(&reach, 1, 0));
    if (!reach) return puts("skipped: no peer access"), 0;
    bad = peer();
  } else if (!strcmp(variant, "pinned")) {
    bad = pinned();
  } else {
    on_streams();
    MUST(cudaDeviceSynchronize());
    MUST(cudaMemcpy(&bad, foreign, sizeof bad, cudaMemcpyDeviceToHost));
  }
  printf("%s%s: %d rounds, %llu foreign writes, %.1f s\n", variant, broken ? ", broken" : "", rounds, bad,
         now_s() - t0);
  return bad != 0;
}
