/* A program that links to neither library: all of CUDA by dlopen, RTLD_LOCAL. `dlopen_only driver|runtime|both`.
 * Links: -ldl. */
#define _GNU_SOURCE
#include "../check.h"
#include <cuda.h>
#include <dlfcn.h>

static void *open_local(const char *name) {
  void *h = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!h) printf("%s\n", dlerror()), exit(2);
  return h;
}
static void *sym(void *lib, const char *name) {
  void *p = dlsym(lib, name);
  if (!p) printf("there is no %s\n", name), exit(2);
  return p;
}
#define F(lib, ret, args, name) ((ret(*) args)sym(lib, name))

static void runtime(void) {
  void *lib = open_local("libcudart.so.13");
  cudaError_t (*alloc)(void **, size_t) = F(lib, cudaError_t, (void **, size_t), "cudaMalloc");
  cudaError_t (*release)(void *) = F(lib, cudaError_t, (void *), "cudaFree");
  cudaError_t (*set)(void *, int, size_t) = F(lib, cudaError_t, (void *, int, size_t), "cudaMemset");
  cudaError_t (*copy)(void *, const void *, size_t, enum cudaMemcpyKind) =
    F(lib, cudaError_t, (void *, const void *, size_t, enum cudaMemcpyKind), "cudaMemcpy");
  void *p[100];
  for (int i = 0; i < 100; i++) {
    EQ(alloc(&p[i], 4096), 0);
    EQ(set(p[i], i, 4096), 0);
  }
  for (int i = 0; i < 100; i++) {
    unsigned char byte = 0;
    EQ(copy(&byte, p[i], 1, cudaMemcpyDeviceToHost), 0);
    EQ(byte, i);
    EQ(release(p[i]), 0);
  }
}

static void driver(void) {
  void *lib = open_local("libcuda.so.1");
  CUresult (*alloc)(CUdeviceptr *, size_t) = F(lib, CUresult, (CUdeviceptr *, size_t), "cuMemAlloc_v2");
  CUresult (*release)(CUdeviceptr) = F(lib, CUresult, (CUdeviceptr), "cuMemFree_v2");
  CUresult (*info)(size_t *, size_t *) = F(lib, CUresult, (size_t *, size_t *), "cuMemGetInfo_v2");
  CUdeviceptr p[100];
  CUcontext context = NULL;
  MUST(F(lib, CUresult, (unsigned), "cuInit")(0));
  MUST(F(lib, CUresult, (CUcontext *, CUdevice), "cuDevicePrimaryCtxRetain")(&context, 0));
  MUST(F(lib, CUresult, (CUcontext), "cuCtxSetCurrent")(context));
  for (int i = 0; i < 100; i++) EQ(alloc(&p[i], 4096), 0);
  size_t f = 0, t = 0;
  EQ(info(&f, &t), 0);
  CHECK(f <= t - 100 * 512 && t > 0);
  for (int i = 0; i < 100; i++) EQ(release(p[i]), 0);
}

int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "";
  if (!strcmp(mode, "driver") || !strcmp(mode, "both")) driver();
  if (!strcmp(mode, "runtime") || !strcmp(mode, "both")) runtime();
  return check_report(mode);
}
