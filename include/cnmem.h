/* CNMeM's C interface, served by libgpupool. All sizes are in bytes. */

#ifndef GPUPOOL_CNMEM_H
#define GPUPOOL_CNMEM_H

/* Written by cbindgen from src/ffi/cnmem.rs. Do not edit: make headers. */

#include <stddef.h>
#include <stdio.h>

/* CUDA's own header where there is one, as CNMeM's header has it; else what is needed of it. */
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
#endif


/*
 The version of CNMeM's interface: 1.0.0.
 */
#define CNMEM_VERSION 100

/*
 What every function returns.
 */
typedef enum cnmemStatus_t {
  CNMEM_STATUS_SUCCESS = 0,
  /*
   The driver refused something; `GPUPOOL_LOG=warn` says what.
   */
  CNMEM_STATUS_CUDA_ERROR = 1,
  CNMEM_STATUS_INVALID_ARGUMENT = 2,
  /*
   Before `cnmemInit`, and after the last `cnmemFinalize`.
   */
  CNMEM_STATUS_NOT_INITIALIZED = 3,
  CNMEM_STATUS_OUT_OF_MEMORY = 4,
  CNMEM_STATUS_UNKNOWN_ERROR = 5,
} cnmemStatus_t;

/*
 Flags for `cnmemInit`.
 */
typedef enum cnmemManagerFlags_t {
  CNMEM_FLAGS_DEFAULT = 0,
  /*
   The root keeps the size it was given.
   */
  CNMEM_FLAGS_CANNOT_GROW = 1,
  /*
   No manager takes memory that is idle in another.
   */
  CNMEM_FLAGS_CANNOT_STEAL = 2,
  /*
   Managed memory, prefetched to the device.
   */
  CNMEM_FLAGS_MANAGED = 4,
} cnmemManagerFlags_t;

/*
 What `cnmemInit` is to do on one device.
 */
typedef struct cnmemDevice_t_ {
  /*
   The device, as `cudaSetDevice` numbers them.
   */
  int device;
  /*
   Bytes to take, less than the device has; 0 lets the library choose (`GPUPOOL_INIT_PERCENT` of what is free).
   */
  size_t size;
  /*
   How many named streams follow.
   */
  int numStreams;
  /*
   The streams that get a manager of their own; may be NULL when there are none.
   */
  cudaStream_t *streams;
  /*
   Bytes to set aside for each stream; may be NULL.
   */
  size_t *streamSizes;
} cnmemDevice_t_;

typedef struct cnmemDevice_t_ cnmemDevice_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Starts the library: takes the memory of every device named, at once, in 512-byte units. When it was started already, this
 counts a reference and changes nothing else.

 INVALID_ARGUMENT: no device, one that does not exist or is named twice, a size not under the device's total, or a stream
 that is NULL, named twice, or not of its device. OUT_OF_MEMORY: a size that cannot be had; nothing is held then. `flags` are
 `cnmemManagerFlags_t`, combined.

 # Safety
 `devices` points to `numDevices` structs whose arrays are as long as they say; the streams are live.
 */
enum cnmemStatus_t cnmemInit(int numDevices,
                             const cnmemDevice_t *devices,
                             unsigned int flags);

/*
 Gives up one reference; the last one returns all memory to the driver, blocks still live included, after the work of the
 devices. NOT_INITIALIZED when there is none.
 */
enum cnmemStatus_t cnmemFinalize(void);

/*
 Counts one more reference.
 */
enum cnmemStatus_t cnmemRetain(void);

/*
 The same as `cnmemFinalize`.
 */
enum cnmemStatus_t cnmemRelease(void);

/*
 Makes a manager for `stream` on its device. INVALID_ARGUMENT for the NULL stream, and for a device that `cnmemInit` did not
 name. A stream that has one already keeps it.

 # Safety
 `stream` is a live stream.
 */
enum cnmemStatus_t cnmemRegisterStream(cudaStream_t stream);

/*
 Allocates `size` bytes for work on `stream`, 512-byte aligned. Size 0 succeeds and stores NULL.

 INVALID_ARGUMENT: `ptr` NULL with a size, or a stream without a manager. OUT_OF_MEMORY: see the flags of `cnmemInit`.

 # Safety
 `ptr` is NULL or writable; `stream` is NULL or a live stream.
 */
enum cnmemStatus_t cnmemMalloc(void **ptr,
                               size_t size,
                               cudaStream_t stream);

/*
 Frees a block. Work that its stream gets later may reuse the memory at once. On the NULL stream the block of a named stream
 may be freed too: it is reused only after all work submitted so far. NULL succeeds.

 INVALID_ARGUMENT, and nothing is changed: a pointer that is not the start of a live block, a stream without a manager, or
 another named stream than the block's.

 # Safety
 `stream` is NULL or a live stream.
 */
enum cnmemStatus_t cnmemFree(void *ptr,
                             cudaStream_t stream);

/*
 Free and total bytes of the manager of `stream`; for NULL of the current device's root, whose total includes what its
 children have. INVALID_ARGUMENT: a NULL pointer, or a stream without a manager.

 # Safety
 Both pointers are NULL or writable; `stream` is NULL or a live stream.
 */
enum cnmemStatus_t cnmemMemGetInfo(size_t *freeMem,
                                   size_t *totalMem,
                                   cudaStream_t stream);

/*
 Writes the manager of `stream`, block by block, to `file`.

 # Safety
 `file` is an open stream of the C library; `stream` is NULL or a live stream.
 */
enum cnmemStatus_t cnmemPrintMemoryState(FILE *file, cudaStream_t stream);

/*
 The name of a status; never NULL.
 */
const char *cnmemGetErrorString(cnmemStatus_t status);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* GPUPOOL_CNMEM_H */
