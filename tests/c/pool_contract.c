/* The gpupool door's contract, through <gpupool.h> alone, and the cases of bug reports that need no preload.
 * Links: -lgpupool -lcudart -lpthread. A few seconds. */
#define _GNU_SOURCE
#include "check.h"
#include <gpupool.h>
#include <pthread.h>
#include <stdint.h>

#define MB ((size_t)1 << 20)

static cudaStream_t new_stream(void) {
  cudaStream_t s;
  MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  return s;
}
static void *get(size_t n, cudaStream_t s) {
  void *p = NULL;
  MUST(gpupoolMalloc(&p, n, s));
  return p;
}

static void *no_context(void *arg) {
  void *p = (void *)1;
  (void)arg;
  EQ(gpupoolMalloc(&p, 512, NULL), 201); /* E3 */
  CHECK(p == NULL);
  return NULL;
}

static void arguments(void) {
  void *p = (void *)1;
  gpupoolStats_t a, b;
  pthread_t t;
  pthread_create(&t, NULL, no_context, NULL);
  pthread_join(t, NULL);
  EQ(gpupoolMalloc(&p, 0, NULL), 0);
  CHECK(p == NULL);
  EQ(gpupoolMalloc(NULL, 4, NULL), 1);
  EQ(gpupoolFree(NULL, NULL), 0);
  p = get(1, NULL);
  CHECK((uintptr_t)p % 512 == 0);
  MUST(gpupoolGetStats(&a));
  void *q = (void *)1;
  EQ(gpupoolMalloc(&q, SIZE_MAX, NULL), 2); /* E2 */
  CHECK(q == NULL);
  EQ(gpupoolMalloc(&q, (size_t)4 << 40, NULL), 2);
  EQ(gpupoolFree((char *)p + 256, NULL), 1);
  EQ(gpupoolFree(&a, NULL), 1);
  EQ(gpupoolRecordStream((char *)p + 256, NULL), 1);
  EQ(gpupoolGetStats(NULL), 1);
  MUST(gpupoolGetStats(&b));
  EQ(a.live, b.live);
  EQ(gpupoolFree(p, NULL), 0);
  EQ(gpupoolFree(p, NULL), 1);
  p = get(MB, NULL); /* the next request works */
  EQ(cudaGetLastError(), 0);
  EQ(gpupoolFree(p, NULL), 0);
  CHECK(gpupoolErrorString(2) && gpupoolErrorString(-5) && gpupoolVersion() == 100);
}

static void order(void) {
  cudaStream_t a = new_stream(), b = new_stream();
  for (size_t n = 4096; n <= 64 * MB; n *= 128) {
    void *p = get(n, a);
    gate_t *g = gate_close(a);
    MUST(cudaMemsetAsync(p, 1, n, a));
    EQ(gpupoolFree(p, a), 0);
    void *q = get(n, a); /* the same stream: at once */
    CHECK(q == p);
    EQ(gpupoolFree(q, a), 0);
    q = get(n, b);
    CHECK(q != p); /* S2, S7: the work before the free is not done */
    MUST(cudaMemsetAsync(q, 2, n, b));
    gate_open(g);
    EQ(byte_at(q), 2);
    EQ(gpupoolFree(q, b), 0);
  }
  void *p = get(2 * MB, a);
  EQ(gpupoolRecordStream(p, b), 0);
  gate_t *g = gate_close(b);
  MUST(cudaMemsetAsync(p, 1, 2 * MB, b));
  EQ(gpupoolFree(p, a), 0);
  void *q = get(2 * MB, a);
  CHECK(q != p);
  MUST(cudaMemsetAsync(q, 2, 2 * MB, a));
  gate_open(g);
  EQ(byte_at(q), 2);
  EQ(gpupoolFree(q, a), 0);
  /* A stream that dies busy, and a new one under its handle. */
  cudaStream_t dying = new_stream();
  p = get(MB, dying);
  g = gate_close(dying);
  MUST(cudaMemsetAsync(p, 1, MB, dying));
  EQ(gpupoolFree(p, dying), 0);
  MUST(cudaStreamDestroy(dying));
  cudaStream_t heir = new_stream();
  q = get(MB, heir);
  CHECK(q != p);
  MUST(cudaMemsetAsync(q, 2, MB, heir));
  gate_open(g);
  EQ(byte_at(q), 2);
  EQ(gpupoolFree(q, heir), 0);
  MUST(cudaDeviceSynchronize());
  MUST(cudaStreamDestroy(heir));
  MUST(cudaStreamDestroy(a));
  MUST(cudaStreamDestroy(b));
}

