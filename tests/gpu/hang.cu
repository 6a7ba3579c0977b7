/* Orders of calls in which the bare driver neither hangs nor loses a result; nor may the library.
 *   hang wait_value|spin|copy|capture
 * wait_value, spin: a stream waits for what is later given to another, with cudaFree before and cudaMalloc after the
 * wait began. copy: a cudaFree is all that stands between a kernel and the copy of its results. capture: one thread
 * captures, it or another allocates; the codes are printed, to be compared with the bare driver's. A test that hangs
 * ends after 20 s, status 3. */
#include "gpu.h"
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

typedef CUresult (*value32_t)(CUstream, CUdeviceptr, unsigned, unsigned);

static volatile unsigned *flag; /* pinned; the device sees it at flag_device */
static unsigned *flag_device;
static const char *test = "";
static int failed;

static void hung(int signal) {
  static const char text[] = ": HUNG\n";
  (void)signal;
  /* What waits may end, or the device could not be left. */
  if (flag) *flag = ~0u;
  if (write(1, test, strlen(test)) < 0 || write(1, text, sizeof text - 1) < 0) _exit(4);
  _exit(3);
}

/* Ends by itself after some 10 s, and that is a failure. */
__global__ static void wait_for(volatile unsigned *f, unsigned value, unsigned *gave_up) {
  long long t0 = clock64();
  while (*f < value)
    if (clock64() - t0 > 20000000000ll) { *gave_up = 1; return; }
}
__global__ static void set_flag(volatile unsigned *f, unsigned value) { *f = value; }
__global__ static void slow_ones(unsigned char *p, size_t n) {
  for (size_t i = threadIdx.x; i < n; i += blockDim.x) {
    p[i] = 1;
    if (i % 4096 < blockDim.x) spin(20 * CYCLES_A_US);
  }
}

