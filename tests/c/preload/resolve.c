/* How programs find the driver: every way must lead to the same functions, and nothing else may be touched.
 *
 * resolve dlsym|table|chain|streams: cases N1 to N3, N8, N6, N11.
 * resolve v1: N7, on a driver without cuGetProcAddress_v2.
 * resolve direct|handle|address|entry: 100 allocations, found by link, by dlsym, by cuGetProcAddress, by the runtime.
 * Links: -lcudart -lcuda, liba, libb. */
#define _GNU_SOURCE
#include "../check.h"
#include "driver.h"
#include <pthread.h>
#include <stdint.h>

int foo(void); /* liba */

static void *lib; /* the driver */
typedef CUresult (*get1_t)(const char *, void **, int, cuuint64_t);
typedef CUresult (*get2_t)(const char *, void **, int, cuuint64_t, int *);
typedef CUresult (*alloc_t)(CUdeviceptr *, size_t);
typedef CUresult (*free_t)(CUdeviceptr);

static void *sym(const char *name) {
  void *p = dlsym(lib, name);
  if (!p) printf("the driver has no %s\n", name), exit(2);
  return p;
}
/* The file that an address lies in. */
static const char *file_of(const void *p) {
  Dl_info info;
  return dladdr(p, &info) && info.dli_fname ? info.dli_fname : "";
}

/* ---- N1 to N3: dlsym for everybody else. */

static void *libc_symbols(void *first) {
  for (int i = 0; i < 2000; i++)
    if (dlsym(RTLD_NEXT, "malloc") != first || dlsym(RTLD_DEFAULT, "malloc") != dlsym(RTLD_DEFAULT, "malloc")) return first;
  return NULL;
}
static void dlsym_mode(const char *proxy) {
  pthread_t t[8];
  void *first = dlsym(RTLD_NEXT, "malloc");
  CHECK(first != NULL);
  for (int i = 0; i < 8; i++) pthread_create(&t[i], NULL, libc_symbols, first);
  for (int i = 0; i < 8; i++) {
    void *wrong;
    pthread_join(t[i], &wrong);
    CHECK(wrong == NULL);
  }
  EQ(foo(), 11);
  void *h = dlopen(proxy, RTLD_NOW | RTLD_LOCAL);
  if (!h) printf("%s\n", dlerror()), exit(2);
  int (*create)(void **) = (int (*)(void **))dlsym(h, "cudnnCreate");
  CHECK(create && create((void **)&create) == 77);
  /* A handle that is not the driver's: its own functions, whatever they are called. */
  alloc_t alloc = (alloc_t)dlsym(h, "cuMemAlloc_v2");
  CUdeviceptr p;
  CHECK(alloc && (int)alloc(&p, 4096) == 79);
  int (*get)(void) = (int (*)(void))dlsym(h, "cuGetProcAddress_v2");
  CHECK(get && get() == 81);
  CHECK(dlsym(h, "cuNoSuchThing") == NULL && dlsym(lib, "cuNoSuchThing") == NULL);
  const char *why = dlerror();
  CHECK(why && strstr(why, "cuNoSuchThing"));
  /* A version asked for: the C library's, through whatever dlsym there is. */
  CHECK(dlvsym(RTLD_DEFAULT, "pthread_create", "GLIBC_2.34") || dlvsym(RTLD_DEFAULT, "pthread_create", "GLIBC_2.2.5"));
}

/* ---- N8: names, versions, flags. */