static void *other_thread(void *arg) {
  void **pq = arg;
  MUST(cudaFree(0));
  pq[1] = get(MB, cudaStreamPerThread);
  MUST(cudaMemsetAsync(pq[1], 2, MB, cudaStreamPerThread));
  MUST(cudaStreamSynchronize(cudaStreamPerThread));
  return NULL;
}
/* S1: the per-thread default streams of two threads are two streams. */
static void per_thread(void) {
  void *pq[2] = {get(MB, cudaStreamPerThread), NULL};
  gate_t *g = gate_close(cudaStreamPerThread);
  MUST(cudaMemsetAsync(pq[0], 1, MB, cudaStreamPerThread));
  EQ(gpupoolFree(pq[0], cudaStreamPerThread), 0);
  pthread_t t;
  pthread_create(&t, NULL, other_thread, pq);
  pthread_join(t, NULL);
  CHECK(pq[0] != pq[1]);
  gate_open(g);
  EQ(byte_at(pq[1]), 2);
  EQ(gpupoolFree(pq[1], cudaStreamPerThread), 0);
}

static void giving_back(void) {
  gpupoolStats_t s;
  void *keep = get(4 * MB, NULL), *go = get(200 * MB, NULL); /* S5: a live buffer stays as it is */
  MUST(cudaMemset(keep, 7, 4 * MB));
  EQ(gpupoolFree(go, NULL), 0);
  MUST(cudaDeviceSynchronize());
  size_t before = device_free();
  MUST(gpupoolGetStats(&s));
  uint64_t held = s.held;
  EQ(gpupoolTrim(0), 0);
  MUST(gpupoolGetStats(&s));
  /* Preloaded, what the pool holds idle counts as free already. */
  CHECK(s.held + 100 * MB < held && device_free() >= before);
  EQ(byte_at(keep), 7);
  EQ(gpupoolFree(keep, NULL), 0);
}

static void capture(void) {
  cudaStream_t c = new_stream(), a = new_stream();
  /* Another stream's own memory and new memory do not touch the capture. Looking for memory that other streams freed can: the
   * pool does not see captures of streams that it is not called with. Hence the trim, and hence this comes before anything is
   * freed in a capture, which is never given back. */
  for (int mode = 0; mode < 3; mode++) {
    cudaGraph_t graph = NULL;
    MUST(cudaDeviceSynchronize());
    EQ(gpupoolTrim(0), 0);
    EQ(gpupoolFree(get(MB, a), a), 0);
    MUST(cudaStreamBeginCapture(c, mode));
    for (size_t n = 512; n <= 256 * MB; n *= 8) {
      void *p = NULL;
      EQ(gpupoolMalloc(&p, n, a), 0);
      EQ(cudaMemsetAsync(p, 1, n, a), 0);
      EQ(gpupoolFree(p, a), 0);
    }
    EQ(cudaStreamEndCapture(c, &graph), 0);
    if (graph) cudaGraphDestroy(graph);
  }
  for (int mode = 0; mode < 3; mode++) {
    cudaGraph_t graph = NULL;
    void *p = get(2 * MB, c);
    MUST(cudaStreamBeginCapture(c, mode));
    void *q = get(3 * MB, c);
    EQ(gpupoolFree(p, c), 0);
    EQ(gpupoolFree(q, c), 0);
    EQ(cudaStreamEndCapture(c, &graph), 0);
    if (graph) cudaGraphDestroy(graph);
  }
  EQ(cudaGetLastError(), 0);
  MUST(cudaDeviceSynchronize());
  MUST(cudaStreamDestroy(a));
  MUST(cudaStreamDestroy(c));
}

/* E1: what streams hold idle goes back before an allocation fails; S3: many threads at the limit. */
static void *at_the_limit(void *arg) {
  unsigned seed = (unsigned)(uintptr_t)arg;
  MUST(cudaFree(0));
  cudaStream_t s = new_stream();
  long bad = 0;
  for (int i = 0; i < 300; i++) {
    void *p = NULL;
    size_t n = (1 + (size_t)rand_r(&seed) % 64) * MB;
    int r = gpupoolMalloc(&p, n, s);
    if (r == 2) continue;
    bad += r != 0;
    bad += cudaMemsetAsync(p, 1, 64, s) != 0;
    bad += gpupoolFree(p, s) != 0;
    if (i % 50 == 0) gpupoolTrim(0);
  }
  MUST(cudaStreamSynchronize(s));
  MUST(cudaStreamDestroy(s));
  return (void *)bad;
}
static void limits(void) {
  size_t f = device_free(), leave = 1024 * MB;
  void *hog = NULL;
  if (f < 2 * leave) leave = f / 2;
  MUST(cudaMalloc(&hog, f - leave));
  cudaStream_t a = new_stream(), b = new_stream();
  void *p[16];
  int n = 0;
  while (n < 16 && gpupoolMalloc(&p[n], leave / 8, a) == 0) n++;
  CHECK(n >= 6);
  for (int i = 0; i < n; i++) {
    MUST(cudaMemsetAsync(p[i], 1, leave / 8, a));
    EQ(gpupoolFree(p[i], a), 0);
  }
  void *q = NULL;
  EQ(gpupoolMalloc(&q, leave / 2, b), 0);
  EQ(cudaGetLastError(), 0);
  MUST(cudaMemsetAsync(q, 2, leave / 2, b));
  EQ(byte_at((char *)q + leave / 2 - 1), 2);
  EQ(gpupoolFree(q, b), 0);
  EQ(gpupoolMalloc(&q, leave * 2, b), 2);
  pthread_t t[8];
  for (int i = 0; i < 8; i++) pthread_create(&t[i], NULL, at_the_limit, (void *)(uintptr_t)(i + 1));
  for (int i = 0; i < 8; i++) {
    void *bad = NULL;
    pthread_join(t[i], &bad);
    EQ((long)bad, 0);
  }
  MUST(cudaStreamDestroy(a));
  MUST(cudaStreamDestroy(b));
  MUST(cudaFree(hog));
}

