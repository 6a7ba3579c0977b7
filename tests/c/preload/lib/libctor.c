/* Uses CUDA before main: some libraries do. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

extern void *ctor_block;
void *ctor_block;
__attribute__((constructor)) static void first_use(void) {
  unsigned char byte = 0;
  void *p = NULL;
  int e[4] = {cudaMalloc(&p, 1 << 20), cudaMemset(p, 5, 1 << 20), cudaMemcpy(&byte, p, 1, cudaMemcpyDeviceToHost),
              cudaMalloc(&ctor_block, 4096)};
  if (e[0] || e[1] || e[2] || e[3] || byte != 5 || cudaFree(p)) {
    printf("in a constructor: %d %d %d %d, byte %d\n", e[0], e[1], e[2], e[3], byte);
    exit(3);
  }
}