/* A function: from which version on it is which exported variant; with flag 2 the per-thread one, where there is one. */
struct name {
  const char *name;
  struct { int since; const char *symbol, *per_thread; } v[4];
};
static const struct name TABLE[] = {
  {"cuInit", {{2000, "cuInit", 0}}},
  {"cuMemAlloc", {{2000, "cuMemAlloc", 0}, {3020, "cuMemAlloc_v2", 0}}},
  {"cuMemFree", {{2000, "cuMemFree", 0}, {3020, "cuMemFree_v2", 0}}},
  {"cuMemGetInfo", {{2000, "cuMemGetInfo", 0}, {3020, "cuMemGetInfo_v2", 0}}},
  {"cuMemAllocPitch", {{2000, "cuMemAllocPitch", 0}, {3020, "cuMemAllocPitch_v2", 0}}},
  {"cuMemGetAddressRange", {{2000, "cuMemGetAddressRange", 0}, {3020, "cuMemGetAddressRange_v2", 0}}},
  {"cuMemAllocManaged", {{6000, "cuMemAllocManaged", 0}}},
  {"cuMemAllocHost", {{2000, "cuMemAllocHost", 0}, {3020, "cuMemAllocHost_v2", 0}}},
  {"cuMemHostAlloc", {{2020, "cuMemHostAlloc", 0}}},
  {"cuMemFreeHost", {{2000, "cuMemFreeHost", 0}}},
  {"cuMemHostRegister", {{4000, "cuMemHostRegister", 0}, {6050, "cuMemHostRegister_v2", 0}}},
  {"cuMemAllocAsync", {{11020, "cuMemAllocAsync", "cuMemAllocAsync_ptsz"}}},
  {"cuMemFreeAsync", {{11020, "cuMemFreeAsync", "cuMemFreeAsync_ptsz"}}},
  {"cuMemAllocFromPoolAsync", {{11020, "cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync_ptsz"}}},
  {"cuMemcpy", {{4000, "cuMemcpy", "cuMemcpy_ptds"}}},
  {"cuMemcpyAsync", {{4000, "cuMemcpyAsync", "cuMemcpyAsync_ptsz"}}},
  {"cuMemcpyDtoH", {{2000, "cuMemcpyDtoH", 0}, {3020, "cuMemcpyDtoH_v2", "cuMemcpyDtoH_v2_ptds"}}},
  {"cuMemcpyHtoD", {{2000, "cuMemcpyHtoD", 0}, {3020, "cuMemcpyHtoD_v2", "cuMemcpyHtoD_v2_ptds"}}},
  {"cuMemcpyDtoHAsync", {{2000, "cuMemcpyDtoHAsync", 0}, {3020, "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoHAsync_v2_ptsz"}}},
  {"cuMemcpy2D", {{3020, "cuMemcpy2D_v2", "cuMemcpy2D_v2_ptds"}}},
  {"cuMemcpy2DAsync", {{3020, "cuMemcpy2DAsync_v2", "cuMemcpy2DAsync_v2_ptsz"}}},
  {"cuMemcpy3D", {{3020, "cuMemcpy3D_v2", "cuMemcpy3D_v2_ptds"}}},
  {"cuPointerGetAttribute", {{4000, "cuPointerGetAttribute", 0}}},
  {"cuPointerGetAttributes", {{7000, "cuPointerGetAttributes", 0}}},
  {"cuPointerSetAttribute", {{6000, "cuPointerSetAttribute", 0}}},
  {"cuMemGetHandleForAddressRange", {{11070, "cuMemGetHandleForAddressRange", 0}}},
  {"cuMemRetainAllocationHandle", {{11000, "cuMemRetainAllocationHandle", 0}}},
  {"cuIpcGetMemHandle", {{4010, "cuIpcGetMemHandle", 0}}},
  {"cuIpcOpenMemHandle", {{4010, "cuIpcOpenMemHandle", 0}, {11000, "cuIpcOpenMemHandle_v2", 0}}},
  {"cuIpcCloseMemHandle", {{4010, "cuIpcCloseMemHandle", 0}}},
  {"cuCtxCreate", {{2000, "cuCtxCreate", 0}, {3020, "cuCtxCreate_v2", 0}, {11040, "cuCtxCreate_v3", 0}, {12050, "cuCtxCreate_v4", 0}}},
  {"cuCtxDestroy", {{2000, "cuCtxDestroy", 0}, {4000, "cuCtxDestroy_v2", 0}}},
  {"cuCtxEnablePeerAccess", {{4000, "cuCtxEnablePeerAccess", 0}}},
  {"cuCtxDisablePeerAccess", {{4000, "cuCtxDisablePeerAccess", 0}}},
  {"cuCtxSynchronize", {{2000, "cuCtxSynchronize", 0}, {13000, "cuCtxSynchronize_v2", 0}}},
  {"cuDevicePrimaryCtxRelease", {{7000, "cuDevicePrimaryCtxRelease", 0}, {11000, "cuDevicePrimaryCtxRelease_v2", 0}}},
  {"cuDevicePrimaryCtxReset", {{7000, "cuDevicePrimaryCtxReset", 0}, {11000, "cuDevicePrimaryCtxReset_v2", 0}}},
  {"cuStreamCreate", {{2000, "cuStreamCreate", 0}}},
  {"cuStreamDestroy", {{2000, "cuStreamDestroy", 0}, {4000, "cuStreamDestroy_v2", 0}}},
  {"cuStreamBeginCapture", {{10000, "cuStreamBeginCapture", "cuStreamBeginCapture_ptsz"},
                            {10010, "cuStreamBeginCapture_v2", "cuStreamBeginCapture_v2_ptsz"}}},
  {"cuStreamEndCapture", {{10000, "cuStreamEndCapture", "cuStreamEndCapture_ptsz"}}},
  {"cuLaunchKernel", {{4000, "cuLaunchKernel", "cuLaunchKernel_ptsz"}}},
  {"cuGetProcAddress", {{11030, "cuGetProcAddress", 0}, {12000, "cuGetProcAddress_v2", 0}}},
};

