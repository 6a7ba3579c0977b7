/* A storage layer in Torch's style: memory comes through a table of functions (cutorch's THCDeviceAllocator), which starts on
 * cudaMalloc and is swapped for gpupool's at run time. Every storage is freed through the allocator that it came from.
 * Build: cc torch_swap.c -lcudart -ldl   (the pool is opened with dlopen: libgpupool.so, or the path in the first argument) */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <gpupool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static cudaError_t cuda_malloc(void *state, void **ptr, size_t size, cudaStream_t s) {
  (void)state, (void)s;
  return cudaMalloc(ptr, size);
}
static cudaError_t cuda_realloc(void *state, void **ptr, size_t old_size, size_t new_size, cudaStream_t s) {
  void *p = NULL;
  cudaError_t e = cuda_malloc(state, &p, new_size, s);
  if (e == cudaSuccess && *ptr) e = cudaMemcpyAsync(p, *ptr, old_size < new_size ? old_size : new_size, cudaMemcpyDeviceToDevice, s);
  if (e == cudaSuccess) e = cudaFree(*ptr), *ptr = p;
  return e;
}
static cudaError_t cuda_free(void *state, void *ptr) {
  (void)state;
  return cudaFree(ptr);
}
static const THCDeviceAllocator cuda_allocator = {cuda_malloc, cuda_realloc, cuda_free, NULL, NULL, NULL};

/* What a tensor library keeps: the allocator goes with the memory. */
typedef struct {
  void *data;
  size_t size;
  const THCDeviceAllocator *allocator;
} Storage;

static const THCDeviceAllocator *current = &cuda_allocator;
static int failures;

static void ok(cudaError_t e, const char *what) {
  if (e != cudaSuccess) failures++, fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
}
static Storage storage_new(size_t size, cudaStream_t s) {
  Storage st = {NULL, size, current};
  ok(current->malloc(current->state, &st.data, size, s), "malloc");
  return st;
}
static void storage_resize(Storage *st, size_t size, cudaStream_t s) {
  ok(st->allocator->realloc(st->allocator->state, &st->data, st->size, size, s), "realloc");
  st->size = size;
}
static void storage_free(Storage *st) {
  ok(st->allocator->free(st->allocator->state, st->data), "free");
  st->data = NULL;
}
static void expect(const Storage *st, unsigned char value, const char *what) {
  unsigned char seen = 0;
  ok(cudaDeviceSynchronize(), "synchronize");
  ok(cudaMemcpy(&seen, st->data, 1, cudaMemcpyDeviceToHost), "copy");
  if (seen != value) failures++, fprintf(stderr, "%s: holds %d, not %d\n", what, seen, value);
}

int main(int argc, char **argv) {
  const char *library = argc > 1 ? argv[1] : "libgpupool.so";
  if (!strcmp(library, "--help")) return printf("usage: %s [path of libgpupool.so]\n", argv[0]), 0;
  cudaStream_t s;
  ok(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "stream");

  Storage before = storage_new((size_t)1 << 20, s);
  ok(cudaMemsetAsync(before.data, 11, before.size, s), "memset");

  void *lib = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!lib) return fprintf(stderr, "%s\n", dlerror()), 1;
  const THCDeviceAllocator *(*get)(void);
  *(void **)&get = dlsym(lib, "gpupoolTHCDeviceAllocator");
  if (!get) return fprintf(stderr, "%s\n", dlerror()), 1;
  current = get();
  printf("swapped cudaMalloc for %s\n", library);

  Storage after = storage_new((size_t)1 << 20, s);
  ok(cudaMemsetAsync(after.data, 22, after.size, s), "memset");
  storage_resize(&after, (size_t)3 << 20, s);
  storage_resize(&before, (size_t)2 << 20, s); /* through cudaMalloc still */
  expect(&before, 11, "the storage of before the swap");
  expect(&after, 22, "the storage of after the swap");

  size_t idle = 0, largest = 0;
  storage_free(&after);
  storage_free(&before);
  ok(current->cacheInfo(current->state, 0, &idle, &largest), "cacheInfo");
  printf("the pool keeps %zu bytes idle, the largest block %zu\n", idle, largest);
  ok(current->emptyCache(current->state), "emptyCache");
  ok(cudaStreamDestroy(s), "stream");
  printf(failures ? "%d failures\n" : "every storage went back to the allocator it came from\n", failures);
  return failures != 0;
}
