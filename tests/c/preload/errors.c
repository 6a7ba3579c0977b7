/* What the allocation calls answer: as the bare driver and runtime do. Cases E1 to E7.
 *
 * errors: all but the next. errors oom: E1, wants a small device (SIMCUDA_MEM=64m).
 * Links: -lcudart -lcuda. */
#define _GNU_SOURCE
#include "../check.h"
#include "driver.h"
#include <pthread.h>
#include <stdint.h>

static int simulated;

/* Before cuInit, and after it without a context. Comes before the runtime is used. */
static void before_context(void) {
  CUdeviceptr p = 7, base;
  size_t f, t;
  unsigned type;
  EQ(cuMemAlloc(&p, 4), 3);
  EQ(cuMemFree(0x10000), 3);
  EQ(cuMemGetInfo(&f, &t), 3);
  EQ(cuMemGetAddressRange(&base, &f, 0x10000), 3);
  EQ(cuPointerGetAttribute(&type, ATTR_TYPE, 0x10000), 3);
  MUST(cuInit(0));
  EQ(cuMemAlloc(&p, 4), 201);
  EQ(cuMemAlloc(&p, SIZE_MAX), 201);
  EQ(cuMemGetInfo(&f, &t), 201);
  EQ(cuMemFree(0), 0);
  EQ(cuMemFree(0x10000), 201);
}

/* E3: a thread that has no context, while another has. */
static void *without_context(void *block) {
  CUdeviceptr p = 7;
  for (int i = 0; i < 3; i++) EQ(cuMemAlloc(&p, 4096), 201);
  EQ(cuMemFree(0), 0);
  EQ(cuMemGetInfo(NULL, NULL), 201);
  /* The runtime makes one current. */
  void *v = NULL;
  EQ(cudaMalloc(&v, 4096), 0);
  EQ(cudaFree(v), 0);
  EQ(cuMemAlloc(&p, 4096), 0);
  EQ(cuMemFree(p), 0);
  EQ(cudaFree(block), 0);
  return NULL;
}

static void sizes_and_pointers(void) {
  CUdeviceptr p = 7, q;
  void *v = (void *)7;
  EQ(cuMemAlloc(&p, 0), 1);
  EQ(p, 0);
  EQ(cuMemAlloc(NULL, 4), 1);
  EQ(cudaMalloc(&v, 0), 0);
  CHECK(v == NULL);
  EQ(cudaGetLastError(), 0);
  EQ(cudaMalloc(NULL, 4), 1);
  EQ(cudaGetLastError(), 1);
  EQ(cudaFree(NULL), 0);
  EQ(cuMemFree(0), 0);
  static const size_t SIZES[] = {1, 511, 512, 513, 4096, 100000, 1 << 20, (1 << 20) + 1, 3 << 20, 40 << 20};
  for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
    size_t n = SIZES[i];
    MUST(cuMemAlloc(&p, n));
    EQ(p % 256, 0);
    EQ(cudaMemset((void *)(size_t)p, 9, n), 0);
    EQ(byte_at((char *)(size_t)p + n - 1), 9);
    /* Interior, double, foreign. */
    EQ(cuMemFree(p + 1), 1);
    if (n > 512) EQ(cuMemFree(p + 512), 1);
    EQ(cuMemFree(p), 0);
    EQ(cuMemFree(p), 1);
    MUST(cudaMalloc(&v, n));
    EQ(cudaGetLastError(), 0);
    EQ(cudaFree((char *)v + 1), 1);
    EQ(cudaPeekAtLastError(), 1);
    EQ(cudaGetLastError(), 1);
    EQ(cudaFree(v), 0);
    EQ(cudaGetLastError(), 0);
    EQ(cudaFree(v), 1);
    EQ(cudaGetLastError(), 1);
    EQ(cudaGetLastError(), 0);
  }
  EQ(cuMemFree(0x10000), 1);
  EQ(cudaFree((void *)0x10000), 1);
  EQ(cudaFree(&v), 1);
  cudaGetLastError();
  /* What is freed through the one may come from the other. */
  MUST(cuMemAlloc(&p, 5000));
  EQ(cudaFree((void *)(size_t)p), 0);
  MUST(cudaMalloc(&v, 5000));
  EQ(cuMemFree(dev(v)), 0);
  /* Two live blocks never overlap. */
  MUST(cuMemAlloc(&p, 4096));
  MUST(cuMemAlloc(&q, 4096));
  CHECK(p + 4096 <= q || q + 4096 <= p);
  EQ(cuMemFree(q), 0);
  EQ(cuMemFree(p), 0);
}

