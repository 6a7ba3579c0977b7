/* What a CUDA driver answers: facts that gpupool builds on, read off a real driver. The same program passes on simcuda and on
 * a GPU; where they differ, simcuda is wrong.
 * Links: -lcudart -ldl -lpthread. The driver is opened at run time. About 2 s. */
#define _GNU_SOURCE
#include "check.h"
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>

/* cuda.h's CU_MEM_LOCATION_TYPE_HOST_NUMA, which small headers lack. */
static const int HOST_NUMA = 3;

static void *lib;
static void *sym(const char *name) {
  void *p = dlsym(lib, name);
  if (!p) printf("the driver has no %s\n", name), exit(2);
  return p;
}
typedef unsigned long long u64;
#define F(ret_args, name) ((CUresult(*) ret_args)sym(name))

static CUresult (*Init)(unsigned), (*Alloc)(CUdeviceptr *, size_t), (*Free)(CUdeviceptr), (*Info)(size_t *, size_t *);
static CUresult (*CtxRecord)(CUcontext, CUevent), (*CtxWait)(CUcontext, CUevent), (*EvQuery)(CUevent), (*CtxSync)(void);
static CUresult (*StreamId)(CUstream, u64 *), (*CtxCurrent)(CUcontext *);
static CUresult (*GetProc2)(const char *, void **, int, cuuint64_t, int *);

static void before_context(void) {
  CUdeviceptr p = 7;
  size_t f, t;
  EQ(Alloc(&p, 4), 3);
  MUST(Init(0));
  EQ(Alloc(&p, 4), 201);
  EQ(Info(&f, &t), 201);
  EQ(Free(0), 0);
}

static void allocation(void) {
  CUdeviceptr p = 7, q;
  EQ(Alloc(&p, 0), 1);
  EQ(p, 0);
  EQ(Alloc(NULL, 4), 1);
  EQ(Alloc(&p, (size_t)4 << 40), 2);
  EQ(Alloc(&p, SIZE_MAX), 2);
  void *v = (void *)7;
  EQ(cudaMalloc(&v, 0), 0);
  CHECK(v == NULL);
  EQ(cudaMalloc(NULL, 4), 1);
  cudaGetLastError();
  EQ(cudaMalloc(&v, (size_t)4 << 40), 2);
  EQ(cudaGetLastError(), 2);
  EQ(cudaGetLastError(), 0);
  MUST(Alloc(&p, 4096));
  MUST(Alloc(&q, 4096));
  CUresult (*Range)(CUdeviceptr *, size_t *, CUdeviceptr) = F((CUdeviceptr *, size_t *, CUdeviceptr), "cuMemGetAddressRange_v2");
  CUdeviceptr base = 0;
  size_t size = 0;
  EQ(q - p, 4096);
  EQ(Range(&base, &size, p + 100), 0);
  EQ(base, p);
  EQ(size, 4096);
  EQ(Range(&base, &size, q + 100), 0);
  EQ(base, q);
  EQ(size, 4096);
  CUresult (*Attr)(void *, int, CUdeviceptr) = F((void *, int, CUdeviceptr), "cuPointerGetAttribute");
  u64 a = 0, b = 0;
  EQ(Attr(&a, CU_POINTER_ATTRIBUTE_BUFFER_ID, p), 0);
  EQ(Attr(&b, CU_POINTER_ATTRIBUTE_BUFFER_ID, q), 0);
  CHECK(a != b);
  CUresult (*Ipc)(CUipcMemHandle *, CUdeviceptr) = F((CUipcMemHandle *, CUdeviceptr), "cuIpcGetMemHandle");
  CUipcMemHandle handle;
  CUdeviceptr large;
  MUST(Alloc(&large, (size_t)4 << 20));
  EQ(Ipc(&handle, large), 0);
  EQ(Ipc(&handle, large + 512), 0);
  EQ(Ipc(&handle, q), 0);
  EQ(Free(large), 0);
  EQ(Free(p + 512), 1);
  EQ(Free(p), 0);
  EQ(Free(p), 1);
  EQ(Free(0x10000), 1);
  EQ(Free(q), 0);
  EQ(cudaFree((void *)0x10000), 1);
  EQ(cudaGetLastError(), 1);
  MUST(cudaMalloc(&v, 4096));
  EQ(cudaFree(v), 0);
  EQ(cudaFree(v), 1);
  EQ(cudaGetLastError(), 1);
  EQ(cudaFree(NULL), 0);
  size_t f, t;
  EQ(Info(NULL, NULL), 0);
  EQ(Info(&f, NULL), 0);
  EQ(Info(NULL, &t), 0);
  /* Cross frees. */
  CUresult (*AllocAsync)(CUdeviceptr *, size_t, CUstream) = F((CUdeviceptr *, size_t, CUstream), "cuMemAllocAsync");
  CUresult (*FreeAsync)(CUdeviceptr, CUstream) = F((CUdeviceptr, CUstream), "cuMemFreeAsync");
  EQ(AllocAsync(&p, 4096, NULL), 0);
  EQ(Free(p), 0);
  MUST(Alloc(&p, 4096));
  EQ(FreeAsync(p, NULL), 0);
  MUST(CtxSync());
}