static void ask(get2_t get, const struct name *n, int version, cuuint64_t flags) {
  const char *want = NULL;
  for (int k = 0; k < 4 && n->v[k].symbol; k++)
    if (n->v[k].since <= version) want = flags == 2 && n->v[k].per_thread ? n->v[k].per_thread : n->v[k].symbol;
  void *found = &found, *older = &older;
  int status = 77;
  CUresult r = get(n->name, &found, version, flags, &status);
  get1_t get1 = (get1_t)sym("cuGetProcAddress");
  CUresult r1 = get1(n->name, &older, version, flags);
  int good = want ? r == 0 && status == 0 && found == sym(want) : r == 0 && status == 2 && found == NULL;
  if (!good)
    printf("%s at %d, flags %d: result %d, status %d, %s %p; wanted %s\n", n->name, version, (int)flags, (int)r, status,
           file_of(found), found, want ? want : "too low a version");
  CHECK(good);
  CHECK(r1 == 0 && older == found);
}
static void table_mode(void) {
  static const int VERSIONS[] = {2000, 3010, 3020, 4000, 6050, 10010, 11020, 11030, 12000, 12050, 12080, 13000};
  get2_t get = (get2_t)sym("cuGetProcAddress_v2");
  int ours = 0;
  for (size_t i = 0; i < sizeof TABLE / sizeof *TABLE; i++) {
    const struct name *n = &TABLE[i];
    for (cuuint64_t flags = 0; flags <= 2; flags++) {
      for (size_t k = 0; k < sizeof VERSIONS / sizeof *VERSIONS; k++) ask(get, n, VERSIONS[k], flags);
      for (int k = 0; k < 4 && n->v[k].symbol; k++) {
        ask(get, n, n->v[k].since, flags);
        ask(get, n, n->v[k].since - 1, flags);
      }
    }
    for (int k = 0; k < 4 && n->v[k].symbol; k++) {
      const char *symbols[] = {n->v[k].symbol, n->v[k].per_thread};
      for (int s = 0; s < 2 && symbols[s]; s++)
        if (strstr(file_of(sym(symbols[s])), "gpupool")) printf("ours: %s\n", symbols[s]), ours++;
    }
  }
  printf("%d of these functions are gpupool's\n", ours);
  /* A symbol is no name; unknown names and flags; NULL. */
  static const char *UNKNOWN[] = {"cuMemAlloc_v2", "cuMemAllocAsync_ptsz", "cuNoSuchThing", "", "malloc", "cudaMalloc"};
  for (size_t i = 0; i < sizeof UNKNOWN / sizeof *UNKNOWN; i++) {
    void *found = &found;
    int status = 77;
    EQ(get(UNKNOWN[i], &found, 13000, 0, &status), 500);
    EQ(status, 1);
    CHECK(found == NULL);
    found = &found;
    EQ(get(UNKNOWN[i], &found, 13000, 0, NULL), 500);
    CHECK(found == NULL);
  }
  void *found;
  int status;
  EQ(get("cuMemAlloc", NULL, 13000, 0, &status), 1);
  EQ(get(NULL, &found, 13000, 0, &status), 1);
  EQ(get("cuMemAlloc", &found, 13000, 0, NULL), 0);
  CHECK(found == sym("cuMemAlloc_v2"));
}

