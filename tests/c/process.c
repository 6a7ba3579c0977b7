/* The library and the life of a process: no driver, fork, exit. `process none|fork|exit`. */
#define _GNU_SOURCE
#include "check.h"
#include <gpupool.h>
#include <sys/wait.h>

static void *block;

/* Registered before the library's first use of the driver, so that it runs when the driver is not to be called any more. */
static void free_at_exit(void) {
  int e = gpupoolFree(block, 0);
  printf("free at exit: %d\n", e);
  fflush(stdout);
  if (e != 4) _exit(3); /* cudaErrorCudartUnloading */
}

/* In a child there is no device state: every call answers, and its end leaves the parent's blocks alone (case I3). */
static int child(void) {
  void *p = &p;
  EQ(gpupoolFree(block, 0), 3);
  EQ(gpupoolMalloc(&p, 4096, 0), 3);
  CHECK(p == NULL);
  return check_failed ? 1 : 0;
}

int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "";
  if (!strcmp(mode, "none")) {
    /* Each call tries anew, and each gets the same answer. */
    for (int i = 0; i < 3; i++) {
      EQ(gpupoolMalloc(&block, 4096, 0), 35);
      CHECK(block == NULL);
    }
    return check_report("process none");
  }
  if (!strcmp(mode, "exit")) {
    atexit(free_at_exit);
    MUST(cudaFree(0));
    MUST(gpupoolMalloc(&block, 1 << 20, 0));
    return 0;
  }
  if (strcmp(mode, "fork")) return fprintf(stderr, "usage: %s none|fork|exit\n", argv[0]), 2;
  MUST(cudaFree(0));
  /* Before there is a pool nothing is known, and that is an answer. */
  EQ(gpupoolFree((void *)0x1234, 0), 1);
  MUST(gpupoolMalloc(&block, 1 << 20, 0));
  MUST(cudaMemset(block, 7, 1 << 20));
  pid_t pid = fork();
  if (pid == 0) exit(child());
  int status = -1;
  CHECK(waitpid(pid, &status, 0) == pid);
  EQ(status, 0);
  EQ(byte_at(block), 7);
  void *other;
  EQ(gpupoolMalloc(&other, 4096, 0), 0);
  EQ(gpupoolFree(other, 0), 0);
  EQ(gpupoolFree(block, 0), 0);
  return check_report("process fork");
}
