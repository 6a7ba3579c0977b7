/* The pool and the life of contexts, threads and processes.
 *
 * life reset      case S8: cudaDeviceReset with live and cached blocks
 * life contexts   contexts that are destroyed with live blocks while other threads have them current
 * life exit       frees in exit handlers, destructors and static destructors, after the driver's end too
 * life fork       case I3: children that exit, that use CUDA, that exec (`life child`)
 * life threads    50 threads that allocate, free each other's blocks and die
 * life library F  the first use is in the constructor of library F, opened here
 * life preloaded  the same, the library was preloaded
 * Links: -lcudart -lcuda. */
#define _GNU_SOURCE
#include "../check.h"
#include "driver.h"
#include <pthread.h>
#include <stdint.h>
#include <sys/wait.h>

static void use(size_t n) {
  void *p;
  EQ(cudaMalloc(&p, n), 0);
  EQ(cudaMemset(p, 6, n), 0);
  EQ(byte_at((char *)p + n - 1), 6);
  EQ(cudaFree(p), 0);
}

/* ---- reset */

static void reset(void) {
  for (int round = 0; round < 10; round++) {
    void *live[6], *freed[6];
    cudaStream_t s;
    size_t sizes[6] = {512, 4096, 4096, 300 * KB, 3 * MB, 20 * MB};
    MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    for (int i = 0; i < 6; i++) {
      EQ(cudaMalloc(&live[i], sizes[i]), 0);
      EQ(cudaMalloc(&freed[i], sizes[i]), 0);
      EQ(cudaMemsetAsync(freed[i], 1, sizes[i], s), 0);
    }
    for (int i = 0; i < 6; i++) EQ(cudaFree(freed[i]), 0);
    EQ(cudaDeviceReset(), 0);
    /* Blocks of the old context are no blocks any more. */
    EQ(cudaMalloc(&freed[0], 4096), 0);
    EQ(cudaMemset(freed[0], 2, 4096), 0);
    for (int i = 0; i < 6; i++)
      if (live[i] != freed[0]) EQ(cudaFree(live[i]), 1);
    cudaGetLastError();
    EQ(byte_at(freed[0]), 2);
    for (int i = 1; i < 6; i++) {
      EQ(cudaMalloc(&freed[i], sizes[i]), 0);
      EQ(cudaMemset(freed[i], 3, sizes[i]), 0);
      EQ(byte_at((char *)freed[i] + sizes[i] - 1), 3);
    }
    for (int i = 0; i < 6; i++) EQ(cudaFree(freed[i]), 0);
    EQ(cudaGetLastError(), 0);
    if (round % 2) EQ(cudaDeviceReset(), 0);
  }
  size_t f = 0, t = 0;
  MUST(cudaMemGetInfo(&f, &t));
  CHECK(f <= t && f + 64 * MB >= t);
}

/* ---- contexts */

static CUcontext context;
static CUdeviceptr left_block;
static pthread_barrier_t turn;
static void *in_context(void *unused) {
  (void)unused;
  CUdeviceptr p;
  MUST(cuCtxSetCurrent(context));
  EQ(cuMemAlloc(&p, 8192), 0);
  EQ(cuMemFree(p), 0);
  EQ(cuMemAlloc(&p, 8192), 0); /* live until the context ends */
  pthread_barrier_wait(&turn);
  pthread_barrier_wait(&turn); /* it has been destroyed */
  CUdeviceptr q;
  EQ(cuMemAlloc(&q, 8192), 709);
  EQ(cuMemFree(p), 709);
  /* Another context serves this thread as well as any other. */
  void *v;
  MUST(cuCtxSetCurrent(NULL));
  EQ(cudaMalloc(&v, 8192), 0);
  EQ(cudaFree(v), 0);
  return NULL;
}
static void contexts(void) {
  void *primary;
  EQ(cudaMalloc(&primary, MB), 0);
  EQ(cudaMemset(primary, 8, MB), 0);
  CUcontext mine = NULL;
  MUST(cuCtxGetCurrent(&mine));
  size_t first = device_free();
  for (int round = 0; round < 5; round++) {
    pthread_t t[3];
    CUdeviceptr freed;
    pthread_barrier_init(&turn, NULL, 4);
    MUST(cuCtxCreate(&context, 0, 0));
    EQ(cuMemAlloc(&left_block, 3 * MB), 0);
    EQ(cuMemAlloc(&freed, 3 * MB), 0);
    EQ(cuMemsetD8Async(freed, 1, 3 * MB, NULL), 0);
    EQ(cuMemFree(freed), 0);
    for (int i = 0; i < 3; i++) pthread_create(&t[i], NULL, in_context, NULL);
    pthread_barrier_wait(&turn);
    EQ(cuCtxDestroy(context), 0);
    pthread_barrier_wait(&turn);
    for (int i = 0; i < 3; i++) pthread_join(t[i], NULL);
    pthread_barrier_destroy(&turn);
    MUST(cuCtxSetCurrent(mine));
    EQ(cuMemFree(left_block), 1);
    EQ(byte_at(primary), 8);
    use(3 * MB);
    /* The memory of the context has gone with it. */
    CHECK(device_free() + 8 * MB >= first);
  }
  EQ(cudaFree(primary), 0);
}