/* ---- N6: the resolver asked for itself. */

static void chain_mode(void) {
  get2_t get = (get2_t)sym("cuGetProcAddress_v2");
  void *p1 = NULL, *p2 = NULL, *found;
  int status = 77;
  EQ(get("cuGetProcAddress", &p1, 11030, 0, &status), 0);
  EQ(status, 0);
  CHECK(p1 && p1 == sym("cuGetProcAddress"));
  /* The older one has no status to write. */
  status = 77;
  EQ(((get2_t)p1)("cuMemAlloc", &found, 12000, 0, &status), 0);
  EQ(status, 77);
  CHECK(found == sym("cuMemAlloc_v2"));
  EQ(((get1_t)p1)("cuGetProcAddress", &p2, 12000, 0), 0);
  CHECK(p2 && p2 == sym("cuGetProcAddress_v2"));
  status = 77;
  EQ(((get2_t)p2)("cuMemAllocAsync", &found, 11020, 0, &status), 0);
  EQ(status, 0);
  EQ(((get2_t)p2)("cuMemAllocAsync", &found, 11010, 0, &status), 0);
  EQ(status, 2);
  CHECK(found == NULL);
  EQ(((get2_t)p2)("cuNoSuchThing", &found, 12000, 0, &status), 500);
  EQ(status, 1);
}

/* ---- N11: the calling thread's own default stream. */

static CUresult (*AllocAsync)(CUdeviceptr *, size_t, CUstream), (*FreeAsync)(CUdeviceptr, CUstream);
static CUresult (*SetAsync)(CUdeviceptr, unsigned char, size_t, CUstream), (*Sync)(CUstream), (*Id)(CUstream, unsigned long long *);
static CUresult (*Launch)(CUstream, void (*)(void *), void *);

static void *other_thread(void *id) {
  CUdeviceptr p = 0;
  void *v;
  MUST(cudaFree(0));
  EQ(Id(NULL, id), 0);
  /* None of this waits for the first thread's default stream, which is held back. */
  EQ(AllocAsync(&p, MB, NULL), 0);
  EQ(SetAsync(p, 1, MB, NULL), 0);
  EQ(FreeAsync(p, NULL), 0);
  EQ(cudaMalloc(&v, MB), 0);
  EQ(SetAsync(dev(v), 2, MB, NULL), 0);
  EQ(FreeAsync(dev(v), NULL), 0);
  EQ(Sync(NULL), 0);
  return NULL;
}
static void streams_mode(void) {
  get2_t get = (get2_t)sym("cuGetProcAddress_v2");
  struct { const char *name; void **to; } want[] = {
    {"cuMemAllocAsync", (void **)&AllocAsync}, {"cuMemFreeAsync", (void **)&FreeAsync}, {"cuMemsetD8Async", (void **)&SetAsync},
    {"cuStreamSynchronize", (void **)&Sync}, {"cuStreamGetId", (void **)&Id}, {"cuLaunchHostFunc", (void **)&Launch},
  };
  for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
    MUST(get(want[i].name, want[i].to, 12000, 2, NULL));
    if (!*want[i].to) printf("there is no %s\n", want[i].name), exit(2);
  }
  MUST(cudaFree(0));
  unsigned long long mine = 0, theirs = 0;
  gate_t *g = calloc(1, sizeof *g);
  MUST(Launch(NULL, gate_wait_, g));
  EQ(Id(NULL, &mine), 0);
  pthread_t t;
  pthread_create(&t, NULL, other_thread, &theirs);
  pthread_join(t, NULL);
  CHECK(mine != theirs);
  gate_open(g);
  EQ(Sync(NULL), 0);
}

