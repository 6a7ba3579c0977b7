/* A free without a stream comes after everything submitted before it: late writes never reach the block's next owner.
 *
 * order [MODE [ROUNDS [SEED]]], 2,000 rounds by default. Modes:
 *   streams   three threads on six streams: a blocking one, two others, each thread's default one (case S2)
 *   destroy   the same, with streams of a thread's own that are destroyed while busy
 *   peer      blocks of one device, written by streams of another (case S4)
 *   pinned    pinned memory, written by the CPU as soon as it is had anew
 *   threads   case S1: per-thread default streams of two threads
 *   limit     case S3: eight threads short of memory while another trims; wants SIMCUDA_MEM=64m
 *   trim      case S7: freed and trimmed while a busy stream works on it
 * Links: -lcudart -lcuda. */
#define _GNU_SOURCE
#include "../check.h"
#include "driver.h"
#include <pthread.h>
#include <stdint.h>

enum { WORKERS = 3, HELD = 4, READS = 128, PROBE = 16 };

static long rounds;
static uint64_t seed;
static cudaStream_t shared[3];

struct block {
  unsigned char *p;
  size_t size;
  unsigned char pattern;
  cudaStream_t stream;
};
struct reading {
  size_t offset;
  unsigned char pattern;
  long round;
};
struct worker {
  int id, destroys;
  uint64_t rng;
  long errors, round;
  struct block held[HELD];
  cudaStream_t own;
  unsigned char *seen; /* pinned, PROBE bytes a reading */
  struct reading reads[READS];
  int reading;
};

static uint64_t below(uint64_t *rng, uint64_t n) {
  *rng ^= *rng << 13, *rng ^= *rng >> 7, *rng ^= *rng << 17;
  return (*rng >> 11) % n;
}
static void dawdle(void *us) { usleep((useconds_t)(uintptr_t)us); }
static void slow(cudaStream_t s, uint64_t us) { MUST(cudaLaunchHostFunc(s, dawdle, (void *)(uintptr_t)us)); }
static int (*trim_)(size_t);
/* Gives back what gpupool keeps; nothing where it is not. */
static void trim(void) {
  if (trim_) trim_(0);
}

/* All work is done: what was read must be what its block's owner wrote. */
static void compare(struct worker *w) {
  MUST(cudaDeviceSynchronize());
  for (int r = 0; r < w->reading; r++)
    for (int i = 0; i < PROBE; i++) {
      unsigned char seen = w->seen[r * PROBE + i];
      if (seen == w->reads[r].pattern) continue;
      if (w->errors++ < 5)
        printf("thread %d, round %ld: offset %zu is %d, not %d\n", w->id, w->reads[r].round, w->reads[r].offset + (size_t)i, seen,
               w->reads[r].pattern);
      break;
    }
  w->reading = 0;
}
static void read_back(struct worker *w, const struct block *b, cudaStream_t s) {
  if (w->reading == READS) compare(w);
  struct reading *r = &w->reads[w->reading];
  r->offset = below(&w->rng, 2) ? 0 : b->size - PROBE;
  r->pattern = b->pattern, r->round = w->round;
  MUST(cudaMemcpyAsync(w->seen + w->reading * PROBE, b->p + r->offset, PROBE, cudaMemcpyDeviceToHost, s));
  w->reading++;
}
static cudaStream_t pick(struct worker *w) {
  uint64_t k = below(&w->rng, w->destroys ? 6 : 4);
  return k < 3 ? shared[k] : k == 3 ? cudaStreamPerThread : w->own;
}

/* Stream `s` ends while busy, if it is this thread's own; the next one often gets its handle. */
static void renew(struct worker *w) {
  MUST(cudaStreamDestroy(w->own));
  MUST(cudaStreamCreateWithFlags(&w->own, cudaStreamNonBlocking));
  for (int k = 0; k < HELD; k++)
    if (w->held[k].p) w->held[k].stream = NULL;
}

static void let_go(struct worker *w, struct block *b) {
  /* A block whose stream is gone is read on another, after all work so far. */
  if (!b->stream) {
    MUST(cudaDeviceSynchronize());
    b->stream = cudaStreamPerThread;
  }
  if (below(&w->rng, 2)) slow(b->stream, below(&w->rng, 200));
  read_back(w, b, b->stream);
  /* A last late write by another stream: the free has to wait for it too. */
  if (below(&w->rng, 4) == 0) {
    cudaStream_t t = pick(w);
    MUST(cudaDeviceSynchronize());
    slow(t, 100 + below(&w->rng, 300));
    MUST(cudaMemsetAsync(b->p, (unsigned char)~b->pattern, b->size, t));
  }
  if (w->destroys && below(&w->rng, 8) == 0) renew(w);
  if (below(&w->rng, 2)) MUST(cudaFree(b->p));
  else MUST(cuMemFree(dev(b->p)));
  if (w->destroys && below(&w->rng, 8) == 0) renew(w);
  b->p = NULL;
}

