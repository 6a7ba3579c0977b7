/* What must not hang, and what must not be lost by not waiting.
 *
 * hang waits: a stream waits for what another stream's later work sets, with frees and allocations around it in every order
 *   that the bare driver runs through. The real cudaFree waits for the device: a free between wait and set would hang there.
 * hang results: a cudaFree is all that stands between work on a stream and a copy of its result to the host.
 * hang captures: prints what allocation calls and captures answer; the runner compares it with the bare driver's answers.
 * Links: -lcudart -lcuda. */
#define _GNU_SOURCE
#include "../check.h"
#include "driver.h"
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>

static void too_late(int unused) {
  (void)unused;
  static const char text[] = "failed: it hangs\n";
  if (write(1, text, sizeof text - 1) < 0) _exit(4);
  _exit(3);
}
static void dawdle(void *us) { usleep((useconds_t)(uintptr_t)us); }
static void slow(cudaStream_t s, unsigned us) { MUST(cudaLaunchHostFunc(s, dawdle, (void *)(uintptr_t)us)); }

/* ---- waits */

enum step { WAIT, SET, FREE, ALLOC, STEPS };
enum { MOST = 80 };
static CUstream a, b;
static CUdeviceptr flag;
static cuuint32_t value;
static void *old[MOST], *new[MOST];
static int blocks;
static size_t size;