/* ---- The ways in: the runner looks at what the pool served. */

static void hundred(alloc_t alloc, free_t release) {
  CUdeviceptr p[100];
  for (int i = 0; i < 100; i++) {
    EQ(alloc(&p[i], 1000 + 100 * (size_t)i), 0);
    EQ(p[i] % 512, 0);
    EQ(cudaMemset((void *)(size_t)p[i], i, 1000), 0);
  }
  for (int i = 0; i < 100; i++) {
    EQ(byte_at((void *)(size_t)p[i]), i);
    EQ(release(p[i]), 0);
  }
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **, unsigned, unsigned long long, int *);

int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "";
  lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!lib) return printf("%s\n", dlerror()), 2;
  if (strcmp(mode, "dlsym") && strcmp(mode, "v1")) MUST(cudaFree(0));
  if (!strcmp(mode, "dlsym")) dlsym_mode(argc > 2 ? argv[2] : "libproxy.so");
  else if (!strcmp(mode, "table")) table_mode();
  else if (!strcmp(mode, "chain")) chain_mode();
  else if (!strcmp(mode, "streams")) streams_mode();
  else if (!strcmp(mode, "direct")) hundred(cuMemAlloc, cuMemFree);
  else if (!strcmp(mode, "handle")) hundred((alloc_t)sym("cuMemAlloc_v2"), (free_t)sym("cuMemFree_v2"));
  else if (!strcmp(mode, "address") || !strcmp(mode, "entry")) {
    void *a = NULL, *f = NULL;
    int status = 77;
    if (mode[0] == 'a') {
      MUST(((get2_t)sym("cuGetProcAddress_v2"))("cuMemAlloc", &a, 12000, 0, &status));
      MUST(((get2_t)sym("cuGetProcAddress_v2"))("cuMemFree", &f, 12000, 0, &status));
    } else {
      MUST(cudaGetDriverEntryPointByVersion("cuMemAlloc", &a, 12000, 0, &status));
      MUST(cudaGetDriverEntryPointByVersion("cuMemFree", &f, 12000, 0, &status));
    }
    EQ(status, 0);
    hundred((alloc_t)a, (free_t)f);
  } else if (!strcmp(mode, "v1")) {
    /* N7: no cuGetProcAddress_v2 at all. */
    CHECK(dlsym(lib, "cuGetProcAddress_v2") == NULL);
    get1_t get = (get1_t)sym("cuGetProcAddress");
    void *a = NULL, *f = NULL, *none = &none;
    CUdeviceptr p[100];
    CUcontext context;
    MUST(cuInit(0));
    MUST(cuCtxCreate(&context, 0, 0));
    EQ(get("cuMemAlloc", &a, 11080, 0), 0);
    EQ(get("cuMemFree", &f, 11080, 0), 0);
    EQ(get("cuNoSuchThing", &none, 11080, 0), 500);
    CHECK(none == NULL && a == sym("cuMemAlloc_v2") && f == sym("cuMemFree_v2"));
    for (int i = 0; i < 100; i++) EQ(((alloc_t)a)(&p[i], 4096), 0);
    for (int i = 0; i < 100; i++) EQ(((free_t)f)(p[i]), 0);
    EQ(cuCtxDestroy(context), 0);
  } else return fprintf(stderr, "usage: %s dlsym|table|chain|streams|v1|direct|handle|address|entry\n", argv[0]), 2;
  printf("preloaded: %d\n", preloaded());
  return check_report(mode);
}