/* E2: nothing changes by what cannot be. */
static void too_much(void) {
  size_t before = device_free(), total = 0;
  CUdeviceptr p;
  void *v;
  EQ(cuMemGetInfo(NULL, &total), 0);
  size_t sizes[] = {SIZE_MAX, SIZE_MAX - 511, SIZE_MAX / 2, (size_t)4 << 40, total + MB, total};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    /* The whole device is not to be had, or just so: bare drivers keep some for themselves, simcuda does not. */
    int e = cudaMalloc(&v, sizes[i]);
    if (sizes[i] == total && e == 0) EQ(cudaFree(v), 0);
    else EQ(e, 2);
    EQ(cudaGetLastError(), e);
    EQ(cudaGetLastError(), 0);
    e = cuMemAlloc(&p, sizes[i]);
    if (sizes[i] == total && e == 0) EQ(cuMemFree(p), 0);
    else EQ(e, 2);
    CHECK(device_free() + 2 * MB >= before);
    EQ(cudaMalloc(&v, 4096), 0);
    EQ(cudaMemset(v, 1, 4096), 0);
    EQ(cudaFree(v), 0);
  }
  EQ(cudaGetLastError(), 0);
}

/* E1: what is cached goes back before memory is short, and nobody hears of it. */
static void out_of_memory(void) {
  size_t total = 0, unit = 0;
  void *v[64], *w;
  MUST(cuMemGetInfo(NULL, &total));
  unit = total / 64 / 2 * 2;
  for (int round = 0; round < 4; round++) {
    size_t n = round % 2 ? unit * 5 : unit;
    int count = (int)(total / n) - 2, got = 0;
    for (; got < count && got < 64; got++)
      if (cudaMalloc(&v[got], n)) break;
    EQ(got, count < 64 ? count : 64);
    EQ(cudaGetLastError(), 0);
    for (int i = 0; i < got; i++) EQ(cudaMemset(v[i], i, n), 0);
    for (int i = 0; i < got; i++) EQ(byte_at(v[i]), i);
    for (int i = 0; i < got; i++) EQ(cudaFree(v[i]), 0);
    EQ(cudaMalloc(&w, unit * 52), 0);
    EQ(cudaGetLastError(), 0);
    EQ(cudaMemset(w, 3, unit * 52), 0);
    EQ(byte_at((char *)w + unit * 52 - 1), 3);
    EQ(cudaFree(w), 0);
  }
  /* Short of memory in earnest: 2, and the next that fits succeeds. */
  EQ(cudaMalloc(&w, total / 2), 0);
  EQ(cudaMalloc(&v[0], total / 2 + MB), 2);
  EQ(cudaGetLastError(), 2);
  EQ(cudaMalloc(&v[0], total / 4), 0);
  EQ(cudaGetLastError(), 0);
  EQ(cudaFree(w), 0);
  EQ(cudaFree(v[0]), 0);
  EQ(cudaDeviceSynchronize(), 0);
  CHECK(device_free() + 4 * MB >= total);
}