static void *work(void *arg) {
  struct worker *w = arg;
  static const size_t SIZES[] = {512, 4 * KB, 64 * KB, 64 * KB, 300 * KB, 3 * MB};
  MUST(cudaFree(0));
  void *pinned;
  MUST(cudaHostAlloc(&pinned, READS * PROBE, cudaHostAllocPortable));
  w->seen = pinned;
  MUST(cudaStreamCreateWithFlags(&w->own, cudaStreamNonBlocking));
  for (w->round = 0; w->round < rounds / WORKERS; w->round++) {
    struct block *b = &w->held[below(&w->rng, HELD)];
    if (b->p) let_go(w, b);
    void *p;
    *b = (struct block){NULL, SIZES[below(&w->rng, 6)], (unsigned char)below(&w->rng, 256), pick(w)};
    if (below(&w->rng, 2)) MUST(cudaMalloc(&p, b->size));
    else MUST(cuMemAlloc((CUdeviceptr *)&p, b->size));
    b->p = p;
    if (below(&w->rng, 3) == 0) slow(b->stream, 50 + below(&w->rng, 400));
    MUST(cudaMemsetAsync(p, b->pattern, b->size, b->stream));
    /* Mostly let go at once, with the write still to come. */
    if (below(&w->rng, 3)) let_go(w, b);
  }
  for (int k = 0; k < HELD; k++)
    if (w->held[k].p) let_go(w, &w->held[k]);
  compare(w);
  MUST(cudaStreamDestroy(w->own));
  MUST(cudaFreeHost(w->seen));
  return NULL;
}
static void streams_mode(int destroys) {
  static struct worker w[WORKERS];
  pthread_t t[WORKERS];
  for (int k = 0; k < 3; k++) MUST(cudaStreamCreateWithFlags(&shared[k], k ? cudaStreamNonBlocking : cudaStreamDefault));
  for (int i = 0; i < WORKERS; i++) {
    w[i].id = i, w[i].destroys = destroys, w[i].rng = (seed * 1000 + (uint64_t)i + 1) * 0x9e3779b97f4a7c15u;
    pthread_create(&t[i], NULL, work, &w[i]);
  }
  for (int i = 0; i < WORKERS; i++) {
    pthread_join(t[i], NULL);
    EQ(w[i].errors, 0);
  }
  for (int k = 0; k < 3; k++) MUST(cudaStreamDestroy(shared[k]));
}

/* Device 0's streams write late, then device 1's stream owns the memory: the order between streams of one context does not
 * reach it. */
static void peer_mode(void) {
  int devices = 0, can = 0;
  MUST(cudaGetDeviceCount(&devices));
  if (devices > 1) MUST(cudaDeviceCanAccessPeer(&can, 1, 0));
  if (!can) { SKIP("peer access: there are no two devices that have it"); return; }
  cudaStream_t zero, one;
  void *before, *after, *pinned;
  long errors = 0;
  MUST(cudaSetDevice(0));
  MUST(cudaStreamCreateWithFlags(&zero, cudaStreamNonBlocking));
  MUST(cudaMalloc(&before, MB));
  MUST(cudaSetDevice(1));
  MUST(cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking));
  EQ(cudaDeviceEnablePeerAccess(0, 0), 0);
  MUST(cudaHostAlloc(&pinned, 64 * KB, cudaHostAllocPortable));
  MUST(cudaSetDevice(0));
  MUST(cudaMalloc(&after, MB));
  /* S4: both may be written by the peer, whichever came first. */
  MUST(cudaSetDevice(1));
  void *both[] = {before, after};
  for (int k = 0; k < 2; k++) {
    EQ(cudaMemsetAsync(both[k], 40 + k, MB, one), 0);
    EQ(cudaStreamSynchronize(one), 0);
    EQ(byte_at((char *)both[k] + MB - 1), 40 + k);
  }
  MUST(cudaSetDevice(0));
  EQ(cudaFree(before), 0);
  EQ(cudaFree(after), 0);
  for (long r = 0; r < rounds; r++) {
    void *p, *q;
    int pattern = 1 + (int)below(&seed, 100);
    size_t size = 64 * KB;
    MUST(cudaSetDevice(0));
    MUST(cudaMalloc(&p, size));
    slow(zero, 50 + below(&seed, 300));
    MUST(cudaMemsetAsync(p, 200, size, zero));
    MUST(cudaFree(p));
    MUST(cudaMalloc(&q, size));
    MUST(cudaSetDevice(1));
    MUST(cudaMemsetAsync(q, pattern, size, one));
    slow(one, 300);
    MUST(cudaMemcpyAsync(pinned, q, size, cudaMemcpyDeviceToHost, one));
    MUST(cudaStreamSynchronize(one));
    for (size_t i = 0; i < size; i++)
      if (((unsigned char *)pinned)[i] != pattern) {
        if (errors++ < 5) printf("round %ld: byte %zu is %d, not %d\n", r, i, ((unsigned char *)pinned)[i], pattern);
        break;
      }
    MUST(cudaSetDevice(0));
    MUST(cudaFree(q));
  }
  EQ(errors, 0);
  MUST(cudaFreeHost(pinned));
}

