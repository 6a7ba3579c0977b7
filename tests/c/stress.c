/* Random operations through both doors, over threads, streams and devices, with late writes checked: every live block holds a
 * pattern set on its stream; before a free a few bytes are copied out on the stream, and compared once the device is done. A
 * block that is handed out too early, or twice, shows as another block's pattern. Streams dawdle at random, so that work is
 * late on a GPU too. Out of memory is an answer like any other: run it with little memory to have it often.
 *
 * stress [OPERATIONS [THREADS [SEED]]]: 40,000 in all, 4 and 1 by default; a quarter as many come first, to warm up.
 * Links: -lgpupool -lcudart -lpthread. About 10 s on simcuda with two cores. */
#define _GNU_SOURCE
#include "check.h"
#include <cnmem.h>
#include <gpupool.h>
#include <pthread.h>
#include <stdint.h>

#define KB ((size_t)1 << 10)
#define MB ((size_t)1 << 20)
enum { DEVICES = 2, NAMED = 4, MINE = 24, READS = 256, PROBE = 16, THREADS = 64 };

enum door { CNMEM, POOL };
/* Which stream a block belongs to: a shared one by its number, or one of these. */
enum { NULL_STREAM = NAMED, PER_THREAD, PRIVATE, KINDS };

struct block {
  unsigned char *p;
  size_t size;
  int device, kind;
  enum door door;
  unsigned char pattern;
};
/* Bytes on their way to the host, and what they must be. */
struct reading {
  struct block b;
  size_t offset, bytes;
  long op;
};
struct worker {
  uint64_t rng;
  long ops, op, oom, errors;
  int id;
  struct block mine[MINE];
  cudaStream_t private[DEVICES];
  cudaEvent_t event[DEVICES];
  struct reading reads[READS];
  unsigned char *seen; /* pinned, PROBE bytes a reading */
  int reading;
};

