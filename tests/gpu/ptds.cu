/* static_runtime.cu on four threads, each with a default stream of its own: built with --default-stream per-thread. */
#define THREADS 4
#include "static_runtime.cu"
