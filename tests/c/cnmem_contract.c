/* The cnmem door's contract, through <cnmem.h> alone.
 * Links: -lgpupool -lcudart -lpthread. A few seconds. */
#define _GNU_SOURCE
#include "check.h"
#include <cnmem.h>
#include <pthread.h>
#include <stdint.h>

#define MB ((size_t)1 << 20)
#define OK CNMEM_STATUS_SUCCESS
#define BAD CNMEM_STATUS_INVALID_ARGUMENT
#define OOM CNMEM_STATUS_OUT_OF_MEMORY
#define NOT_INIT CNMEM_STATUS_NOT_INITIALIZED

static cudaStream_t new_stream(void) {
  cudaStream_t s;
  MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  return s;
}
static cnmemStatus_t init(size_t size, int n, cudaStream_t *streams, size_t *sizes, unsigned flags) {
  cnmemDevice_t d;
  memset(&d, 0, sizeof d);
  d.size = size, d.numStreams = n, d.streams = streams, d.streamSizes = sizes;
  return cnmemInit(1, &d, flags);
}
static void info_is(cudaStream_t s, size_t free_want, size_t total_want, int line) {
  size_t f = 1, t = 1;
  int r = cnmemMemGetInfo(&f, &t, s);
  int good = r == OK && f == free_want && t == total_want;
  if (!good) printf("%s:%d: status %d, free %zu of %zu, expected %zu of %zu\n", __FILE__, line, r, f, t, free_want, total_want);
  CHECK(good);
}
#define INFO(s, f, t) info_is(s, f, t, __LINE__)

static void before_init(void) {
  void *p = NULL;
  size_t f, t;
  EQ(cnmemFinalize(), NOT_INIT);
  EQ(cnmemRetain(), NOT_INIT);
  EQ(cnmemRelease(), NOT_INIT);
  EQ(cnmemRegisterStream((cudaStream_t)16), NOT_INIT);
  EQ(cnmemMalloc(&p, 1, NULL), NOT_INIT);
  EQ(cnmemFree(p, NULL), NOT_INIT);
  EQ(cnmemMemGetInfo(&f, &t, NULL), NOT_INIT);
  EQ(cnmemPrintMemoryState(stdout, NULL), NOT_INIT);
  CHECK(!strcmp(cnmemGetErrorString(CNMEM_STATUS_OUT_OF_MEMORY), "CNMEM_STATUS_OUT_OF_MEMORY"));
  CHECK(!strcmp(cnmemGetErrorString((cnmemStatus_t)77), "CNMEM_STATUS_UNKNOWN_ERROR"));
  EQ(CNMEM_VERSION, 100);
}

static void bad_init(void) {
  cnmemDevice_t d;
  size_t f, t;
  MUST(cudaMemGetInfo(&f, &t));
  memset(&d, 0, sizeof d);
  d.size = 4096;
  EQ(cnmemInit(0, &d, 0), BAD);
  EQ(cnmemInit(1, NULL, 0), BAD);
  d.device = -1;
  EQ(cnmemInit(1, &d, 0), BAD);
  d.device = 1000;
  EQ(cnmemInit(1, &d, 0), BAD);
  EQ(init(t, 0, NULL, NULL, 0), BAD);
  EQ(init(SIZE_MAX, 0, NULL, NULL, 0), BAD);
  EQ(init(4096, 1, NULL, NULL, 0), BAD);
  void *hog = NULL; /* somebody else has his part, as a context does on a GPU */
  MUST(cudaMalloc(&hog, t / 100));
  size_t left = device_free();
  EQ(init((size_t)((double)t * 0.999), 0, NULL, NULL, 0), OOM);
  EQ(device_free(), left);
  MUST(cudaFree(hog));
  EQ(cnmemFinalize(), NOT_INIT);
}

