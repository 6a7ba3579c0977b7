/* Comes before libb, whose foo it stands before. */
#define _GNU_SOURCE
#include <dlfcn.h>

int foo(void);
int foo(void) {
  int (*next)(void) = (int (*)(void))dlsym(RTLD_NEXT, "foo");
  return !next || next == foo ? -1 : 10 + next();
}