static void step(enum step s) {
  if (s == WAIT) {
    MUST(cuStreamWaitValue32(a, flag, value, CU_STREAM_WAIT_VALUE_GEQ));
    MUST(cuMemsetD8Async(flag + 64, 1, 4, a));
  } else if (s == SET) {
    slow(b, 300);
    MUST(cuStreamWriteValue32(b, flag, value, 0));
  } else if (s == FREE) {
    for (int i = 0; i < blocks; i++) MUST(cudaFree(old[i]));
  } else {
    for (int i = 0; i < blocks; i++) {
      MUST(cudaMalloc(&new[i], size));
      /* Work for the new block on a third stream: it may be held back by nothing but what came before the free. */
      MUST(cudaMemsetAsync(new[i], 7, size, cudaStreamPerThread));
    }
  }
}
/* One order of the four; the streams' earlier work on the blocks is still running when it starts. */
static void one_order(const enum step *order) {
  value++;
  for (int i = 0; i < blocks; i++) {
    MUST(cudaMalloc(&old[i], size));
    MUST(cudaMemsetAsync(old[i], 3, size, i % 2 ? (cudaStream_t)a : (cudaStream_t)b));
  }
  slow((cudaStream_t)a, 200);
  slow((cudaStream_t)b, 200);
  for (int i = 0; i < STEPS; i++) step(order[i]);
  MUST(cuStreamSynchronize(a));
  MUST(cuStreamSynchronize(b));
  MUST(cudaStreamSynchronize(cudaStreamPerThread));
  for (int i = 0; i < blocks; i++) {
    EQ(byte_at((char *)new[i] + size - 1), 7);
    MUST(cudaFree(new[i]));
  }
}
static int place(const enum step *order, enum step s) {
  for (int i = 0; i < STEPS; i++)
    if (order[i] == s) return i;
  return -1;
}
static void waits(void) {
  void *word;
  MUST(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
  MUST(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
  MUST(cudaMalloc(&word, 4096));
  MUST(cudaMemset(word, 0, 4096));
  flag = dev(word);
  int orders = 0;
  static const struct { int blocks; size_t size; } SHAPES[] = {{1, 4096}, {3, 3 << 20}, {MOST, 64 << 10}, {5, 8 << 20}};
  for (size_t k = 0; k < sizeof SHAPES / sizeof *SHAPES; k++)
    for (int n = 0; n < 256; n++) {
      enum step order[STEPS] = {n & 3, n >> 2 & 3, n >> 4 & 3, n >> 6 & 3};
      int seen = 0;
      for (int i = 0; i < STEPS; i++) seen |= 1 << order[i];
      if (seen != 15) continue;
      if (place(order, WAIT) < place(order, FREE) && place(order, FREE) < place(order, SET)) continue;
      blocks = SHAPES[k].blocks, size = SHAPES[k].size;
      one_order(order);
      orders++;
    }
  EQ(orders, 20 * (int)(sizeof SHAPES / sizeof *SHAPES));
  EQ(cudaFree(word), 0);
}

/* ---- results */

static void results(void) {
  enum { N = 1 << 20 };
  CUstream s, other;
  void *result, *scratch;
  unsigned char *host = malloc(N);
  void *pinned;
  MUST(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  MUST(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  MUST(cudaMalloc(&result, N));
  MUST(cudaMallocHost(&pinned, N));
  CUresult (*async)(void *, CUdeviceptr, size_t, CUstream) =
    (CUresult(*)(void *, CUdeviceptr, size_t, CUstream))dlsym(RTLD_DEFAULT, "cuMemcpyDtoHAsync_v2");
  for (int round = 0; round < 60; round++) {
    int want = 1 + round;
    unsigned char *to = round % 2 ? host : pinned;
    memset(to, 0, N);
    MUST(cudaMalloc(&scratch, 300 * KB));
    MUST(cuMemsetD8Async(dev(scratch), 1, 300 * KB, s));
    slow((cudaStream_t)s, 2000);
    MUST(cuMemsetD8Async(dev(result), (unsigned char)want, N, s));
    if (round % 5 == 4) {
      /* A stream that is destroyed while busy counts all the same. */
      MUST(cuStreamDestroy(s));
      MUST(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
    }
    MUST(round % 3 ? (int)cudaFree(scratch) : (int)cuMemFree(dev(scratch)));
    switch (round / 2 % 5) {
    case 0: EQ(cuMemcpyDtoH(to, dev(result), N), 0); break;
    case 1: EQ(cudaMemcpy(to, result, N, cudaMemcpyDeviceToHost), 0); break;
    case 2: EQ(cudaMemcpy(to, result, N, cudaMemcpyDefault), 0); break;
    case 3:
      EQ(cudaMemcpyAsync(to, result, N, cudaMemcpyDeviceToHost, (cudaStream_t)other), 0);
      MUST(cuStreamSynchronize(other));
      break;
    case 4:
      EQ(async(to, dev(result), N, other), 0);
      MUST(cuStreamSynchronize(other));
      break;
    }
    EQ(to[0], want);
    EQ(to[N - 1], want);
    MUST(cuStreamSynchronize(s));
  }
  free(host);
  MUST(cudaFreeHost(pinned));
  MUST(cudaFree(result));
}

/* ---- captures */

enum { ITERATIONS = 20 };
static sem_t go, gone;
struct other {
  int relaxed; /* the thread sets itself to relaxed mode, as frameworks do around their allocations */
  int alloc, release, info; /* the worst answers */
  long errors;
};
static void worse(int *worst, int code) {
  if (code) *worst = code;
}
/* Allocates, works, frees, allocates again: what the first owner's late write must not reach. */
static void use_memory(struct other *o, cudaStream_t s, cudaStream_t t) {
  void *p = NULL, *q = NULL;
  size_t f, total;
  static unsigned char seen[2]; /* late copies may come after this function's end */
  seen[0] = seen[1] = 5;
  int e = cudaMalloc(&p, 200 * KB);
  worse(&o->alloc, e);
  worse(&o->info, cudaMemGetInfo(&f, &total));
  if (e) return;
  MUST(cudaLaunchHostFunc(s, dawdle, (void *)(uintptr_t)1000));
  MUST(cudaMemsetAsync(p, 9, 200 * KB, s));
  e = cudaFree(p);
  worse(&o->release, e);
  if (e) return;
  e = cudaMalloc(&q, 200 * KB);
  worse(&o->alloc, e);
  if (e) return;
  MUST(cudaMemsetAsync(q, 5, 200 * KB, t));
  /* To wait for a stream is forbidden here: it is given time instead. */
  MUST(cudaLaunchHostFunc(t, dawdle, (void *)(uintptr_t)1500));
  MUST(cudaMemcpyAsync(&seen[0], q, 1, cudaMemcpyDeviceToHost, t));
  MUST(cudaMemcpyAsync(&seen[1], (char *)q + 200 * KB - 1, 1, cudaMemcpyDeviceToHost, t));
  usleep(5000);
  if (seen[0] != 5 || seen[1] != 5) o->errors++;
  worse(&o->release, cudaFree(q));
}
static cudaStream_t side[2];
static void *other_thread(void *arg) {
  struct other *o = arg;
  MUST(cudaFree(0));
  if (o->relaxed) {
    enum cudaStreamCaptureMode m = cudaStreamCaptureModeRelaxed;
    MUST(cudaThreadExchangeStreamCaptureMode(&m));
  }
  for (int i = 0; i < ITERATIONS; i++) {
    sem_wait(&go);
    use_memory(o, side[0], side[1]);
    cudaGetLastError();
    sem_post(&gone);
  }
  return NULL;
}
static size_t nodes_of(cudaGraph_t g) {
  CUresult (*get)(CUgraph, void *, size_t *) = (CUresult(*)(CUgraph, void *, size_t *))dlsym(RTLD_DEFAULT, "cuGraphGetNodes");
  size_t n = 0;
  if (get && g) get((CUgraph)g, NULL, &n);
  return n;
}

/* who: 0 another thread, 1 another in relaxed mode, 2 the capturing thread itself. */
static void capture(int who, enum cudaStreamCaptureMode mode) {
  static const char *WHO[] = {"another", "another-relaxed", "the-same"}, *MODE[] = {"global", "thread-local", "relaxed"};
  struct other o = {.relaxed = who == 1};
  pthread_t t;
  cudaStream_t s;
  void *block;
  int begin = 0, end = 0;
  size_t nodes = 0;
  sem_init(&go, 0, 0);
  sem_init(&gone, 0, 0);
  MUST(cudaMalloc(&block, 4096));
  MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  if (who < 2) pthread_create(&t, NULL, other_thread, &o);
  for (int i = 0; i < ITERATIONS; i++) {
    cudaGraph_t graph = NULL;
    worse(&begin, cudaStreamBeginCapture(s, mode));
    if (i % 2) cudaMemsetAsync(block, 1, 4096, s);
    if (who < 2) {
      sem_post(&go);
      sem_wait(&gone);
    } else {
      use_memory(&o, side[0], side[1]);
      cudaGetLastError();
    }
    cudaMemsetAsync(block, 2, 4096, s);
    cudaGetLastError();
    worse(&end, cudaStreamEndCapture(s, &graph));
    cudaGetLastError();
    nodes += nodes_of(graph);
    if (graph) MUST(cudaGraphDestroy(graph));
    MUST(cudaDeviceSynchronize());
  }
  if (who < 2) pthread_join(t, NULL);
  EQ(o.errors, 0);
  printf("capture: %s %s alloc=%d free=%d info=%d begin=%d end=%d nodes=%zu\n", WHO[who], MODE[mode], o.alloc, o.release, o.info,
         begin, end, nodes);
  /* All is well afterwards. */
  EQ(cudaFree(block), 0);
  EQ(cudaMalloc(&block, 200 * KB), 0);
  EQ(cudaMemset(block, 1, 200 * KB), 0);
  EQ(byte_at(block), 1);
  EQ(cudaFree(block), 0);
  MUST(cudaStreamDestroy(s));
}
static void captures(void) {
  for (int k = 0; k < 2; k++) MUST(cudaStreamCreateWithFlags(&side[k], cudaStreamNonBlocking));
  /* Something to allocate from, freed before and not. */
  void *p[8];
  for (int i = 0; i < 8; i++) MUST(cudaMalloc(&p[i], 200 * KB));
  for (int i = 0; i < 8; i += 2) MUST(cudaFree(p[i]));
  for (int who = 0; who < 3; who++)
    for (int mode = 0; mode < 3; mode++) capture(who, (enum cudaStreamCaptureMode)mode);
  for (int i = 1; i < 8; i += 2) EQ(cudaFree(p[i]), 0);
}

int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "";
  signal(SIGALRM, too_late);
  alarm(60);
  MUST(cudaFree(0));
  if (!strcmp(mode, "waits")) waits();
  else if (!strcmp(mode, "results")) results();
  else if (!strcmp(mode, "captures")) captures();
  else return fprintf(stderr, "usage: %s waits|results|captures\n", argv[0]), 2;
  return check_report("hang");
}