static void accounting(void) {
  size_t before = device_free();
  void *p = (void *)1, *q = NULL;
  EQ(init(4096, 0, NULL, NULL, 0), OK);
  CHECK(device_free() < before);
  INFO(NULL, 4096, 4096);
  EQ(cnmemMalloc(NULL, 0, NULL), OK);
  EQ(cnmemMalloc(&p, 0, NULL), OK);
  CHECK(p == NULL);
  EQ(cnmemMalloc(NULL, 4, NULL), BAD);
  EQ(cnmemMalloc(&p, 1024, NULL), OK);
  CHECK(p && (uintptr_t)p % 512 == 0);
  INFO(NULL, 3072, 4096);
  EQ(cnmemMalloc(&q, 1, NULL), OK);
  INFO(NULL, 2560, 4096);
  CHECK((char *)q == (char *)p + 1024);
  EQ(cnmemFree(NULL, NULL), OK);
  EQ(cnmemFree((char *)p + 512, NULL), BAD);
  EQ(cnmemFree(&before, NULL), BAD);
  EQ(cnmemMalloc(&q, SIZE_MAX, NULL), OOM);
  EQ(cnmemFree(p, NULL), OK);
  EQ(cnmemFree(p, NULL), BAD);
  INFO(NULL, 3584, 4096);
  EQ(cnmemMemGetInfo(NULL, &before, NULL), BAD);
  EQ(cnmemFinalize(), OK);
  CHECK(device_free() >= before || before < 8192);
}

static void children(void) {
  cudaStream_t s[2] = {new_stream(), new_stream()}, stranger = new_stream();
  size_t before = device_free(), sizes[2] = {2048, 1800};
  void *p = NULL, *q = NULL;
  size_t f, t;
  EQ(init(4096, 2, s, sizes, CNMEM_FLAGS_CANNOT_GROW | CNMEM_FLAGS_CANNOT_STEAL), OK);
  INFO(NULL, 0, 4096);
  INFO(s[0], 2048, 2048);
  INFO(s[1], 2048, 2048);
  EQ(cnmemMalloc(&p, 512, stranger), BAD);
  EQ(cnmemMemGetInfo(&f, &t, stranger), BAD);
  EQ(cnmemMalloc(&p, 1024, s[0]), OK);
  EQ(cnmemFree(p, s[1]), BAD);
  EQ(cnmemFree(p, stranger), BAD);
  INFO(s[0], 1024, 2048);
  EQ(cnmemMalloc(&q, 2048, s[0]), OOM);
  EQ(cnmemFree(p, NULL), OK);
  INFO(s[0], 2048, 2048);
  EQ(cnmemRegisterStream(NULL), BAD);
  EQ(cnmemRegisterStream(stranger), OK);
  EQ(cnmemRegisterStream(stranger), OK);
  EQ(cnmemMalloc(&p, 512, stranger), OOM);
  FILE *file = tmpfile();
  EQ(cnmemPrintMemoryState(file, s[0]), OK);
  EQ(cnmemPrintMemoryState(NULL, s[0]), BAD);
  CHECK(file && ftell(file) > 20);
  if (file) fclose(file);
  EQ(cnmemFinalize(), OK);
  /* Idle memory of other managers is taken over, unless forbidden. */
  sizes[1] = 2048;
  EQ(init(4096, 2, s, sizes, CNMEM_FLAGS_CANNOT_GROW), OK);
  EQ(cnmemMalloc(&p, 2048, s[0]), OK);
  EQ(cnmemMalloc(&q, 1024, s[0]), OK);
  INFO(s[0], 0, 3072);
  INFO(s[1], 1024, 1024);
  EQ(cnmemFree(q, s[0]), OK);
  EQ(cnmemFree(p, s[0]), OK);
  EQ(cnmemMalloc(&p, 4096, s[1]), OK);
  EQ(cnmemMalloc(&q, 512, NULL), OOM);
  EQ(cnmemFinalize(), OK);
  /* Growing, through the root. */
  EQ(init(4096, 2, s, NULL, 0), OK);
  EQ(cnmemMalloc(&p, 1024, s[0]), OK);
  INFO(NULL, 3072, 4096);
  EQ(cnmemMalloc(&q, 32 * MB, s[1]), OK);
  INFO(s[1], 0, 32 * MB);
  EQ(cnmemFinalize(), OK);
  EQ(device_free(), before);
  for (int i = 0; i < 2; i++) MUST(cudaStreamDestroy(s[i]));
  MUST(cudaStreamDestroy(stranger));
}