static void pinned_mode(void) {
  cudaStream_t s;
  void *device, *p, *q;
  enum { N = 64 << 10 };
  static unsigned char copy[N];
  long errors = 0;
  MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  MUST(cudaMalloc(&device, N));
  for (long r = 0; r < rounds; r++) {
    int writes = (int)below(&seed, 2), old = 1 + (int)below(&seed, 100), new = 101 + (int)below(&seed, 100);
    if (writes) MUST(cudaMemsetAsync(device, old, N, s)); /* a late copy writes the old block */
    MUST(below(&seed, 2) ? cudaMallocHost(&p, N) : cudaHostAlloc(&p, N, cudaHostAllocDefault));
    memset(p, old, N);
    slow(s, 50 + below(&seed, 300));
    if (writes) MUST(cudaMemcpyAsync(p, device, N, cudaMemcpyDeviceToHost, s));
    else MUST(cudaMemcpyAsync(device, p, N, cudaMemcpyHostToDevice, s)); /* or reads it */
    MUST(cudaFreeHost(p));
    MUST(cudaMallocHost(&q, N));
    memset(q, new, N);
    MUST(cudaStreamSynchronize(s));
    const unsigned char *look = q;
    int want = new;
    if (!writes) {
      MUST(cudaMemcpy(copy, device, N, cudaMemcpyDeviceToHost));
      look = copy, want = old;
    }
    for (int i = 0; i < N; i++)
      if (look[i] != want) {
        if (errors++ < 5) printf("round %ld, %s: byte %d is %d, not %d\n", r, writes ? "write" : "read", i, look[i], want);
        break;
      }
    MUST(cudaFreeHost(q));
  }
  EQ(errors, 0);
  EQ(cudaFreeHost(NULL), 0);
  EQ(cudaFreeHost(&errors), 1);
  cudaGetLastError();
  MUST(cudaFree(device));
}

/* S1. Thread A writes late and reads, frees, and B takes the memory. */
static unsigned char *a_seen;
static pthread_barrier_t turn;
static void *thread_a(void *arg) {
  void *p;
  MUST(cudaFree(0));
  for (long r = 0; r < rounds / 20; r++) {
    MUST(cudaMalloc(&p, 256 * KB));
    slow(cudaStreamPerThread, 500);
    MUST(cudaMemsetAsync(p, 0xa1, 256 * KB, cudaStreamPerThread));
    slow(cudaStreamPerThread, 500);
    MUST(cudaMemcpyAsync(a_seen, p, 256 * KB, cudaMemcpyDeviceToHost, cudaStreamPerThread));
    MUST(cudaFree(p));
    pthread_barrier_wait(&turn); /* B allocates and writes */
    pthread_barrier_wait(&turn);
    MUST(cudaStreamSynchronize(cudaStreamPerThread));
    for (size_t i = 0; i < 256 * KB; i++)
      if (a_seen[i] != 0xa1) { ++*(long *)arg; break; }
  }
  return NULL;
}
static void *thread_b(void *arg) {
  void *p;
  unsigned char seen;
  MUST(cudaFree(0));
  for (long r = 0; r < rounds / 20; r++) {
    pthread_barrier_wait(&turn);
    MUST(cudaMalloc(&p, 256 * KB));
    MUST(cudaMemsetAsync(p, 0xb2, 256 * KB, cudaStreamPerThread));
    MUST(cudaStreamSynchronize(cudaStreamPerThread));
    usleep(2000);
    MUST(cudaMemcpyAsync(&seen, p, 1, cudaMemcpyDeviceToHost, cudaStreamPerThread));
    MUST(cudaStreamSynchronize(cudaStreamPerThread));
    if (seen != 0xb2) ++*(long *)arg;
    MUST(cudaFree(p));
    pthread_barrier_wait(&turn);
  }
  return NULL;
}
static void threads_mode(void) {
  pthread_t a, b;
  long wrong_a = 0, wrong_b = 0;
  void *pinned;
  MUST(cudaMallocHost(&pinned, 256 * KB));
  a_seen = pinned;
  pthread_barrier_init(&turn, NULL, 2);
  pthread_create(&a, NULL, thread_a, &wrong_a);
  pthread_create(&b, NULL, thread_b, &wrong_b);
  pthread_join(a, NULL);
  pthread_join(b, NULL);
  EQ(wrong_a, 0);
  EQ(wrong_b, 0);
  MUST(cudaFreeHost(pinned));
}