/* ---- exit */

static void *exit_blocks[3];
static int exiting;
/* 0, or 4: the driver has ended. Nothing else, and no fault. */
static void free_late(const char *when, void *p) {
  if (!exiting) return;
  void *q = NULL;
  int e = cudaFree(p), m = cudaMalloc(&q, 4096);
  printf("%s: free %d, malloc %d\n", when, e, m);
  fflush(stdout);
  if ((e != 0 && e != 4) || (m != 0 && m != 4)) _exit(3);
}
static void at_exit_early(void) { free_late("exit handler of before the first call", exit_blocks[0]); }
static void at_exit_late(void) { free_late("exit handler of after the first call", exit_blocks[1]); }
__attribute__((destructor)) static void destructor(void) { free_late("destructor", exit_blocks[2]); }

static void *dawdles(void *unused) {
  /* A thread that allocates while the process ends. */
  void *p;
  for (;;)
    if (!cudaMalloc(&p, 4096)) cudaFree(p);
  return unused;
}
static int exit_mode(int busy) {
  atexit(at_exit_early);
  for (int i = 0; i < 3; i++) MUST(cudaMalloc(&exit_blocks[i], 100 * KB));
  atexit(at_exit_late);
  pthread_t t;
  if (busy) pthread_create(&t, NULL, dawdles, NULL), usleep(20000);
  exiting = 1;
  printf("live\n1 passed, 0 failed\n");
  return 0;
}

/* ---- fork */

static void reap(pid_t pid) {
  int status = -1;
  CHECK(waitpid(pid, &status, 0) == pid);
  EQ(status, 0);
}
static void *allocates(void *stop) {
  MUST(cudaFree(0));
  while (!atomic_load((atomic_int *)stop)) {
    void *p;
    MUST(cudaMalloc(&p, 4096));
    MUST(cudaFree(p));
  }
  return NULL;
}
static void fork_mode(const char *self) {
  void *p[20];
  atomic_int stop = 0;
  pthread_t t;
  for (int i = 0; i < 20; i++) {
    EQ(cudaMalloc(&p[i], 100 * KB), 0);
    EQ(cudaMemset(p[i], i, 100 * KB), 0);
  }
  for (int i = 10; i < 20; i++) EQ(cudaFree(p[i]), 0);
  /* Locks may be held by another thread at the moment of the fork. */
  pthread_create(&t, NULL, allocates, &stop);
  fflush(stdout);
  for (int round = 0; round < 12; round++) {
    pid_t pid = fork();
    if (pid == 0) {
      if (round % 4 == 0) exit(0);
      if (round % 4 == 1) _exit(0);
      if (round % 4 == 2) {
        /* There is no CUDA in a forked child: an error at once. */
        void *v;
        alarm(20);
        _exit(cudaMalloc(&v, 4096) == 3 && cudaFree(p[0]) == 3 ? 0 : 1);
      }
      execl(self, self, "child", (char *)NULL);
      _exit(9);
    }
    reap(pid);
    use(100 * KB);
  }
  atomic_store(&stop, 1);
  pthread_join(t, NULL);
  for (int i = 0; i < 10; i++) {
    EQ(byte_at(p[i]), i);
    EQ(cudaFree(p[i]), 0);
  }
  EQ(cudaGetLastError(), 0);
}

