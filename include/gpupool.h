/* libgpupool's own C interface. All sizes are in bytes. */

#ifndef GPUPOOL_H
#define GPUPOOL_H

/* Written by cbindgen from src/ffi/gpupool.rs and src/ffi/torch.rs. Do not edit: make headers. */

#include <stddef.h>
#include <stdint.h>

/* CUDA's own header where there is one; else what is needed of it. */
#if defined(__has_include)
#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#define GPUPOOL_HAVE_CUDA_RUNTIME 1
#endif
#endif
#ifndef GPUPOOL_HAVE_CUDA_RUNTIME
#ifndef GPUPOOL_CUDA_TYPES
#define GPUPOOL_CUDA_TYPES
typedef struct CUstream_st *cudaStream_t;
#endif
#ifndef GPUPOOL_CUDA_ERROR
#define GPUPOOL_CUDA_ERROR
typedef int cudaError_t;
#endif
#endif


/*
 What the pool of a context holds, in bytes, and what it did.
 */
typedef struct gpupoolStats_t {
  /*
   In blocks the program holds, rounding included.
   */
  uint64_t live;
  /*
   The most that was ever live.
   */
  uint64_t peak_live;
  /*
   Taken from the driver.
   */
  uint64_t held;
  /*
   The most that was ever held.
   */
  uint64_t peak_held;
  /*
   Kept whole in bins, ready for the next request of that size.
   */
  uint64_t cached;
  /*
   Allocations served.
   */
  uint64_t mallocs;
  /*
   Blocks freed.
   */
  uint64_t frees;
  /*
   Allocations served out of a bin.
   */
  uint64_t hits;
  /*
   Events recorded to learn what has finished.
   */
  uint64_t fences;
  /*
   Times the host waited for the device.
   */
  uint64_t waits;
} gpupoolStats_t;

/*
 cutorch's allocator slot: functions, and a `state` that each gets as its first argument.
 */
typedef struct THCDeviceAllocator {
  /*
   Allocates `size` bytes for a stream.
   */
  cudaError_t (*malloc)(void *state, void **ptr, size_t size, cudaStream_t stream);
  /*
   Moves a block to a new one of `new_size` bytes; what fits is copied on the stream, and the old block goes as `free` has
   it. On an error the pointer stays as it was.
   */
  cudaError_t (*realloc)(void *state,
                         void **ptr,
                         size_t old_size,
                         size_t new_size,
                         cudaStream_t stream);
  /*
   Frees a block, whatever streams used it.
   */
  cudaError_t (*free)(void *state, void *ptr);
  /*
   Gives idle memory of all devices back to the driver.
   */
  cudaError_t (*emptyCache)(void *state);
  /*
   Adds a device's idle bytes to `*idle`, and raises `*largest` to its largest idle block.
   */
  cudaError_t (*cacheInfo)(void *state, int device, size_t *idle, size_t *largest);
  /*
   The first argument of the functions; they do not look at it.
   */
  void *state;
} THCDeviceAllocator;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Allocates `size` bytes that work submitted to `stream` from now on may use at once; 512-byte aligned or better.

 The memory is of the stream's context; for the NULL, legacy and per-thread streams, of the calling thread's current one.
 Size 0 succeeds and stores NULL. Returns 0, or a `cudaError_t`: 1 for `ptr` NULL, 2 out of memory, 35 without a driver,
 100 without a device, 201 without a context. On an error `*ptr` is NULL.

 # Safety
 `ptr` is NULL or writable; `stream` is a live stream.
 */
int gpupoolMalloc(void **ptr,
                  size_t size,
                  cudaStream_t stream);

/*
 Frees a block; `stream` is the last stream that used it. Later work on that stream may reuse the memory at once, another
 stream gets it only after the work submitted to `stream` so far. Never waits. NULL succeeds.

 Returns 0; 1 for a pointer that is not the start of a live block of the pool (nothing changes then).

 # Safety
 `stream` is a live stream.
 */
int gpupoolFree(void *ptr,
                cudaStream_t stream);

/*
 Says that `stream` uses the block too: its free then waits for the work that `stream` has by then as well. Returns 0, or 1
 for a pointer that is not the start of a live block.

 # Safety
 `stream` is a live stream.
 */
int gpupoolRecordStream(void *ptr,
                        cudaStream_t stream);

/*
 Gives idle memory of the current context's pool back to the driver until at most `keep` bytes are held; memory whose work is
 not finished stays. Waits for the device only before CUDA 12.5. Returns 0 or a `cudaError_t`.
 */
int gpupoolTrim(size_t keep);

/*
 Tells what the current context's pool holds. Returns 0, 1 for `out` NULL, or a `cudaError_t`.

 # Safety
 `out` is NULL or writable.
 */
int gpupoolGetStats(struct gpupoolStats_t *out);

/*
 A short English text for what these functions return; never NULL.
 */
const char *gpupoolErrorString(int code);

/*
 The version of the library: 100 is 0.1.0.
 */
int gpupoolVersion(void);

/*
 The pool as cutorch's allocator. The table is static and must not be changed or freed.

 `free` carries no stream there, as cutorch's does not: the block is freed on the legacy stream, and another stream gets it
 only after all work submitted to the context so far. `realloc` copies what fits on the given stream.
 */
const struct THCDeviceAllocator *gpupoolTHCDeviceAllocator(void);

/*
 PyTorch's pluggable allocator: allocates on `device`, for `stream`. NULL for size 0, and when memory cannot be had (PyTorch
 does not look: set `GPUPOOL_LOG=warn` to see why).

 # Safety
 `stream` is a live stream of the device.
 */
void *gpupool_torch_malloc(ptrdiff_t size,
                           int device,
                           cudaStream_t stream);

/*
 PyTorch's pluggable allocator: frees what `gpupool_torch_malloc` gave. `stream` is the stream it was allocated for.

 # Safety
 `stream` is a live stream.
 */
void gpupool_torch_free(void *ptr,
                        ptrdiff_t _size,
                        int _device,
                        cudaStream_t stream);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* GPUPOOL_H */