static void pages(void) {
  int vmm = 0;
  CUresult (*DevAttr)(int *, int, CUdevice) = F((int *, int, CUdevice), "cuDeviceGetAttribute");
  MUST(DevAttr(&vmm, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0));
  if (!vmm) { SKIP("pages: the device has no virtual memory management"); return; }
  CUresult (*Gran)(size_t *, const CUmemAllocationProp *, int) = F((size_t *, const CUmemAllocationProp *, int), "cuMemGetAllocationGranularity");
  CUresult (*Reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, u64) = F((CUdeviceptr *, size_t, size_t, CUdeviceptr, u64), "cuMemAddressReserve");
  CUresult (*Create)(u64 *, size_t, const CUmemAllocationProp *, u64) = F((u64 *, size_t, const CUmemAllocationProp *, u64), "cuMemCreate");
  CUresult (*Map)(CUdeviceptr, size_t, size_t, u64, u64) = F((CUdeviceptr, size_t, size_t, u64, u64), "cuMemMap");
  CUresult (*Unmap)(CUdeviceptr, size_t) = F((CUdeviceptr, size_t), "cuMemUnmap");
  CUresult (*Access)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) = F((CUdeviceptr, size_t, const CUmemAccessDesc *, size_t), "cuMemSetAccess");
  CUresult (*Release)(u64) = F((u64), "cuMemRelease");
  CUresult (*Ipc)(CUipcMemHandle *, CUdeviceptr) = F((CUipcMemHandle *, CUdeviceptr), "cuIpcGetMemHandle");
  CUresult (*Range)(CUdeviceptr *, size_t *, CUdeviceptr) = F((CUdeviceptr *, size_t *, CUdeviceptr), "cuMemGetAddressRange_v2");
  CUmemAllocationProp prop;
  memset(&prop, 0, sizeof prop);
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  CUmemAccessDesc rw;
  memset(&rw, 0, sizeof rw);
  rw.location = prop.location;
  rw.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  size_t min = 0, rec = 0, two = (size_t)2 << 20, f = 0, t = 0;
  EQ(Gran(&min, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM), 0);
  EQ(Gran(&rec, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), 0);
  EQ(min, two);
  EQ(rec, two);
  CUdeviceptr va = 0, base = 0;
  size_t size = 0;
  EQ(Reserve(&va, (size_t)1 << 40, 0, 0, 0), 0);
  u64 h = 0, big = 0;
  EQ(Create(&h, 2 * two, &prop, 0), 0);
  EQ(Map(va, two, two, h, 0), 801);
  EQ(Map(va, 2 * two, 0, h, 0), 0);
  EQ(Map(va + 8 * two, 2 * two, 0, h, 0), 0);
  EQ(Access(va, 2 * two, &rw, 1), 0);
  EQ(Access(va + 8 * two, 2 * two, &rw, 1), 0);
  MUST(cudaMemset((void *)(uintptr_t)va, 0x5a, 16));
  EQ(byte_at((void *)(uintptr_t)(va + 8 * two)), 0x5a); /* one memory, two addresses */
  EQ(Range(&base, &size, va + 100), 0);
  EQ(base, va);
  EQ(size, 2 * two);
  struct cudaPointerAttributes a;
  EQ(cudaPointerGetAttributes(&a, (void *)(uintptr_t)va), 0);
  EQ(a.type, cudaMemoryTypeDevice);
  CUipcMemHandle ipc;
  EQ(Ipc(&ipc, va), 1);
  EQ(Unmap(va, two), 1); /* part of a handle */
  EQ(Unmap(va, 2 * two), 0);
  EQ(Unmap(va + 8 * two, 2 * two), 0);
  EQ(Release(h), 0);
  /* Memory of the host in the same addresses: the device writes it, the host reads it. */
  CUmemAllocationProp near = prop;
  near.location.type = HOST_NUMA;
  EQ(Gran(&min, &near, CU_MEM_ALLOC_GRANULARITY_MINIMUM), 0);
  EQ(min, two);
  EQ(Create(&h, two, &near, 0), 0);
  EQ(Map(va, two, 0, h, 0), 0);
  CUmemAccessDesc both[2] = {rw, rw};
  both[1].location = near.location;
  EQ(Access(va, two, both, 2), 0);
  MUST(cudaMemset((void *)(uintptr_t)va, 0x33, 16));
  MUST(cudaDeviceSynchronize());
  EQ(*(volatile unsigned char *)(uintptr_t)va, 0x33);
  EQ(Unmap(va, two), 0);
  EQ(Release(h), 0);
  MUST(Info(&f, &t));
  EQ(Create(&big, (f / two + 64) * two, &prop, 0), 2);
  /* None of these waits for running work. */
  cudaStream_t s;
  MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  gate_t *g = gate_close(s);
  EQ(Create(&h, two, &prop, 0), 0);
  EQ(Map(va, two, 0, h, 0), 0);
  EQ(Access(va, two, &rw, 1), 0);
  EQ(Unmap(va, two), 0);
  EQ(Release(h), 0);
  EQ(cudaStreamQuery(s), cudaErrorNotReady);
  gate_open(g);
  MUST(cudaDeviceSynchronize());
  MUST(cudaStreamDestroy(s));
}