static void allocator_slots(void) {
  const THCDeviceAllocator *thc = gpupoolTHCDeviceAllocator();
  void *p = NULL;
  size_t idle = 0, largest = 0;
  EQ(thc->malloc(thc->state, &p, 1000, NULL), 0);
  MUST(cudaMemset(p, 9, 1000));
  EQ(thc->realloc(thc->state, &p, 1000, 3 * MB, NULL), 0);
  EQ(byte_at((char *)p + 999), 9);
  EQ(thc->free(thc->state, p), 0);
  EQ(thc->free(thc->state, p), 1);
  EQ(thc->cacheInfo(thc->state, 0, &idle, &largest), 0);
  CHECK(idle >= largest && largest >= 3 * MB);
  EQ(thc->emptyCache(thc->state), 0);
  EQ(gpupool_torch_malloc(0, 0, NULL) == NULL, 1);
  p = gpupool_torch_malloc(12345, 0, NULL);
  CHECK(p != NULL);
  gpupool_torch_free(p, 12345, 0, NULL);
}

/* E7: what the driver says of a pooled pointer. S4: a peer may use it, whenever access was enabled. */
static void attributes_and_peers(void) {
  int count = 0, can = 0;
  struct cudaPointerAttributes a;
  void *before = get(MB, NULL), *after = NULL;
  MUST(cudaPointerGetAttributes(&a, before));
  EQ(a.type, cudaMemoryTypeDevice);
  EQ(a.device, 0);
  MUST(cudaGetDeviceCount(&count));
  if (count > 1) MUST(cudaDeviceCanAccessPeer(&can, 1, 0));
  if (!can) {
    SKIP("peer access: there is no second device that could be a peer");
    EQ(gpupoolFree(before, NULL), 0);
    return;
  }
  MUST(cudaSetDevice(1));
  MUST(cudaDeviceEnablePeerAccess(0, 0));
  MUST(cudaSetDevice(0));
  after = get(40 * MB, NULL);
  MUST(cudaSetDevice(1));
  cudaStream_t s = new_stream();
  MUST(cudaMemsetAsync(before, 3, MB, s));
  MUST(cudaMemsetAsync(after, 4, 40 * MB, s));
  MUST(cudaStreamSynchronize(s));
  /* A free of device 0's memory, with device 1 current. */
  MUST(cudaSetDevice(0));
  EQ(byte_at(before), 3);
  EQ(byte_at((char *)after + 40 * MB - 1), 4);
  MUST(cudaSetDevice(1));
  EQ(gpupoolFree(before, NULL), 0);
  EQ(gpupoolFree(after, NULL), 0);
  MUST(cudaStreamDestroy(s));
  MUST(cudaSetDevice(0));
}

/* S8: nothing of the old context is handed out after a reset. */
static void reset(void) {
  void *p = get(MB, NULL);
  EQ(gpupoolFree(p, NULL), 0);
  MUST(cudaDeviceReset());
  MUST(cudaFree(0));
  gpupoolStats_t s;
  MUST(gpupoolGetStats(&s));
  EQ(s.held, 0);
  p = get(MB, NULL);
  EQ(cudaMemset(p, 5, MB), 0);
  EQ(byte_at(p), 5);
  EQ(gpupoolFree(p, NULL), 0);
}

int main(void) {
  MUST(cudaFree(0));
  arguments();
  order();
  per_thread();
  giving_back();
  capture();
  allocator_slots();
  attributes_and_peers();
  limits();
  reset();
  return check_report("pool_contract");
}