/* S3. */
static atomic_int stop;
static void *trims(void *unused) {
  (void)unused;
  MUST(cudaFree(0));
  while (!atomic_load(&stop)) trim(), usleep(200);
  return NULL;
}
struct taker {
  int id;
  long errors, had;
};
static void *takes(void *arg) {
  struct taker *w = arg;
  uint64_t rng = (seed + (uint64_t)w->id) * 0x9e3779b97f4a7c15u;
  cudaStream_t s;
  MUST(cudaFree(0));
  MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  for (long r = 0; r < rounds / 8; r++) {
    size_t size = 1 + below(&rng, below(&rng, 4) ? 8 * MB : 24 * MB);
    unsigned char *p = NULL, seen[2] = {0, 0};
    int e = cudaMalloc((void **)&p, size);
    if (e == 2) {
      cudaGetLastError();
      continue;
    }
    if (e) { w->errors++; continue; }
    w->had++;
    MUST(cudaMemsetAsync(p, 10 + w->id, size, s));
    if (below(&rng, 2)) slow(s, below(&rng, 300));
    MUST(cudaMemcpyAsync(&seen[0], p, 1, cudaMemcpyDeviceToHost, s));
    MUST(cudaMemcpyAsync(&seen[1], p + size - 1, 1, cudaMemcpyDeviceToHost, s));
    MUST(cudaStreamSynchronize(s));
    if (seen[0] != 10 + w->id || seen[1] != 10 + w->id) w->errors++;
    MUST(cudaFree(p));
  }
  MUST(cudaStreamDestroy(s));
  return NULL;
}
static void limit_mode(void) {
  struct taker w[8];
  pthread_t t[8], trimmer;
  pthread_create(&trimmer, NULL, trims, NULL);
  for (int i = 0; i < 8; i++) {
    w[i] = (struct taker){i, 0, 0};
    pthread_create(&t[i], NULL, takes, &w[i]);
  }
  for (int i = 0; i < 8; i++) {
    pthread_join(t[i], NULL);
    EQ(w[i].errors, 0);
    CHECK(w[i].had > 0);
  }
  atomic_store(&stop, 1);
  pthread_join(trimmer, NULL);
}

/* S7: a fault would end the program. */
static void trim_mode(void) {
  cudaStream_t s;
  MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  for (long r = 0; r < rounds / 10; r++) {
    void *p[3], *q;
    for (int k = 0; k < 3; k++) {
      MUST(cudaMalloc(&p[k], 3 * MB));
      slow(s, 500);
      MUST(cudaMemsetAsync(p[k], k, 3 * MB, s));
    }
    for (int k = 0; k < 3; k++) MUST(cudaFree(p[k]));
    trim();
    MUST(cudaMalloc(&q, 5 * MB));
    MUST(cudaFree(q));
    trim();
  }
  EQ(cudaStreamSynchronize(s), 0);
  EQ(cudaGetLastError(), 0);
}

int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "streams";
  rounds = argc > 2 ? atol(argv[2]) : 2000;
  seed = argc > 3 ? (uint64_t)atol(argv[3]) + 1 : 1;
  trim_ = (int (*)(size_t))dlsym(RTLD_DEFAULT, "gpupoolTrim");
  MUST(cudaFree(0));
  double start = now_s();
  if (!strcmp(mode, "streams")) streams_mode(0);
  else if (!strcmp(mode, "destroy")) streams_mode(1);
  else if (!strcmp(mode, "peer")) peer_mode();
  else if (!strcmp(mode, "pinned")) pinned_mode();
  else if (!strcmp(mode, "threads")) threads_mode();
  else if (!strcmp(mode, "limit")) limit_mode();
  else if (!strcmp(mode, "trim")) trim_mode();
  else return fprintf(stderr, "usage: %s streams|destroy|peer|pinned|threads|limit|trim [ROUNDS [SEED]]\n", argv[0]), 2;
  EQ(cudaGetLastError(), 0);
  printf("%s: %ld rounds, %.1f s\n", mode, rounds, now_s() - start);
  return check_report("order");
}