/* ---- threads */

enum { THREADS = 50, EACH = 20 };
static void *slot[THREADS * EACH];
static pthread_mutex_t slots = PTHREAD_MUTEX_INITIALIZER;
static void *lives_shortly(void *arg) {
  long id = (long)(intptr_t)arg, errors = 0;
  uint64_t rng = (uint64_t)(id + 1) * 0x9e3779b97f4a7c15u;
  MUST(cudaFree(0));
  for (int i = 0; i < EACH * 3; i++) {
    rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
    void *p = NULL, *theirs;
    size_t size = 512 + (rng >> 20) % (64 * KB);
    if (cudaMalloc(&p, size)) { errors++; continue; }
    /* The first word says how large it is, the last byte ends it. */
    if (cudaMemcpy(p, &size, sizeof size, cudaMemcpyHostToDevice) || cudaMemset((char *)p + size - 1, 77, 1)) errors++;
    pthread_mutex_lock(&slots);
    theirs = slot[(rng >> 40) % (THREADS * EACH)];
    slot[(rng >> 40) % (THREADS * EACH)] = p;
    pthread_mutex_unlock(&slots);
    if (!theirs) continue;
    size_t was = 0;
    unsigned char last = 0;
    if (cudaMemcpy(&was, theirs, sizeof was, cudaMemcpyDeviceToHost)) errors++;
    if (was < 512 || was > 65 * KB) { errors++; continue; }
    if (cudaMemcpy(&last, (char *)theirs + was - 1, 1, cudaMemcpyDeviceToHost) || last != 77) errors++;
    if (cudaFree(theirs)) errors++;
  }
  return (void *)(intptr_t)errors;
}
static void threads_mode(void) {
  for (int round = 0; round < 2; round++) {
    pthread_t t[THREADS];
    for (int i = 0; i < THREADS; i++) pthread_create(&t[i], NULL, lives_shortly, (void *)(intptr_t)(i + round * THREADS));
    for (int i = 0; i < THREADS; i++) {
      void *errors;
      pthread_join(t[i], &errors);
      EQ((intptr_t)errors, 0);
    }
  }
  size_t before = device_free(), live = 0;
  for (int i = 0; i < THREADS * EACH; i++)
    if (slot[i]) {
      CUdeviceptr base = 0;
      size_t n = 0;
      EQ(cuMemGetAddressRange(&base, &n, dev(slot[i])), 0);
      EQ(base, dev(slot[i]));
      live += n;
      EQ(cudaFree(slot[i]), 0);
    }
  CHECK(live > MB / 2 && device_free() >= before + live / 2);
}

int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "";
  if (!strcmp(mode, "exit") || !strcmp(mode, "exit-busy")) return exit_mode(mode[4] == '-');
  if (!strcmp(mode, "library")) {
    if (argc < 3 || !dlopen(argv[2], RTLD_NOW)) return printf("%s\n", dlerror()), 2;
    void **block = dlsym(dlopen(argv[2], RTLD_NOW), "ctor_block");
    if (!block) return printf("%s\n", dlerror()), 2;
    EQ(cudaFree(*block), 0);
  } else if (!strcmp(mode, "preloaded")) {
    void **block = dlsym(RTLD_DEFAULT, "ctor_block");
    if (!block) return printf("%s\n", dlerror()), 2;
    EQ(cudaFree(*block), 0);
  }
  MUST(cudaFree(0));
  if (!strcmp(mode, "reset")) reset();
  else if (!strcmp(mode, "contexts")) contexts();
  else if (!strcmp(mode, "fork")) fork_mode(argv[0]);
  else if (!strcmp(mode, "threads")) threads_mode();
  else if (!strcmp(mode, "child") || !strcmp(mode, "library") || !strcmp(mode, "preloaded"))
    for (int i = 0; i < 10; i++) use(4096);
  else
    return fprintf(stderr, "usage: %s reset|contexts|exit|exit-busy|fork|child|threads|library FILE|preloaded\n", argv[0]), 2;
  return check_report("life");
}