static void references(void) {
  size_t before = device_free();
  void *p = NULL;
  EQ(init(8 * MB, 0, NULL, NULL, 0), OK);
  EQ(cnmemRetain(), OK);
  EQ(init(8 * MB, 0, NULL, NULL, 0), OK);
  EQ(cnmemMalloc(&p, MB, NULL), OK);
  EQ(cnmemFinalize(), OK);
  EQ(cnmemRelease(), OK);
  EQ(cnmemMalloc(&p, MB, NULL), OK); /* one reference is left, and live blocks do not hold it */
  EQ(cnmemFinalize(), OK);
  EQ(cnmemMalloc(&p, MB, NULL), NOT_INIT);
  EQ(device_free(), before);
}

static void large(void) {
  size_t before = device_free(), f, t;
  MUST(cudaMemGetInfo(&f, &t));
  EQ(init((size_t)((double)f * 0.95), 0, NULL, NULL, 0), OK);
  CHECK(device_free() <= f - (size_t)((double)f * 0.95));
  EQ(cnmemFinalize(), OK);
  EQ(device_free(), before);
  EQ(init(0, 0, NULL, NULL, 0), OK);
  EQ(cnmemMemGetInfo(&f, &t, NULL), OK);
  CHECK(t > before / 11 && t < before / 9);
  EQ(cnmemFinalize(), OK);
  EQ(init(8 * MB, 0, NULL, NULL, CNMEM_FLAGS_MANAGED), OK);
  void *p = NULL;
  EQ(cnmemMalloc(&p, MB, NULL), OK);
  struct cudaPointerAttributes a;
  MUST(cudaPointerGetAttributes(&a, p));
  EQ(a.type, cudaMemoryTypeManaged);
  *(volatile int *)p = 1; /* the host may write it */
  EQ(cnmemFinalize(), OK);
}

/* Memory moves to another stream only after the work before its free. */
static void order(void) {
  cudaStream_t s[2] = {new_stream(), new_stream()};
  size_t sizes[2] = {2 * MB, 0};
  void *p = NULL, *q = NULL;
  EQ(init(2 * MB, 2, s, sizes, CNMEM_FLAGS_CANNOT_GROW), OK);
  EQ(cnmemMalloc(&p, 2 * MB, s[0]), OK);
  gate_t *g = gate_close(s[0]);
  MUST(cudaMemsetAsync(p, 1, 2 * MB, s[0]));
  EQ(cnmemFree(p, s[0]), OK);
  EQ(cnmemMalloc(&q, 2 * MB, s[0]), OK); /* the same stream: at once */
  CHECK(p == q);
  EQ(cnmemFree(q, s[0]), OK);
  gate_open(g);
  EQ(cnmemMalloc(&q, 2 * MB, s[1]), OK);
  MUST(cudaMemsetAsync(q, 2, 2 * MB, s[1]));
  EQ(byte_at(q), 2);
  EQ(cnmemFinalize(), OK);
  /* Freed on the NULL stream: reused after all work so far. */
  sizes[0] = MB;
  EQ(init(4 * MB, 2, s, sizes, 0), OK);
  EQ(cnmemMalloc(&p, MB, s[0]), OK);
  g = gate_close(s[1]);
  MUST(cudaMemsetAsync(p, 3, MB, s[1]));
  EQ(cnmemFree(p, NULL), OK);
  INFO(s[0], MB, MB);
  EQ(cnmemMalloc(&q, MB, s[0]), OK);
  CHECK(q != p);
  MUST(cudaMemsetAsync(q, 4, MB, s[0]));
  gate_open(g);
  EQ(byte_at(q), 4);
  EQ(cnmemFinalize(), OK);
  for (int i = 0; i < 2; i++) MUST(cudaStreamDestroy(s[i]));
}

