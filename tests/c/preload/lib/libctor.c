/* Uses CUDA before main: some libraries do. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

extern void *ctor_block;
void *ctor_block;
__attribute__((constructor)) static void first_use(void) {
  void *p = NULL, *q = NULL;
  size_t f = 0, t = 0;
  /* No work that is waited for: the loader's lock is held, and simcuda's streams are threads that start. */
  int e[] = {cudaMalloc(&p, 1 << 20), cudaMalloc(&q, 1 << 20), cudaMalloc(&ctor_block, 4096), cudaMemGetInfo(&f, &t), cudaFree(p),
             cudaFree(q)};
  for (int i = 0; i < 6; i++)
    if (e[i]) printf("in a constructor: call %d answers %d\n", i, e[i]), exit(3);
}
