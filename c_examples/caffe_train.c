/* A training loop as NVCaffe runs one, on bare cudaMalloc and on the pool: a train net and a test net with AlexNet's layer
 * sizes, whose activations, gradients and workspaces are allocated and freed every iteration, on two streams. A layer's work
 * is an asynchronous memset and copy over its tensors.
 * Build: cc caffe_train.c -lcudart -lgpupool */
#define _POSIX_C_SOURCE 200809L
#include <cnmem.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CUDA(call) \
  do { \
    cudaError_t e_ = (call); \
    if (e_ != cudaSuccess) fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(e_)), exit(1); \
  } while (0)
#define CNMEM(call) \
  do { \
    cnmemStatus_t s_ = (call); \
    if (s_ != CNMEM_STATUS_SUCCESS) fprintf(stderr, "%s: %s\n", #call, cnmemGetErrorString(s_)), exit(1); \
  } while (0)

/* Floats an image in every layer's output, and in the column buffer of its convolution (0: none). */
static const struct { const char *name; size_t out, column; } NET[] = {
    {"data", 3 * 227 * 227, 0},
    {"conv1", 96 * 55 * 55, (size_t)3 * 11 * 11 * 55 * 55},
    {"norm1", 96 * 55 * 55, 0},
    {"pool1", 96 * 27 * 27, 0},
    {"conv2", 256 * 27 * 27, (size_t)96 * 5 * 5 * 27 * 27},
    {"norm2", 256 * 27 * 27, 0},
    {"pool2", 256 * 13 * 13, 0},
    {"conv3", 384 * 13 * 13, (size_t)256 * 3 * 3 * 13 * 13},
    {"conv4", 384 * 13 * 13, (size_t)384 * 3 * 3 * 13 * 13},
    {"conv5", 256 * 13 * 13, (size_t)384 * 3 * 3 * 13 * 13},
    {"pool5", 256 * 6 * 6, 0},
    {"fc6", 4096, 0},
    {"fc7", 4096, 0},
    {"fc8", 1000, 0},
};
enum { LAYERS = sizeof NET / sizeof *NET };

enum mode { BARE, POOL };
static enum mode mode;
static int grow; /* let the pool grow, instead of taking idle memory over between the nets */
static size_t held_most, free_before;

static void *take(size_t bytes, cudaStream_t s) {
  void *p = NULL;
  if (mode == BARE) CUDA(cudaMalloc(&p, bytes));
  else CNMEM(cnmemMalloc(&p, bytes, s));
  return p;
}
static void give(void *p, cudaStream_t s) {
  if (mode == BARE) CUDA(cudaFree(p));
  else CNMEM(cnmemFree(p, s));
}
static void look(void) {
  size_t f, t;
  CUDA(cudaMemGetInfo(&f, &t));
  if (free_before > f && free_before - f > held_most) held_most = free_before - f;
}

/* One layer: the tensor is set, and copied from the one before as far as both reach. */
static void layer(void *out, size_t bytes, const void *in, size_t in_bytes, cudaStream_t s) {
  CUDA(cudaMemsetAsync(out, 0, bytes, s));
  if (in) CUDA(cudaMemcpyAsync(out, in, bytes < in_bytes ? bytes : in_bytes, cudaMemcpyDeviceToDevice, s));
}

static void pass(size_t batch, int training, cudaStream_t s) {
  void *out[LAYERS], *diff = NULL;
  size_t bytes[LAYERS];
  for (int i = 0; i < LAYERS; i++) {
    bytes[i] = NET[i].out * batch * sizeof(float);
    out[i] = take(bytes[i], s);
    /* The column buffer holds one image, as Caffe's does. */
    void *column = NET[i].column ? take(NET[i].column * sizeof(float), s) : NULL;
    if (column) CUDA(cudaMemsetAsync(column, 0, NET[i].column * sizeof(float), s));
    layer(out[i], bytes[i], i ? out[i - 1] : NULL, i ? bytes[i - 1] : 0, s);
    if (column) give(column, s);
  }
  if (training) {
    size_t diff_bytes = 0;
    for (int i = LAYERS - 1; i > 0; i--) {
      void *next = take(bytes[i], s);
      layer(next, bytes[i], diff, diff_bytes, s);
      if (i == LAYERS - 3) look(); /* about the peak: all activations, and two gradients */
      if (diff) give(diff, s);
      diff = next, diff_bytes = bytes[i];
      give(out[i], s);
    }
    give(diff, s);
    give(out[0], s);
  } else {
    for (int i = 0; i < LAYERS; i++) give(out[i], s);
  }
}

/* Iterations a second. */
static double run(enum mode how, size_t batch, int iterations, cudaStream_t *streams) {
  size_t total;
  mode = how, held_most = 0;
  CUDA(cudaDeviceSynchronize());
  CUDA(cudaMemGetInfo(&free_before, &total));
  if (how == POOL) {
    cnmemDevice_t device;
    size_t weights = 0;
    for (int i = 0; i < LAYERS; i++) weights += NET[i].out * batch * sizeof(float);
    memset(&device, 0, sizeof device);
    device.size = grow ? weights : weights + weights / 2; /* what is live at the peak, and some room */
    device.numStreams = 2, device.streams = streams;
    CNMEM(cnmemInit(1, &device, grow ? CNMEM_FLAGS_DEFAULT : CNMEM_FLAGS_CANNOT_GROW));
  }
  struct timespec a = {0, 0}, b;
  int warm = 2;
  for (int i = -warm; i < iterations; i++) {
    if (i == 0) {
      CUDA(cudaDeviceSynchronize());
      clock_gettime(CLOCK_MONOTONIC, &a);
    }
    pass(batch, 1, streams[0]);
    if (i % 4 == 3) pass(batch / 2 ? batch / 2 : 1, 0, streams[1]);
  }
  CUDA(cudaDeviceSynchronize());
  clock_gettime(CLOCK_MONOTONIC, &b);
  look();
  if (how == POOL) CNMEM(cnmemFinalize());
  double rate = iterations / ((double)(b.tv_sec - a.tv_sec) + 1e-9 * (double)(b.tv_nsec - a.tv_nsec));
  printf("%-16s %10.1f iterations/s  %8.1f MiB held\n", how == BARE ? "bare cudaMalloc" : "gpupool (cnmem)", rate, (double)held_most / 1048576.0);
  return rate;
}

static int usage(const char *name, int code) {
  fprintf(code ? stderr : stdout,
          "usage: %s [BATCH] [--iterations N] [--mode cuda|pool|both] [--grow]\n"
          "Trains an AlexNet-shaped net (no arithmetic, its memory traffic) on bare cudaMalloc and on the pool.\n"
          "BATCH: images an iteration, 32 by default. N: 50 by default.\n"
          "The pool has a fixed size, and the nets take idle memory over from each other; --grow lets it grow instead.\n", name);
  return code;
}

int main(int argc, char **argv) {
  size_t batch = 32;
  int iterations = 50, bare = 1, pool = 1;
  for (int i = 1; i < argc; i++) {
    if (!strcmp(argv[i], "--help")) return usage(argv[0], 0);
    if (!strcmp(argv[i], "--iterations") && i + 1 < argc) iterations = atoi(argv[++i]);
    else if (!strcmp(argv[i], "--mode") && i + 1 < argc) {
      const char *m = argv[++i];
      bare = !strcmp(m, "cuda") || !strcmp(m, "both");
      pool = !strcmp(m, "pool") || !strcmp(m, "both");
    } else if (!strcmp(argv[i], "--grow")) grow = 1;
    else batch = (size_t)strtoul(argv[i], NULL, 10);
  }
  if (batch < 1 || batch > 4096 || iterations < 1 || !(bare || pool)) return usage(argv[0], 2);
  struct cudaDeviceProp prop;
  CUDA(cudaSetDevice(0));
  CUDA(cudaFree(0));
  CUDA(cudaGetDeviceProperties(&prop, 0));
  int simulated = strstr(prop.name, "simcuda") != NULL;
  printf("device: %s%s; batch %zu, %d iterations\n", prop.name, simulated ? " (simulated)" : "", batch, iterations);
  cudaStream_t streams[2];
  for (int i = 0; i < 2; i++) CUDA(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
  double a = bare ? run(BARE, batch, iterations, streams) : 0;
  double b = pool ? run(POOL, batch, iterations, streams) : 0;
  if (bare && pool) printf("speed-up: %.2f x%s\n", b / a, simulated ? " (simulated: a ratio of the stand-in's costs, not a GPU's)" : "");
  for (int i = 0; i < 2; i++) CUDA(cudaStreamDestroy(streams[i]));
  return 0;
}