struct worker { cudaStream_t s; unsigned seed; int bad; };
static void *work(void *arg) {
  struct worker *w = arg;
  void *live[32] = {0};
  for (int i = 0; i < 4000; i++) {
    int k = rand_r(&w->seed) % 32;
    if (live[k]) w->bad += cnmemFree(live[k], w->s) != OK, live[k] = NULL;
    else w->bad += cnmemMalloc(&live[k], 1 + (size_t)rand_r(&w->seed) % (256 << 10), w->s) != OK;
  }
  for (int k = 0; k < 32; k++) w->bad += cnmemFree(live[k], w->s) != OK;
  return NULL;
}
static void threads(void) {
  struct worker w[8];
  pthread_t t[8];
  cudaStream_t s[4];
  for (int i = 0; i < 4; i++) s[i] = new_stream();
  size_t before = device_free();
  EQ(init(64 * MB, 4, s, NULL, 0), OK);
  for (int i = 0; i < 8; i++) {
    w[i] = (struct worker){i < 4 ? s[i] : NULL, (unsigned)i + 1, 0};
    pthread_create(&t[i], NULL, work, &w[i]);
  }
  for (int i = 0; i < 8; i++) {
    pthread_join(t[i], NULL);
    EQ(w[i].bad, 0);
  }
  size_t f, all, sum = 0;
  EQ(cnmemMemGetInfo(&f, &all, NULL), OK);
  sum = f;
  for (int i = 0; i < 4; i++) {
    size_t mine;
    EQ(cnmemMemGetInfo(&f, &mine, s[i]), OK);
    EQ(f, mine);
    sum += mine;
  }
  EQ(sum, all);
  EQ(cnmemFinalize(), OK);
  EQ(device_free(), before);
  for (int i = 0; i < 4; i++) MUST(cudaStreamDestroy(s[i]));
}

static void devices(void) {
  int count = 0, now = -1;
  MUST(cudaGetDeviceCount(&count));
  if (count < 2) { SKIP("several devices: there is one"); return; }
  cnmemDevice_t d[2];
  memset(d, 0, sizeof d);
  d[0].size = 4096, d[1].device = 1, d[1].size = 8192;
  MUST(cudaSetDevice(1));
  EQ(cnmemInit(2, d, 0), OK);
  MUST(cudaGetDevice(&now));
  EQ(now, 1);
  INFO(NULL, 8192, 8192);
  void *p = NULL;
  EQ(cnmemMalloc(&p, 512, NULL), OK);
  struct cudaPointerAttributes a;
  MUST(cudaPointerGetAttributes(&a, p));
  EQ(a.device, 1);
  MUST(cudaSetDevice(0));
  INFO(NULL, 4096, 4096);
  MUST(cudaSetDevice(1));
  cudaStream_t theirs = new_stream();
  MUST(cudaSetDevice(0));
  EQ(cnmemRegisterStream(theirs), OK); /* on its own device, whichever is current */
  void *q = NULL;
  EQ(cnmemMalloc(&q, 512, theirs), OK);
  MUST(cudaPointerGetAttributes(&a, q));
  EQ(a.device, 1);
  EQ(cnmemFree(q, theirs), OK);
  MUST(cudaStreamDestroy(theirs));
  EQ(cnmemFree(p, NULL), OK); /* of the other device */
  MUST(cudaSetDevice(1));
  INFO(NULL, 7680, 8192); /* 512 are the stream's now */
  d[1].device = 0;
  EQ(cnmemFinalize(), OK);
  EQ(cnmemInit(2, d, 0), BAD); /* one device twice */
  MUST(cudaSetDevice(0));
}

static void reset(void) {
  EQ(init(8 * MB, 0, NULL, NULL, 0), OK);
  EQ(cnmemFinalize(), OK);
  MUST(cudaDeviceReset());
  void *p = NULL;
  EQ(init(8 * MB, 0, NULL, NULL, 0), OK);
  EQ(cnmemMalloc(&p, MB, NULL), OK);
  EQ(cudaMemset(p, 5, MB), 0);
  EQ(byte_at(p), 5);
  EQ(cnmemFinalize(), OK);
}

int main(void) {
  before_init();
  MUST(cudaFree(0));
  bad_init();
  accounting();
  children();
  references();
  large();
  order();
  threads();
  devices();
  reset();
  return check_report("cnmem_contract");
}
