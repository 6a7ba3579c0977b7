/* nvcc's default: the static runtime, inside the program, where no symbol of it can be replaced (case N9). */
#define _GNU_SOURCE
#include "../../check.h"

int main(void) {
  void *p[100];
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < 100; i++) {
      EQ(cudaMalloc(&p[i], 4096 + 512 * (size_t)i), 0);
      EQ(cudaMemset(p[i], i, 4096), 0);
    }
    for (int i = 0; i < 100; i++) {
      EQ(byte_at(p[i]), i);
      EQ(cudaFree(p[i]), 0);
    }
  }
  EQ(cudaGetLastError(), 0);
  return check_report("static runtime");
}
