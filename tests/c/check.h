/* Checks, gates and a report, for the C programs. A failed check prints where and what, and the program goes on. */
#ifndef CHECK_H
#define CHECK_H
#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int check_passed, check_failed, check_skipped;

#define CHECK(cond) \
  do { \
    if (cond) check_passed++; \
    else { check_failed++; printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #cond); } \
  } while (0)
/* Both are whole numbers; both are shown. */
#define EQ(seen, want) \
  do { \
    long long s_ = (long long)(seen), w_ = (long long)(want); \
    if (s_ == w_) check_passed++; \
    else { check_failed++; printf("%s:%d: %s is %lld, expected %lld\n", __FILE__, __LINE__, #seen, s_, w_); } \
  } while (0)
/* A call that the test cannot go on without. */
#define MUST(call) \
  do { \
    int e_ = (int)(call); \
    if (e_) { printf("%s:%d: %s answered %d\n", __FILE__, __LINE__, #call, e_); exit(2); } \
  } while (0)
#define SKIP(why) (check_skipped++, printf("skipped: %s\n", why))

static inline int check_report(const char *name) {
  printf("%s\n%d passed, %d failed, %d skipped\n", name, check_passed, check_failed, check_skipped);
  return check_failed != 0;
}

/* Holds a stream back until it is opened; opens by itself after 20 s, and that is a failure. */
typedef struct {
  atomic_int open, timed_out;
} gate_t;
static inline void gate_wait_(void *p) {
  gate_t *g = p;
  for (int i = 0; i < 200000 && !atomic_load(&g->open); i++) usleep(100);
  if (!atomic_load(&g->open)) atomic_store(&g->timed_out, 1);
}
static inline gate_t *gate_close(cudaStream_t s) {
  gate_t *g = calloc(1, sizeof *g);
  MUST(cudaLaunchHostFunc(s, gate_wait_, g));
  return g;
}
static inline void gate_open(gate_t *g) {
  CHECK(!atomic_load(&g->timed_out));
  atomic_store(&g->open, 1);
}
/* The byte at a device address, after all work. */
static inline int byte_at(const void *p) {
  unsigned char b = 0;
  MUST(cudaDeviceSynchronize());
  MUST(cudaMemcpy(&b, p, 1, cudaMemcpyDeviceToHost));
  return b;
}
static inline size_t device_free(void) {
  size_t f = 0, t = 0;
  MUST(cudaMemGetInfo(&f, &t));
  return f;
}
static inline double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
#endif