static int devices;
static cudaStream_t named[DEVICES][NAMED];
/* Blocks on their way from one thread to another. */
static struct block shared[MINE];
static pthread_mutex_t shared_lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t below(struct worker *w, uint64_t n) {
  w->rng ^= w->rng << 13, w->rng ^= w->rng >> 7, w->rng ^= w->rng << 17;
  return (w->rng >> 11) % n;
}
static void wrong(struct worker *w, const char *what, long code) {
  if (w->errors++ < 5) printf("thread %d, operation %ld: %s: %ld\n", w->id, w->op, what, code);
}
#define OK(call) \
  do { \
    long e_ = (long)(call); \
    if (e_) wrong(w, #call, e_); \
  } while (0)

static cudaStream_t stream_of(const struct worker *w, int device, int kind) {
  if (kind < NAMED) return named[device][kind];
  return kind == PRIVATE ? w->private[device] : kind == PER_THREAD ? cudaStreamPerThread : NULL;
}

static void dawdle(void *us) { usleep((useconds_t)(uintptr_t)us); }

/* All work of all devices is done: what was read must be what was written. */
static void compare(struct worker *w) {
  for (int d = 0; d < devices; d++) {
    OK(cudaSetDevice(d));
    OK(cudaDeviceSynchronize());
  }
  for (int r = 0; r < w->reading; r++) {
    const struct reading *read = &w->reads[r];
    const unsigned char *seen = w->seen + (size_t)r * PROBE;
    for (size_t i = 0; i < read->bytes; i++) {
      if (seen[i] == read->b.pattern) continue;
      if (w->errors++ < 5)
        printf("thread %d, operation %ld: %s block %p of %zu bytes, device %d, stream %d: byte %zu is %d, not %d\n", w->id, read->op,
               read->b.door == CNMEM ? "cnmem" : "gpupool", (void *)read->b.p, read->b.size, read->b.device, read->b.kind,
               read->offset + i, seen[i], read->b.pattern);
      break;
    }
  }
  w->reading = 0;
}

/* Copies some bytes of the block out, on a stream that comes after all its work. */
static void read_back(struct worker *w, const struct block *b, cudaStream_t s) {
  if (w->reading == READS) {
    compare(w);
    OK(cudaSetDevice(b->device));
  }
  struct reading *read = &w->reads[w->reading];
  read->b = *b, read->op = w->op;
  read->bytes = b->size < PROBE ? b->size : PROBE;
  uint64_t where = below(w, 3); /* the start, the end, or anywhere */
  read->offset = where == 0 ? 0 : where == 1 ? b->size - read->bytes : below(w, b->size - read->bytes + 1);
  OK(cudaMemcpyAsync(w->seen + (size_t)w->reading * PROBE, b->p + read->offset, read->bytes, cudaMemcpyDeviceToHost, s));
  w->reading++;
}

static void take(struct worker *w, struct block *b) {
  static const size_t MOST[] = {KB, 64 * KB, 64 * KB, MB, MB, 12 * MB};
  struct block n = {NULL, 0, (int)below(w, (uint64_t)devices), 0, (enum door)below(w, 2), (unsigned char)below(w, 256)};
  n.kind = (int)below(w, n.door == CNMEM ? NULL_STREAM + 1 : KINDS);
  n.size = 1 + below(w, MOST[below(w, sizeof MOST / sizeof *MOST)]);
  OK(cudaSetDevice(n.device));
  cudaStream_t s = stream_of(w, n.device, n.kind);
  void *p = NULL;
  int r = n.door == CNMEM ? (int)cnmemMalloc(&p, n.size, s) : gpupoolMalloc(&p, n.size, s);
  if (r == (n.door == CNMEM ? (int)CNMEM_STATUS_OUT_OF_MEMORY : (int)cudaErrorMemoryAllocation)) {
    w->oom++;
    return;
  }
  if (r || !p || (uintptr_t)p % 512) {
    wrong(w, n.door == CNMEM ? "cnmemMalloc" : "gpupoolMalloc", r);
    return;
  }
  n.p = p;
  if (below(w, 16) == 0) OK(cudaLaunchHostFunc(s, dawdle, (void *)(uintptr_t)(50 + below(w, 1000))));
  OK(cudaMemsetAsync(p, n.pattern, n.size, s));
  *b = n;
}

static void give(struct worker *w, struct block *b) {
  OK(cudaSetDevice(b->device));
  cudaStream_t s = stream_of(w, b->device, b->kind);
  if (b->door == POOL && below(w, 4) == 0) {
    /* A second stream works on it after the first, and is the last to. */
    int kind = (int)below(w, KINDS);
    cudaStream_t t = stream_of(w, b->device, kind);
    OK(cudaEventRecord(w->event[b->device], s));
    OK(cudaStreamWaitEvent(t, w->event[b->device], 0));
    OK(gpupoolRecordStream(b->p, t));
    b->pattern = (unsigned char)(b->pattern + 1);
    OK(cudaMemsetAsync(b->p, b->pattern, b->size, t));
    read_back(w, b, t);
  } else {
    read_back(w, b, s);
  }
  if (b->door == POOL) OK(gpupoolFree(b->p, s));
  else OK(cnmemFree(b->p, below(w, 8) ? s : NULL));
  b->p = NULL;
}

/* The thread's own stream ends while busy; the next one often gets its handle. */
static void renew(struct worker *w) {
  int d = (int)below(w, (uint64_t)devices);
  for (int k = 0; k < MINE; k++)
    if (w->mine[k].p && w->mine[k].kind == PRIVATE && w->mine[k].device == d) give(w, &w->mine[k]);
  OK(cudaSetDevice(d));
  OK(cudaStreamDestroy(w->private[d]));
  OK(cudaStreamCreateWithFlags(&w->private[d], cudaStreamNonBlocking));
}

/* Another thread goes on with the block, and this one with another's. */
static void swap(struct worker *w, struct block *b) {
  if (b->p && (b->kind == PRIVATE || b->kind == PER_THREAD)) return; /* a stream of this thread alone */
  struct block *other = &shared[below(w, MINE)], t;
  pthread_mutex_lock(&shared_lock);
  t = *other, *other = *b, *b = t;
  pthread_mutex_unlock(&shared_lock);
}

static void *work(void *arg) {
  struct worker *w = arg;
  void *pinned = NULL;
  MUST(cudaHostAlloc(&pinned, (size_t)READS * PROBE, cudaHostAllocPortable));
  w->seen = pinned;
  for (int d = 0; d < devices; d++) {
    MUST(cudaSetDevice(d));
    MUST(cudaStreamCreateWithFlags(&w->private[d], cudaStreamNonBlocking));
    MUST(cudaEventCreateWithFlags(&w->event[d], cudaEventDisableTiming));
  }
  for (w->op = 0; w->op < w->ops; w->op++) {
    struct block *b = &w->mine[below(w, MINE)];
    uint64_t what = below(w, 1000);
    if (what < 4) {
      OK(cudaSetDevice((int)below(w, (uint64_t)devices)));
      OK(gpupoolTrim(below(w, 64) * MB));
    } else if (what < 10) renew(w);
    else if (what < 100) swap(w, b);
    else if (b->p) give(w, b);
    else take(w, b);
  }
  for (int k = 0; k < MINE; k++)
    if (w->mine[k].p) give(w, &w->mine[k]);
  compare(w);
  for (int d = 0; d < devices; d++) {
    MUST(cudaSetDevice(d));
    OK(cudaStreamDestroy(w->private[d]));
    OK(cudaEventDestroy(w->event[d]));
  }
  OK(cudaFreeHost(w->seen));
  return NULL;
}

/* A number from the command line, in [least, most]. */
static long number(const char *text, long least, long most) {
  char *end;
  long n = strtol(text, &end, 10);
  if (*end || n < least || n > most) {
    fprintf(stderr, "%s is not a number from %ld to %ld\nusage: stress [OPERATIONS [THREADS [SEED]]]\n", text, least, most);
    exit(2);
  }
  return n;
}

static int threads;
static long oom;

/* Both doors from first to last: `ops` operations, then everything goes back. */
static double round_of(long ops, long seed) {
  cnmemDevice_t d[DEVICES];
  memset(d, 0, sizeof d);
  for (int i = 0; i < devices; i++) d[i].device = i, d[i].size = 16 * MB, d[i].numStreams = NAMED, d[i].streams = named[i];
  EQ(cnmemInit(devices, d, CNMEM_FLAGS_DEFAULT), CNMEM_STATUS_SUCCESS);
  /* One more, without operations, frees what is still on its way between threads. */
  static struct worker w[THREADS], last;
  pthread_t t[THREADS];
  memset(w, 0, sizeof w);
  for (int i = 0; i < threads; i++) {
    w[i].id = i, w[i].rng = (uint64_t)(seed * 1000 + i + 1) * 0x9e3779b97f4a7c15u;
    w[i].ops = ops / threads + (i < ops % threads);
  }
  double start = now_s();
  for (int i = 0; i < threads; i++) pthread_create(&t[i], NULL, work, &w[i]);
  for (int i = 0; i < threads; i++) pthread_join(t[i], NULL);
  last = (struct worker){.id = threads, .rng = (uint64_t)seed};
  memcpy(last.mine, shared, sizeof shared);
  memset(shared, 0, sizeof shared);
  work(&last);
  double seconds = now_s() - start;

  for (int i = 0; i < threads; i++) {
    EQ(w[i].errors, 0);
    oom += w[i].oom;
  }
  EQ(last.errors, 0);
  EQ(cnmemFinalize(), CNMEM_STATUS_SUCCESS);
  for (int i = 0; i < devices; i++) {
    gpupoolStats_t s;
    MUST(cudaSetDevice(i));
    MUST(gpupoolGetStats(&s));
    EQ(s.live, 0);
    EQ(s.mallocs, s.frees);
    MUST(gpupoolTrim(0));
    MUST(gpupoolGetStats(&s));
    EQ(s.held, 0);
    EQ(cudaGetLastError(), 0);
  }
  return seconds;
}

static void look(size_t *free_bytes) {
  for (int i = 0; i < devices; i++) {
    MUST(cudaSetDevice(i));
    free_bytes[i] = device_free();
  }
}

int main(int argc, char **argv) {
  long ops = argc > 1 ? number(argv[1], 1, 1000000000) : 40000;
  threads = argc > 2 ? (int)number(argv[2], 1, THREADS) : 4;
  long seed = argc > 3 ? number(argv[3], 1, 1000000000) : 1;
  struct cudaDeviceProp prop;
  size_t start[DEVICES], warm[DEVICES], end[DEVICES];
  MUST(cudaGetDeviceCount(&devices));
  MUST(cudaGetDeviceProperties(&prop, 0));
  if (devices > DEVICES) devices = DEVICES;
  if (devices < DEVICES) SKIP("several devices: there is one");
  for (int i = 0; i < devices; i++) {
    MUST(cudaSetDevice(i));
    MUST(cudaFree(0));
    /* One of the named streams is a blocking one. */
    for (int k = 0; k < NAMED; k++) MUST(cudaStreamCreateWithFlags(&named[i][k], k ? cudaStreamNonBlocking : cudaStreamDefault));
  }
  /* Nothing is held in the end. A real driver keeps memory of its own for the threads and streams it has seen, so the second
   * round is compared with the first. */
  look(start);
  round_of((ops + 3) / 4, seed);
  look(warm);
  double seconds = round_of(ops, seed + 1);
  look(end);
  for (int i = 0; i < devices; i++) {
    if (strstr(prop.name, "simcuda")) EQ(warm[i], start[i]);
    EQ(end[i], warm[i]);
    MUST(cudaSetDevice(i));
    for (int k = 0; k < NAMED; k++) MUST(cudaStreamDestroy(named[i][k]));
  }
  printf("%ld operations, %d threads, seed %ld, %d devices: %.0f a second, %ld out of memory\n", ops, threads, seed, devices,
         (double)ops / seconds, oom);
  return check_report("stress");
}