/* E4: stream-ordered memory freed with cuMemFree, and the reverse. */
static void cross_frees(void) {
  CUdeviceptr p;
  CUstream s;
  void *v, *w;
  MUST(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  for (int i = 0; i < 20; i++) {
    EQ(cuMemAllocAsync(&p, 4096, s), 0);
    EQ(cuMemsetD8Async(p, 1, 4096, s), 0);
    EQ(cuMemFree(p), 0);
    EQ(cuMemAllocAsync(&p, 4096, s), 0);
    EQ(cudaFree((void *)(size_t)p), 0);
    EQ(cuMemAlloc(&p, 4096), 0);
    EQ(cuMemsetD8Async(p, 1, 4096, s), 0);
    EQ(cuMemFreeAsync(p, s), 0);
    EQ(cudaMalloc(&v, 4096), 0);
    EQ(cudaFreeAsync(v, s), 0);
    EQ(cudaMallocAsync(&v, 4096, s), 0);
    EQ(cuMemFree(dev(v)), 0);
  }
  /* A free on a stream waits for that stream: a late write of it never shows in the next block. */
  gate_t *g = gate_close(s);
  MUST(cudaMalloc(&v, MB));
  EQ(cudaMemsetAsync(v, 0xaa, MB, s), 0);
  EQ(cudaFreeAsync(v, s), 0);
  CUstream t;
  MUST(cuStreamCreate(&t, CU_STREAM_NON_BLOCKING));
  MUST(cudaMalloc(&w, MB));
  EQ(cudaMemsetAsync(w, 0xbb, MB, t), 0);
  gate_open(g);
  EQ(byte_at(w), 0xbb);
  EQ(byte_at((char *)w + MB - 1), 0xbb);
  EQ(cudaFree(w), 0);
  EQ(cuStreamDestroy(s), 0);
  EQ(cuStreamDestroy(t), 0);
}

/* E6: managed memory is nobody's but the driver's. */
static void managed(void) {
  void *v;
  unsigned is = 7;
  struct cudaPointerAttributes a;
  MUST(cudaMallocManaged(&v, MB, cudaMemAttachGlobal));
  memset(v, 1, MB); /* the CPU may write */
  EQ(cuPointerGetAttribute(&is, ATTR_MANAGED, dev(v)), 0);
  EQ(is, 1);
  EQ(cudaPointerGetAttributes(&a, v), 0);
  EQ(a.type, cudaMemoryTypeManaged);
  EQ(cudaFree(v), 0);
  EQ(cudaFree(v), 1);
  cudaGetLastError();
}

static void attributes_of(CUdeviceptr p, size_t size, int ordinal) {
  static const size_t AT[] = {0, 1, 255};
  for (size_t i = 0; i < sizeof AT / sizeof *AT && AT[i] < size; i++) {
    CUdeviceptr at = p + AT[i], base = 1, start = 1, device_pointer = 1;
    size_t range = 1, bytes = 1;
    unsigned type = 7, is_managed = 7, type2 = 7;
    int device = 7;
    CUcontext context = NULL, current = NULL;
    struct cudaPointerAttributes a;
    EQ(cuMemGetAddressRange(&base, &range, at), 0);
    EQ(base, p);
    EQ(range, size);
    EQ(cuMemGetAddressRange(NULL, &range, at), 0);
    EQ(cuMemGetAddressRange(&base, NULL, at), 0);
    EQ(cuPointerGetAttribute(&type, ATTR_TYPE, at), 0);
    EQ(type, 2);
    EQ(cuPointerGetAttribute(&is_managed, ATTR_MANAGED, at), 0);
    EQ(is_managed, 0);
    EQ(cuPointerGetAttribute(&device, ATTR_ORDINAL, at), 0);
    EQ(device, ordinal);
    EQ(cuPointerGetAttribute(&start, ATTR_START, at), 0);
    EQ(start, p);
    EQ(cuPointerGetAttribute(&bytes, ATTR_SIZE, at), 0);
    EQ(bytes, size);
    EQ(cuPointerGetAttribute(&device_pointer, ATTR_DEVICE_POINTER, at), 0);
    EQ(device_pointer, at);
    /* Programs make that context current before they work with the pointer. */
    MUST(cuCtxGetCurrent(&current));
    EQ(cuPointerGetAttribute(&context, ATTR_CONTEXT, at), 0);
    CHECK(context == current);
    int which[] = {ATTR_TYPE, ATTR_START, ATTR_SIZE, ATTR_ORDINAL, ATTR_CONTEXT};
    void *out[] = {&type2, &start, &bytes, &device, &context};
    type2 = 7, start = 1, bytes = 1, device = 7, context = NULL;
    EQ(cuPointerGetAttributes(5, which, out, at), 0);
    EQ(type2, 2);
    EQ(start, p);
    EQ(bytes, size);
    EQ(device, ordinal);
    CHECK(context == current);
    EQ(cudaPointerGetAttributes(&a, (void *)(size_t)at), 0);
    EQ(a.type, cudaMemoryTypeDevice);
    EQ(a.device, ordinal);
    EQ(dev(a.devicePointer), at);
  }
}

/* E7, on every device. */
static void attributes(void) {
  int devices = 0;
  MUST(cudaGetDeviceCount(&devices));
  if (devices < 2) SKIP("attributes on a second device: there is one");
  for (int d = 0; d < devices && d < 2; d++) {
    static const size_t SIZES[] = {1, 700, 4096, 4096, 3 << 20, (5 << 20) + 17};
    enum { N = sizeof SIZES / sizeof *SIZES };
    CUdeviceptr p[N];
    unsigned long long id[N];
    MUST(cudaSetDevice(d));
    for (int i = 0; i < N; i++) {
      void *v;
      MUST(cudaMalloc(&v, SIZES[i]));
      p[i] = dev(v);
    }
    for (int i = 0; i < N; i++) {
      attributes_of(p[i], SIZES[i], d);
      EQ(cuPointerGetAttribute(&id[i], ATTR_BUFFER_ID, p[i]), 0);
      for (int k = 0; k < i; k++) CHECK(id[k] != id[i]);
    }
    CUdeviceptr old = p[3];
    EQ(cuMemFree(p[3]), 0);
    MUST(cuMemAlloc(&p[3], SIZES[3]));
    /* Even at the same place a new block is another buffer. */
    unsigned long long again = id[3];
    EQ(cuPointerGetAttribute(&again, ATTR_BUFFER_ID, p[3]), 0);
    CHECK(again != id[3]);
    if (old == p[3]) attributes_of(p[3], SIZES[3], d);
    for (int i = 0; i < N; i++) EQ(cuMemFree(p[i]), 0);
    /* What is free is no block, cached or not. */
    CUdeviceptr base;
    size_t range;
    CHECK(cuMemGetAddressRange(&base, &range, p[0]) != 0);
    unsigned type = 0;
    EQ(cuPointerGetAttribute(&type, ATTR_TYPE, p[0]), 1);
  }
  MUST(cudaSetDevice(0));
  int on_stack;
  struct cudaPointerAttributes a;
  EQ(cudaPointerGetAttributes(&a, &on_stack), 0);
  EQ(a.type, cudaMemoryTypeUnregistered);
  cudaGetLastError();
}

/* Free memory falls by what is live, comes back with it, and is never more than there is. */
static void memory_info(void) {
  size_t first, f, t;
  void *v[8];
  MUST(cudaDeviceSynchronize());
  MUST(cudaMemGetInfo(&first, &t));
  CHECK(first <= t);
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < 8; i++) {
      MUST(cudaMalloc(&v[i], 10 * MB));
      MUST(cudaMemGetInfo(&f, &t));
      size_t live = (size_t)(i + 1) * 10 * MB;
      CHECK(f <= first - live + MB && f + live + 4 * MB >= first && f <= t);
      if (f > first - live + MB || f + live + 4 * MB < first)
        printf("%zu MiB live: free %zu, was %zu at first\n", live / MB, f, first);
    }
    for (int i = 0; i < 8; i++) EQ(cudaFree(v[i]), 0);
    MUST(cudaMemGetInfo(&f, &t));
    CHECK(f + 4 * MB >= first && f <= t);
  }
  EQ(cuMemGetInfo(NULL, NULL), 0);
  EQ(cuMemGetInfo(&f, NULL), 0);
  EQ(cuMemGetInfo(NULL, &t), 0);
}

