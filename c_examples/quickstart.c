/* The shortest way in: CNMeM's interface, served by libgpupool.
 * Build: cc quickstart.c -lcudart -lgpupool */
#include <cnmem.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#define CUDA(call) \
  do { \
    cudaError_t e_ = (call); \
    if (e_ != cudaSuccess) return fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(e_)), 1; \
  } while (0)
#define CNMEM(call) \
  do { \
    cnmemStatus_t s_ = (call); \
    if (s_ != CNMEM_STATUS_SUCCESS) return fprintf(stderr, "%s: %s\n", #call, cnmemGetErrorString(s_)), 1; \
  } while (0)

int main(int argc, char **argv) {
  if (argc > 1) return printf("usage: %s\nAllocates, uses and frees device memory through CNMeM's interface.\n", argv[0]), strcmp(argv[1], "--help") != 0;
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

  cnmemDevice_t device;
  memset(&device, 0, sizeof device);
  device.size = (size_t)64 << 20; /* taken at once; the pool grows when more is asked */
  device.numStreams = 1;
  device.streams = &stream;
  CNMEM(cnmemInit(1, &device, CNMEM_FLAGS_DEFAULT));

  for (int i = 0; i < 3; i++) {
    void *p;
    CNMEM(cnmemMalloc(&p, (size_t)8 << 20, stream));
    CUDA(cudaMemsetAsync(p, i, (size_t)8 << 20, stream));
    CNMEM(cnmemFree(p, stream)); /* no wait: the next use on this stream comes after the memset */
    printf("iteration %d: block at %p\n", i, p);
  }
  size_t free_bytes, total_bytes;
  CNMEM(cnmemMemGetInfo(&free_bytes, &total_bytes, stream));
  printf("the stream's manager has %zu of %zu bytes free\n", free_bytes, total_bytes);

  CUDA(cudaStreamSynchronize(stream));
  CNMEM(cnmemFinalize());
  CUDA(cudaStreamDestroy(stream));
  return 0;
}