static void streams(void) {
  cudaStream_t s, n;
  u64 a = 0, b = 0, c = 0;
  MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  EQ(StreamId((CUstream)s, &a), 0);
  MUST(cudaStreamDestroy(s));
  MUST(cudaStreamCreateWithFlags(&n, cudaStreamNonBlocking));
  EQ(StreamId((CUstream)n, &b), 0);
  CHECK(n == s); /* the handle came back */
  CHECK(a != b); /* the id did not */
  EQ(StreamId(NULL, &a), 0);
  EQ(StreamId(CU_STREAM_LEGACY, &b), 0);
  EQ(StreamId(CU_STREAM_PER_THREAD, &c), 0);
  EQ(a, b);
  CHECK(a != c);
  MUST(cudaStreamDestroy(n));
  /* The handle of a stream destroyed while busy, too, and the work goes on. */
  MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  gate_t *g = gate_close(s);
  cudaEvent_t e;
  MUST(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  MUST(cudaEventRecord(e, s));
  MUST(cudaStreamDestroy(s));
  MUST(cudaStreamCreateWithFlags(&n, cudaStreamNonBlocking));
  CHECK(n == s);
  EQ(cudaEventQuery(e), cudaErrorNotReady);
  EQ(cudaStreamQuery(n), 0);
  gate_open(g);
  MUST(cudaDeviceSynchronize());
  MUST(cudaStreamDestroy(n));
  MUST(cudaEventDestroy(e));
}

static void *own_stream_id(void *out) {
  MUST(cudaFree(0));
  MUST(StreamId(CU_STREAM_PER_THREAD, out));
  return NULL;
}

static void per_thread(void) {
  u64 mine = 0, theirs = 0;
  pthread_t t;
  EQ(StreamId(CU_STREAM_PER_THREAD, &mine), 0);
  pthread_create(&t, NULL, own_stream_id, &theirs);
  pthread_join(t, NULL);
  CHECK(mine != theirs && theirs != 0);
}

static sem_t gated, done;
static void *gate_own_stream(void *arg) {
  MUST(cudaFree(0));
  *(gate_t **)arg = gate_close(cudaStreamPerThread);
  sem_post(&gated);
  sem_wait(&done);
  return NULL;
}

/* cuCtxRecordEvent covers every kind of stream, and no later work. */
static void context_fences(void) {
  CUcontext ctx = NULL;
  MUST(CtxCurrent(&ctx));
  cudaEvent_t e;
  MUST(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  for (int kind = 0; kind < 6; kind++) {
    cudaStream_t s = NULL;
    gate_t *g;
    pthread_t t;
    if (kind == 0) MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    if (kind == 1) MUST(cudaStreamCreate(&s));
    if (kind == 2) s = cudaStreamLegacy;
    if (kind == 3) s = cudaStreamPerThread;
    if (kind == 4) MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    if (kind == 5) { /* another thread's per-thread stream; the thread lives on */
      sem_init(&gated, 0, 0), sem_init(&done, 0, 0);
      pthread_create(&t, NULL, gate_own_stream, &g);
      sem_wait(&gated);
    } else g = gate_close(s);
    if (kind == 4) MUST(cudaStreamDestroy(s));
    EQ(CtxRecord(ctx, (CUevent)e), 0);
    EQ(EvQuery((CUevent)e), 600);
    gate_open(g);
    MUST(cudaEventSynchronize(e));
    if (kind < 2) MUST(cudaStreamDestroy(s));
    if (kind == 5) sem_post(&done), pthread_join(t, NULL);
  }
  cudaStream_t a, b;
  MUST(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
  MUST(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
  EQ(CtxRecord(ctx, (CUevent)e), 0);
  gate_t *later = gate_close(a);
  MUST(cudaEventSynchronize(e)); /* hangs if later work were covered */
  EQ(CtxWait(ctx, (CUevent)e), 0);
  MUST(cudaStreamSynchronize(b)); /* nor does the wait hold other streams back for it */
  gate_open(later);
  MUST(cudaDeviceSynchronize());
  /* What comes after the wait, on another stream, comes after the event. */
  gate_t *g = gate_close(a);
  EQ(CtxRecord(ctx, (CUevent)e), 0);
  EQ(CtxWait(ctx, (CUevent)e), 0);
  void *p;
  static unsigned char host;
  MUST(cudaHostAlloc(&p, 1, cudaHostAllocDefault));
  *(volatile unsigned char *)p = 1;
  MUST(cudaMemsetAsync(p, 2, 1, b));
  usleep(20000);
  host = *(volatile unsigned char *)p;
  EQ(host, 1);
  gate_open(g);
  MUST(cudaStreamSynchronize(b));
  EQ(*(volatile unsigned char *)p, 2);
  MUST(cudaFreeHost(p));
  MUST(cudaStreamDestroy(a));
  MUST(cudaStreamDestroy(b));
  MUST(cudaEventDestroy(e));
}

/* A call in a thread of its own, and whether it has returned. */
struct call {
  enum { FREE, FREE_HOST, COPY } what;
  void *p;
  cudaStream_t s;
  pthread_t thread;
  int result;
  atomic_int returned;
};
static void *call_run(void *arg) {
  struct call *c = arg;
  static unsigned char from[64];
  MUST(cudaSetDevice(0));
  switch (c->what) {
  case FREE: c->result = cudaFree(c->p); break;
  case FREE_HOST: c->result = cudaFreeHost(c->p); break;
  case COPY: c->result = cudaMemcpyAsync(c->p, from, sizeof from, cudaMemcpyHostToDevice, c->s); break;
  }
  atomic_store(&c->returned, 1);
  return NULL;
}
static void call_start(struct call *c, int what, void *p, cudaStream_t s) {
  c->what = what, c->p = p, c->s = s, c->returned = 0;
  pthread_create(&c->thread, NULL, call_run, c);
}
static void call_end(struct call *c) {
  pthread_join(c->thread, NULL);
  EQ(c->result, 0);
}

/* Who waits for running work: cudaFree and cudaFreeHost do, for every stream; cudaMalloc and cudaFree(NULL) do not. */
static void waiting(void) {
  cudaStream_t s, other;
  void *p, *large, *q, *host;
  struct call c, copy;
  struct cudaDeviceProp prop;
  MUST(cudaGetDeviceProperties(&prop, 0));
  int simulated = strstr(prop.name, "simcuda") != NULL;
  MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  MUST(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  MUST(cudaMalloc(&q, 4096));
  gate_t *g = gate_close(s);
  EQ(cudaMalloc(&p, (size_t)1 << 20), 0);
  EQ(cudaMalloc(&large, (size_t)64 << 20), 0);
  EQ(cudaFree(NULL), 0);
  EQ(cudaStreamQuery(s), cudaErrorNotReady);
  call_start(&c, FREE, p, NULL);
  usleep(50000);
  EQ(atomic_load(&c.returned), 0);
  /* While it waits, another thread cannot even submit to another stream. */
  if (simulated) SKIP("submissions stand still behind a waiting cudaFree: simcuda does not do that");
  else {
    call_start(&copy, COPY, q, other);
    usleep(50000);
    EQ(atomic_load(&copy.returned), 0);
  }
  gate_open(g);
  call_end(&c);
  if (!simulated) call_end(&copy);
  MUST(cudaMallocHost(&host, 4096));
  g = gate_close(s);
  call_start(&c, FREE_HOST, host, NULL);
  usleep(50000);
  EQ(atomic_load(&c.returned), 0);
  gate_open(g);
  call_end(&c);
  MUST(cudaFree(q));
  MUST(cudaFree(large));
  MUST(cudaStreamDestroy(s));
  MUST(cudaStreamDestroy(other));
}

static void legacy_events(void) {
  cudaStream_t n, b;
  cudaEvent_t e;
  MUST(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  MUST(cudaStreamCreateWithFlags(&n, cudaStreamNonBlocking));
  MUST(cudaStreamCreate(&b));
  gate_t *g = gate_close(n);
  MUST(cudaEventRecord(e, NULL));
  MUST(cudaEventSynchronize(e)); /* a non-blocking stream is not covered */
  EQ(cudaEventQuery(e), 0);
  gate_open(g);
  MUST(cudaDeviceSynchronize());
  g = gate_close(b);
  MUST(cudaEventRecord(e, NULL));
  EQ(cudaEventQuery(e), cudaErrorNotReady);
  gate_open(g);
  MUST(cudaDeviceSynchronize());
  MUST(cudaStreamDestroy(n));
  MUST(cudaStreamDestroy(b));
  MUST(cudaEventDestroy(e));
}

static void captures(void) {
  CUcontext ctx = NULL;
  MUST(CtxCurrent(&ctx));
  cudaStream_t s;
  cudaEvent_t e;
  MUST(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  CUdeviceptr kept;
  MUST(Alloc(&kept, 4096));
  for (int mode = 0; mode < 3; mode++) {
    for (int call = 0; call < 6; call++) {
      cudaGraph_t graph = NULL;
      size_t f, t;
      CUdeviceptr p = 0;
      MUST(cudaStreamBeginCapture(s, mode));
      int relaxed = mode == 2, r = -1, want = -1, end = 901;
      if (call == 0) r = Alloc(&p, 4096), want = relaxed ? 0 : 900, end = relaxed ? 0 : 901;
      if (call == 1) r = Info(&f, &t), want = 0, end = 0;
      if (call == 2) r = CtxSync(), want = 900;
      if (call == 3) r = CtxRecord(ctx, (CUevent)e), want = 900;
      if (call == 4) r = CtxWait(ctx, (CUevent)e), want = 900;
      if (call == 5) r = Free(kept), want = relaxed ? 0 : 900, end = relaxed ? 0 : 901;
      EQ(r, want);
      EQ(cudaStreamEndCapture(s, &graph), end);
      if (graph) cudaGraphDestroy(graph);
      cudaGetLastError();
      if (p) MUST(Free(p));
    }
  }
  MUST(cudaStreamDestroy(s));
  MUST(cudaEventDestroy(e));
}

/* What a pool calls while somebody captures, with the thread's own mode exchanged for the relaxed one: none of it fails or
 * breaks the capture, but for cuStreamGetId on the very stream that is captured. */
static void captures_beside_a_pool(void) {
  static const char *const NAMES[] = {"cuStreamGetCtx", "cuStreamGetId", "cuCtxGetId", "cuStreamIsCapturing", "cuStreamIsCapturing(legacy)",
                                      "cuEventQuery", "cuEventCreate", "cuMemAlloc", "cuMemCreate", "cuMemMap", "cuMemSetAccess",
                                      "cuMemUnmap", "cuMemRelease", "cuMemFree", "cuStreamGetCaptureInfo_v2"};
  CUresult (*Create)(u64 *, size_t, const CUmemAllocationProp *, u64) = F((u64 *, size_t, const CUmemAllocationProp *, u64), "cuMemCreate");
  CUresult (*Reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, u64) = F((CUdeviceptr *, size_t, size_t, CUdeviceptr, u64), "cuMemAddressReserve");
  CUresult (*Map)(CUdeviceptr, size_t, size_t, u64, u64) = F((CUdeviceptr, size_t, size_t, u64, u64), "cuMemMap");
  CUresult (*Unmap)(CUdeviceptr, size_t) = F((CUdeviceptr, size_t), "cuMemUnmap");
  CUresult (*Access)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) = F((CUdeviceptr, size_t, const CUmemAccessDesc *, size_t), "cuMemSetAccess");
  CUresult (*Release)(u64) = F((u64), "cuMemRelease");
  CUresult (*StreamCtx)(CUstream, CUcontext *) = F((CUstream, CUcontext *), "cuStreamGetCtx");
  CUresult (*CtxId)(CUcontext, u64 *) = F((CUcontext, u64 *), "cuCtxGetId");
  CUresult (*CaptureInfo)(CUstream, int *, u64 *, void *, void *, void *) = F((CUstream, int *, u64 *, void *, void *, void *), "cuStreamGetCaptureInfo_v2");
  CUresult (*Capturing)(CUstream, int *) = F((CUstream, int *), "cuStreamIsCapturing");
  CUmemAllocationProp prop;
  memset(&prop, 0, sizeof prop);
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  CUmemAccessDesc rw;
  memset(&rw, 0, sizeof rw);
  rw.location = prop.location;
  rw.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  size_t two = (size_t)2 << 20;
  CUcontext ctx = NULL;
  CUdeviceptr va = 0, p = 0;
  u64 h = 0, id;
  MUST(CtxCurrent(&ctx));
  int vmm = Reserve(&va, 64 * two, 0, 0, 0) == 0;
  cudaStream_t s;
  cudaEvent_t e, made;
  MUST(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
  MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  MUST(cudaEventRecord(e, s));
  MUST(cudaStreamSynchronize(s));
  for (int mode = 0; mode < 3; mode++) {
    for (int call = 0; call < 15; call++) {
      if (!vmm && call >= 8 && call < 13) continue;
      cudaGraph_t graph = NULL;
      enum cudaStreamCaptureMode relaxed = cudaStreamCaptureModeRelaxed;
      int r = -1, status;
      MUST(cudaStreamBeginCapture(s, mode));
      MUST(cudaThreadExchangeStreamCaptureMode(&relaxed));
      switch (call) {
      case 0: r = StreamCtx((CUstream)s, &ctx); break;
      case 1: r = StreamId((CUstream)s, &id); break;
      case 2: r = CtxId(ctx, &id); break;
      case 3: r = Capturing((CUstream)s, &status); break;
      case 4: r = Capturing(CU_STREAM_LEGACY, &status); break;
      case 5: r = EvQuery((CUevent)e); break;
      case 6: r = (int)cudaEventCreateWithFlags(&made, cudaEventDisableTiming); break;
      case 7: r = Alloc(&p, 4096); break;
      case 8: r = Create(&h, two, &prop, 0); break;
      case 9: r = Map(va, two, 0, h, 0); break;
      case 10: r = Access(va, two, &rw, 1); break;
      case 11: r = Unmap(va, two); break;
      case 12: r = Release(h); break;
      case 13: r = Free(p); break;
      case 14: r = CaptureInfo((CUstream)s, &status, &id, NULL, NULL, NULL); break;
      }
      MUST(cudaThreadExchangeStreamCaptureMode(&relaxed));
      int end = cudaStreamEndCapture(s, &graph);
      int good = call == 1 ? r == 900 && end == 901 : r == 0 && end == 0;
      if (!good) printf("%s in a capture of mode %d: %d, and the capture ends with %d\n", NAMES[call], mode, r, end);
      CHECK(good);
      if (graph) cudaGraphDestroy(graph);
      cudaGetLastError();
    }
  }
  MUST(cudaStreamDestroy(s));
}

static void addresses(void) {
  static const struct { const char *base; int version, flags; const char *name; } T[] = {
      {"cuMemAlloc", 2000, 0, "cuMemAlloc"},        {"cuMemAlloc", 3020, 0, "cuMemAlloc_v2"},
      {"cuMemAlloc", 3010, 0, "cuMemAlloc"},
      {"cuMemFree", 3010, 0, "cuMemFree"},          {"cuMemFree", 3020, 0, "cuMemFree_v2"},
      {"cuMemGetInfo", 3010, 0, "cuMemGetInfo"},    {"cuMemGetInfo", 3020, 0, "cuMemGetInfo_v2"},
      {"cuMemAllocPitch", 3010, 0, "cuMemAllocPitch"}, {"cuMemAllocPitch", 3020, 0, "cuMemAllocPitch_v2"},
      {"cuMemGetAddressRange", 3010, 0, "cuMemGetAddressRange"}, {"cuMemGetAddressRange", 3020, 0, "cuMemGetAddressRange_v2"},
      {"cuMemFreeAsync", 11020, 0, "cuMemFreeAsync"}, {"cuMemFreeAsync", 11020, 2, "cuMemFreeAsync_ptsz"},
      {"cuMemAllocFromPoolAsync", 11020, 0, "cuMemAllocFromPoolAsync"},
      {"cuMemAlloc", 13000, 0, "cuMemAlloc_v2"},    {"cuMemFree", 13000, 0, "cuMemFree_v2"},
      {"cuMemGetInfo", 13000, 0, "cuMemGetInfo_v2"}, {"cuMemGetAddressRange", 12000, 0, "cuMemGetAddressRange_v2"},
      {"cuMemAllocAsync", 11020, 0, "cuMemAllocAsync"}, {"cuMemAllocAsync", 11020, 2, "cuMemAllocAsync_ptsz"},
      {"cuMemFreeAsync", 13000, 2, "cuMemFreeAsync_ptsz"}, {"cuMemAllocFromPoolAsync", 13000, 2, "cuMemAllocFromPoolAsync_ptsz"},
      {"cuIpcOpenMemHandle", 13000, 0, "cuIpcOpenMemHandle_v2"}, {"cuDevicePrimaryCtxReset", 13000, 0, "cuDevicePrimaryCtxReset_v2"},
      {"cuCtxDestroy", 4000, 0, "cuCtxDestroy_v2"}, {"cuStreamBeginCapture", 13000, 0, "cuStreamBeginCapture_v2"},
      {"cuGetProcAddress", 11030, 0, "cuGetProcAddress"}, {"cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"},
  };
  for (size_t i = 0; i < sizeof T / sizeof *T; i++) {
    void *p = NULL;
    int status = -1;
    int r = GetProc2(T[i].base, &p, T[i].version, (cuuint64_t)T[i].flags, &status);
    void *want = dlsym(lib, T[i].name);
    if (r || p != want || !want) printf("%s at %d flags %d: result %d status %d, %p instead of %s %p\n", T[i].base, T[i].version, T[i].flags, r, status, p, T[i].name, want);
    CHECK(r == 0 && p == want && want);
  }
  static const struct { const char *base; int version; } TOO_LOW[] = {
      {"cuMemAllocAsync", 11000}, {"cuMemFreeAsync", 11010}, {"cuMemAllocFromPoolAsync", 11010}, {"cuGetProcAddress", 11020}};
  for (size_t i = 0; i < sizeof TOO_LOW / sizeof *TOO_LOW; i++) {
    void *p = (void *)1;
    int status = -1;
    EQ(GetProc2(TOO_LOW[i].base, &p, TOO_LOW[i].version, 0, &status), 0);
    CHECK(p == NULL);
    EQ(status, 2);
  }
}

/* In a process of its own: the context is gone afterwards. */
static void after_reset(void) {
  CUresult (*Reset)(CUdevice) = F((CUdevice), "cuDevicePrimaryCtxReset_v2");
  CUdeviceptr p = 0, q = 0;
  MUST(cudaFree(0));
  MUST(Alloc(&p, 4096));
  EQ(Reset(0), 0);
  EQ(Free(p), 709);
  EQ(Alloc(&q, 4096), 709);
}

int main(int argc, char **argv) {
  lib = dlopen("libcuda.so.1", RTLD_NOW);
  if (!lib) return printf("no libcuda.so.1: %s\n", dlerror()), 2;
  Init = F((unsigned), "cuInit");
  Alloc = F((CUdeviceptr *, size_t), "cuMemAlloc_v2");
  Free = F((CUdeviceptr), "cuMemFree_v2");
  Info = F((size_t *, size_t *), "cuMemGetInfo_v2");
  CtxRecord = F((CUcontext, CUevent), "cuCtxRecordEvent");
  CtxWait = F((CUcontext, CUevent), "cuCtxWaitEvent");
  EvQuery = F((CUevent), "cuEventQuery");
  CtxSync = F((void), "cuCtxSynchronize");
  StreamId = F((CUstream, u64 *), "cuStreamGetId");
  CtxCurrent = F((CUcontext *), "cuCtxGetCurrent");
  GetProc2 = F((const char *, void **, int, cuuint64_t, int *), "cuGetProcAddress_v2");
  if (argc > 1 && !strcmp(argv[1], "after-reset")) {
    after_reset();
    return check_report("driver_facts after a reset");
  }
  before_context();
  MUST(cudaSetDevice(0));
  MUST(cudaFree(0));
  allocation();
  pages();
  streams();
  per_thread();
  context_fences();
  waiting();
  legacy_events();
  captures();
  captures_beside_a_pool();
  addresses();
  char again[4200];
  snprintf(again, sizeof again, "%s after-reset > /dev/null", argv[0]);
  fflush(stdout);
  CHECK(system(again) == 0);
  return check_report("driver_facts");
}