/* Blocks are freed and asked for around the start of a wait, then what it waits for is submitted. */
static void waits(int in_kernel) {
  enum { BLOCKS = 100, ROUNDS = 20 };
  void *lib = dlopen("libcuda.so.1", RTLD_NOW), *p[BLOCKS];
  value32_t wait_value = lib ? (value32_t)dlsym(lib, "cuStreamWaitValue32_v2") : NULL;
  value32_t write_value = lib ? (value32_t)dlsym(lib, "cuStreamWriteValue32_v2") : NULL;
  cudaStream_t waiting, other;
  unsigned *gave_up, seen = 0;
  if (!in_kernel && (!wait_value || !write_value)) { printf("skipped: %s: the driver cannot\n", test); return; }
  MUST(cudaStreamCreateWithFlags(&waiting, cudaStreamNonBlocking));
  MUST(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  MUST(cudaMalloc((void **)&gave_up, sizeof seen));
  MUST(cudaMemset(gave_up, 0, sizeof seen));
  /* A kernel's first launch may wait for the device: it is not to come while another waits. */
  wait_for<<<1, 1, 0, waiting>>>(flag_device, 0, gave_up);
  set_flag<<<1, 1, 0, other>>>(flag_device, 0);
  MUST(cudaDeviceSynchronize());
  for (unsigned round = 1; round <= ROUNDS; round++) {
    size_t size = (size_t)512 << round; /* to 512 MiB, but no more than 4 GiB in all */
    int n = size * BLOCKS > ((size_t)4 << 30) ? (int)(((size_t)4 << 30) / size) : BLOCKS;
    for (int i = 0; i < n; i++) MUST(cudaMalloc(&p[i], size));
    for (int i = 0; i < n; i++) {
      MUST(cudaMemsetAsync(p[i], i, size < 65536 ? size : 65536, i % 2 ? waiting : other));
      MUST(cudaFree(p[i]));
    }
    if (in_kernel) wait_for<<<1, 1, 0, waiting>>>(flag_device, round, gave_up);
    else MUST(wait_value(waiting, (CUdeviceptr)flag_device, round, CU_STREAM_WAIT_VALUE_GEQ));
    MUST(cudaGetLastError());
    /* Another size too: the old blocks do not fit, and memory has to move or to grow. */
    for (int i = 0; i < n; i++) MUST(cudaMalloc(&p[i], i % 3 ? size : size + size / 2));
    if (in_kernel) set_flag<<<1, 1, 0, other>>>(flag_device, round);
    else MUST(write_value(other, (CUdeviceptr)flag_device, round, 0));
    MUST(cudaGetLastError());
    MUST(cudaDeviceSynchronize());
    for (int i = 0; i < n; i++) MUST(cudaFree(p[i]));
  }
  MUST(cudaMemcpy(&seen, gave_up, sizeof seen, cudaMemcpyDeviceToHost));
  if (seen) failed++, printf("%s: a kernel waited in vain\n", test);
  else printf("%s: %d rounds went through\n", test, ROUNDS);
}

static void copies(void) {
  enum { N = 256 * 1024, TIMES = 10 };
  cudaStream_t writer, copier;
  unsigned char *p, *host;
  void *block;
  MUST(cudaStreamCreateWithFlags(&writer, cudaStreamNonBlocking));
  MUST(cudaStreamCreateWithFlags(&copier, cudaStreamNonBlocking));
  MUST(cudaMalloc((void **)&p, N));
  MUST(cudaMallocHost((void **)&host, N));
  slow_ones<<<1, 256, 0, writer>>>(p, N);
  MUST(cudaDeviceSynchronize());
  static const char *how[] = {"blocking", "async, its own stream", "without the cudaFree"};
  for (int way = 0; way < 3; way++) {
    int whole = 0, control = way == 2;
    for (int i = 0; i < TIMES; i++) {
      int missing = 0;
      MUST(cudaMemset(p, 0, N));
      MUST(cudaMalloc(&block, 1 << 20));
      MUST(cudaDeviceSynchronize());
      memset(host, 0, N);
      slow_ones<<<1, 256, 0, writer>>>(p, N);
      MUST(cudaGetLastError());
      if (!control) MUST(cudaFree(block));
      if (way == 1) {
        MUST(cudaMemcpyAsync(host, p, N, cudaMemcpyDeviceToHost, copier));
        MUST(cudaStreamSynchronize(copier));
      } else {
        MUST(cudaMemcpy(host, p, N, cudaMemcpyDeviceToHost));
      }
      for (int k = 0; k < N; k++) missing += host[k] != 1;
      whole += !missing;
      MUST(cudaDeviceSynchronize());
      if (control) MUST(cudaFree(block));
    }
    printf("copy after cudaFree, %s: %d of %d whole\n", how[way], whole, TIMES);
    /* The control: without it the copy must come too early, or nothing was shown. */
    failed += control ? whole == TIMES : whole != TIMES;
  }
}

/* The codes that calls answered, each once. */
typedef struct { int seen[8], n; } codes_t;
static void add(codes_t *c, int code) {
  for (int i = 0; i < c->n; i++)
    if (c->seen[i] == code) return;
  if (c->n < 8) c->seen[c->n++] = code;
}

typedef struct {
  int what; /* 1 mallocs, 2 frees, 3 both */
  codes_t codes;
} other_t;
static void *other_thread(void *arg) {
  enum { N = 32 };
  other_t *o = (other_t *)arg;
  static void *p[N];
  /* With what = 2 the blocks were there before. */
  for (int i = 0; i < N; i++) {
    if (o->what & 1) { p[i] = NULL; add(&o->codes, cudaMalloc(&p[i], (size_t)4096 << i % 12)); }
    if (o->what & 2) add(&o->codes, cudaFree(p[i]));
    cudaGetLastError();
    usleep(300);
  }
  /* What is left is freed by the caller. */
  return o->what == 1 ? p : NULL;
}
static void *before[32];
static void *free_before(void *arg) {
  other_t *o = (other_t *)arg;
  for (int i = 0; i < 32; i++) {
    int e = cudaFree(before[i]);
    add(&o->codes, e);
    if (!e) before[i] = NULL;
    cudaGetLastError();
    usleep(300);
  }
  return NULL;
}

static void captures(void) {
  static const char *modes[] = {"global", "thread-local", "relaxed"}, *acts[] = {"", "mallocs", "frees", "both"};
  unsigned *work;
  cudaStream_t s;
  MUST(cudaMalloc((void **)&work, 4096));
  for (int mode = 0; mode < 3; mode++)
    for (int what = 1; what <= 3; what++)
      for (int same = 0; same < 2; same++) {
        other_t o = {what, {}};
        pthread_t t;
        void *left = NULL;
        cudaGraph_t graph = NULL;
        cudaGraphExec_t exec = NULL;
        MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
        late_fill<<<1, 32, 0, s>>>(work, 1024, 1, 0);
        for (int i = 0; i < 32; i++) MUST(cudaMalloc(&before[i], (size_t)4096 << i % 12));
        MUST(cudaDeviceSynchronize());
        MUST(cudaStreamBeginCapture(s, (enum cudaStreamCaptureMode)mode));
        void *(*act)(void *) = what == 2 ? free_before : other_thread;
        if (same) left = act(&o);
        else MUST(pthread_create(&t, NULL, act, &o));
        for (int i = 0; i < 10; i++) {
          late_fill<<<1, 32, 0, s>>>(work, 1024, i, 0);
          cudaGetLastError();
          usleep(500);
        }
        if (!same) MUST(pthread_join(t, &left));
        int end = cudaStreamEndCapture(s, &graph), run = 0;
        cudaGetLastError();
        if (!end && graph) {
          run = cudaGraphInstantiate(&exec, graph, 0);
          if (!run) run = cudaGraphLaunch(exec, s);
          if (!run) run = cudaStreamSynchronize(s);
          if (exec) cudaGraphExecDestroy(exec);
        }
        if (graph) cudaGraphDestroy(graph);
        const char *who = same ? "its own" : "another thread's";
        printf("capture %s, %s %s: end %d, run %d, calls", modes[mode], who, acts[what], end, run);
        for (int i = 0; i < o.codes.n; i++) printf(" %d", o.codes.seen[i]);
        puts("");
        for (int i = 0; left && i < 32; i++) cudaFree(((void **)left)[i]);
        /* Those that nobody freed, or whose free was refused. */
        for (int i = 0; i < 32; i++) cudaFree(before[i]);
        cudaGetLastError();
        MUST(cudaStreamDestroy(s));
        MUST(cudaDeviceSynchronize());
      }
}

int main(int argc, char **argv) {
  test = argc > 1 ? argv[1] : "wait_value";
  signal(SIGALRM, hung);
  alarm(20);
  MUST(cudaHostAlloc((void **)&flag, 4096, cudaHostAllocMapped));
  *flag = 0;
  MUST(cudaHostGetDevicePointer((void **)&flag_device, (void *)flag, 0));
  if (!strcmp(test, "wait_value")) waits(0);
  else if (!strcmp(test, "spin")) waits(1);
  else if (!strcmp(test, "copy")) copies();
  else if (!strcmp(test, "capture")) captures();
  else return puts("hang wait_value|spin|copy|capture"), 2;
  return failed != 0;
}
