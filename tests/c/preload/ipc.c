/* Memory shared with another process through the legacy handles: cases I1 and I2.
 *
 * ipc both     the child runs as this process does: it must read the very buffer
 * ipc alone    the child runs without LD_PRELOAD: its open fails at once, or it reads the very buffer
 * ipc reverse  the child runs with LD_PRELOAD=$CHILD_PRELOAD
 * ipc orphan   the process that exported is gone: an error at once
 * ipc crowd    four children at once, and the parent goes on allocating
 * Links: -lcudart -lcuda. */
#define _GNU_SOURCE
#include "../check.h"
#include "driver.h"
#include <stdint.h>
#include <sys/wait.h>

struct request {
  cudaIpcMemHandle_t handle;
  size_t size;
  int pattern; /* of the whole buffer */
  int reply;   /* what the child sets the second half to; 0: nothing */
};

static int all(const unsigned char *host, size_t n, int want) {
  for (size_t i = 0; i < n; i++)
    if (host[i] != want) {
      printf("byte %zu is %d, not %d\n", i, host[i], want);
      return 0;
    }
  return 1;
}
static int device_is(const void *p, size_t n, int want) {
  unsigned char *host = malloc(n);
  int e = cudaMemcpy(host, p, n, cudaMemcpyDeviceToHost), good = !e && all(host, n, want);
  free(host);
  return good;
}

/* The child: takes one request from standard input. Exits with 0: read well; 10: open refused; else a failure. */
static int child(void) {
  struct request r;
  void *p = NULL, *again = NULL;
  alarm(20);
  if (read(0, &r, sizeof r) != (ssize_t)sizeof r) return 2;
  MUST(cudaFree(0));
  /* Its own blocks are its own. */
  void *own;
  MUST(cudaMalloc(&own, r.size));
  MUST(cudaMemset(own, 99, r.size));
  double start = now_s();
  int e = cudaIpcOpenMemHandle(&p, r.handle, cudaIpcMemLazyEnablePeerAccess);
  double seconds = now_s() - start;
  printf("child: preloaded %d, open answers %d in %.3f s\n", preloaded(), e, seconds);
  if (seconds > 5) return 3;
  if (e) {
    CHECK(p == NULL);
    EQ(cudaGetLastError(), e);
    EQ(cudaMalloc(&p, 4096), 0);
    EQ(cudaFree(p), 0);
    return check_failed ? 4 : 10;
  }
  CHECK(device_is(p, r.size, r.pattern));
  CHECK(device_is(own, r.size, 99));
  CUdeviceptr base = 0;
  size_t n = 0;
  struct cudaPointerAttributes a;
  EQ(cuMemGetAddressRange(&base, &n, dev(p) + 1), 0);
  EQ(base, dev(p));
  EQ(cudaPointerGetAttributes(&a, p), 0);
  EQ(a.type, cudaMemoryTypeDevice);
  /* Opened twice it is the same; closed twice it is gone. */
  EQ(cudaIpcOpenMemHandle(&again, r.handle, cudaIpcMemLazyEnablePeerAccess), 0);
  CHECK(again == p);
  EQ(cudaIpcCloseMemHandle(again), 0);
  CHECK(device_is(p, 64, r.pattern));
  if (r.reply) {
    EQ(cudaMemset((char *)p + r.size / 2, r.reply, r.size - r.size / 2), 0);
    EQ(cudaDeviceSynchronize(), 0);
  }
  /* It is not this process's to free. */
  CHECK(cudaFree(p) != 0);
  cudaGetLastError();
  EQ(cudaIpcCloseMemHandle(p), 0);
  EQ(cudaIpcCloseMemHandle(p), 1);
  cudaGetLastError();
  EQ(cudaFree(own), 0);
  return check_failed ? 5 : 0;
}