/* E5: memory that a graph allocates. */
static void graph_memory(void) {
  if (simulated) { SKIP("E5: simcuda has no allocation nodes"); return; }
  CUstream s;
  void *v = NULL;
  cudaGraph_t graph;
  CUresult (*instantiate)(void **, CUgraph, unsigned long long) =
    (CUresult(*)(void **, CUgraph, unsigned long long))dlsym(RTLD_DEFAULT, "cuGraphInstantiateWithFlags");
  CUresult (*launch)(void *, CUstream) = (CUresult(*)(void *, CUstream))dlsym(RTLD_DEFAULT, "cuGraphLaunch");
  void *exec = NULL;
  MUST(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
  MUST(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
  EQ(cudaMallocAsync(&v, MB, s), 0);
  EQ(cudaMemsetAsync(v, 4, MB, s), 0);
  EQ(cudaStreamEndCapture(s, &graph), 0);
  MUST(instantiate(&exec, (CUgraph)graph, 0));
  MUST(launch(exec, s));
  MUST(cuStreamSynchronize(s));
  EQ(byte_at(v), 4);
  EQ(cudaFree(v), 0);
  EQ(cuStreamDestroy(s), 0);
}

int main(int argc, char **argv) {
  if (argc > 1 && !strcmp(argv[1], "oom")) {
    MUST(cudaFree(0));
    out_of_memory();
    return check_report("errors oom");
  }
  before_context();
  struct cudaDeviceProp prop;
  MUST(cudaGetDeviceProperties(&prop, 0));
  simulated = strstr(prop.name, "simcuda") != NULL;
  void *v;
  pthread_t t;
  MUST(cudaMalloc(&v, 4096));
  pthread_create(&t, NULL, without_context, v);
  pthread_join(t, NULL);
  sizes_and_pointers();
  too_much();
  cross_frees();
  managed();
  attributes();
  memory_info();
  graph_memory();
  EQ(cudaGetLastError(), 0);
  return check_report("errors");
}