/* Starts a child with the request; `preload`: NULL as it is, "" without, else that. */
static pid_t start(const char *self, const struct request *r, const char *preload) {
  int ends[2];
  if (pipe(ends)) return -1;
  fflush(stdout);
  pid_t pid = fork();
  if (pid == 0) {
    dup2(ends[0], 0);
    close(ends[0]), close(ends[1]);
    if (preload && !*preload) unsetenv("LD_PRELOAD");
    else if (preload) setenv("LD_PRELOAD", preload, 1);
    execl(self, self, "child", (char *)NULL);
    _exit(9);
  }
  close(ends[0]);
  CHECK(write(ends[1], r, sizeof *r) == (ssize_t)sizeof *r);
  close(ends[1]);
  return pid;
}
static int ended(pid_t pid) {
  int status = -1;
  CHECK(waitpid(pid, &status, 0) == pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status;
}

/* Small buffers, of which many share a page, and large ones; the second of two, its middle. */
static void share(const char *self, const char *preload, int may_refuse) {
  static const size_t SIZES[] = {700, 4096, 100 << 10, 3 << 20, (5 << 20) + 512};
  for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
    struct request r = {.size = SIZES[i], .pattern = 20 + (int)i, .reply = 60 + (int)i};
    void *first, *second, *third;
    MUST(cudaMalloc(&first, SIZES[i]));
    MUST(cudaMalloc(&second, SIZES[i]));
    MUST(cudaMalloc(&third, SIZES[i]));
    MUST(cudaMemset(first, 1, SIZES[i]));
    MUST(cudaMemset(second, r.pattern, SIZES[i]));
    MUST(cudaMemset(third, 3, SIZES[i]));
    MUST(cudaDeviceSynchronize());
    /* The handle of an address inside is that of the whole: its offset is lost. */
    void *at = i % 2 ? second : (char *)second + SIZES[i] / 2;
    double begin = now_s();
    int e = cudaIpcGetMemHandle(&r.handle, at);
    CHECK(now_s() - begin < 5);
    /* Part of one of the driver's own blocks: its handle would show the neighbours. */
    int part = getenv("PARTS") != NULL && SIZES[i] < ((size_t)1 << 20);
    if (part) EQ(e, 1);
    if ((may_refuse || part) && e) {
      printf("no handle: %d\n", e);
      EQ(cudaGetLastError(), e);
    } else {
      EQ(e, 0);
      int code = ended(start(self, &r, preload));
      if (!may_refuse || code != 10) EQ(code, 0);
      if (code == 0) {
        size_t half = SIZES[i] / 2;
        CHECK(device_is(second, half, r.pattern));
        CHECK(device_is((char *)second + half, SIZES[i] - half, r.reply));
      }
    }
    CHECK(device_is(first, SIZES[i], 1));
    CHECK(device_is(third, SIZES[i], 3));
    /* In its own process a handle cannot be opened. */
    void *p = NULL;
    if (!e) CHECK(cudaIpcOpenMemHandle(&p, r.handle, cudaIpcMemLazyEnablePeerAccess) != 0);
    cudaGetLastError();
    EQ(cudaFree(second), 0);
    EQ(cudaFree(first), 0);
    EQ(cudaFree(third), 0);
  }
  cudaIpcMemHandle_t h;
  EQ(cudaIpcGetMemHandle(&h, (void *)0x10000), 1);
  EQ(cudaGetLastError(), 1);
}

static void crowd(const char *self) {
  struct request r[4];
  void *p[4];
  pid_t pid[4];
  for (int i = 0; i < 4; i++) {
    r[i] = (struct request){.size = 300 * KB, .pattern = 30 + i, .reply = 0};
    MUST(cudaMalloc(&p[i], r[i].size));
    MUST(cudaMemset(p[i], r[i].pattern, r[i].size));
  }
  MUST(cudaDeviceSynchronize());
  for (int i = 0; i < 4; i++) {
    EQ(cudaIpcGetMemHandle(&r[i].handle, p[i]), 0);
    pid[i] = start(self, &r[i], NULL);
  }
  for (int i = 0; i < 300; i++) {
    void *v;
    MUST(cudaMalloc(&v, 100 * KB + (size_t)i * 512));
    MUST(cudaMemset(v, 200, 100 * KB));
    MUST(cudaFree(v));
  }
  for (int i = 0; i < 4; i++) {
    EQ(ended(pid[i]), 0);
    CHECK(device_is(p[i], r[i].size, r[i].pattern));
    EQ(cudaFree(p[i]), 0);
  }
}

static void orphan(void) {
  int ends[2];
  cudaIpcMemHandle_t h;
  MUST(pipe(ends));
  fflush(stdout);
  /* Before this process uses CUDA: the child may. */
  pid_t pid = fork();
  if (pid == 0) {
    void *p;
    MUST(cudaMalloc(&p, MB));
    MUST(cudaIpcGetMemHandle(&h, p));
    _exit(write(ends[1], &h, sizeof h) != (ssize_t)sizeof h);
  }
  EQ(ended(pid), 0);
  CHECK(read(ends[0], &h, sizeof h) == (ssize_t)sizeof h);
  void *p = NULL;
  MUST(cudaFree(0));
  double begin = now_s();
  CHECK(cudaIpcOpenMemHandle(&p, h, cudaIpcMemLazyEnablePeerAccess) != 0);
  CHECK(now_s() - begin < 5);
  cudaGetLastError();
  memset(&h, 0x5a, sizeof h); /* no handle at all */
  EQ(cudaIpcOpenMemHandle(&p, h, cudaIpcMemLazyEnablePeerAccess), 1);
  cudaGetLastError();
}

int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "";
  if (!strcmp(mode, "child")) {
    int code = child();
    fflush(stdout);
    return code;
  }
  alarm(100);
  if (!strcmp(mode, "orphan")) orphan();
  else if (!strcmp(mode, "both")) share(argv[0], NULL, 0);
  else if (!strcmp(mode, "alone")) share(argv[0], "", 1);
  else if (!strcmp(mode, "reverse")) share(argv[0], getenv("CHILD_PRELOAD"), 0);
  else if (!strcmp(mode, "crowd")) crowd(argv[0]);
  else return fprintf(stderr, "usage: %s both|alone|reverse|orphan|crowd\n", argv[0]), 2;
  return check_report("ipc");
}
