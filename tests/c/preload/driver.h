/* The driver's functions that these programs link to. CUDA's cuda.h declares them itself; simcuda's has types only. */
#ifndef PRELOAD_DRIVER_H
#define PRELOAD_DRIVER_H
#include <cuda.h>
#include <dlfcn.h>
#ifdef SIMCUDA_CUDA_H
#define cuMemAlloc cuMemAlloc_v2
#define cuMemFree cuMemFree_v2
#define cuMemGetInfo cuMemGetInfo_v2
#define cuMemGetAddressRange cuMemGetAddressRange_v2
#define cuMemcpyDtoH cuMemcpyDtoH_v2
#define cuMemcpyHtoD cuMemcpyHtoD_v2
#define cuCtxCreate cuCtxCreate_v2
#define cuCtxDestroy cuCtxDestroy_v2
#define cuStreamDestroy cuStreamDestroy_v2
#define cuStreamWaitValue32 cuStreamWaitValue32_v2
#define cuStreamWriteValue32 cuStreamWriteValue32_v2
#define cuStreamBeginCapture cuStreamBeginCapture_v2
CUresult cuInit(unsigned);
CUresult cuDeviceGet(CUdevice *, int);
CUresult cuCtxCreate(CUcontext *, unsigned, CUdevice);
CUresult cuCtxDestroy(CUcontext);
CUresult cuCtxGetCurrent(CUcontext *);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxSynchronize(void);
CUresult cuMemAlloc(CUdeviceptr *, size_t);
CUresult cuMemFree(CUdeviceptr);
CUresult cuMemGetInfo(size_t *, size_t *);
CUresult cuMemGetAddressRange(CUdeviceptr *, size_t *, CUdeviceptr);
CUresult cuMemAllocAsync(CUdeviceptr *, size_t, CUstream);
CUresult cuMemFreeAsync(CUdeviceptr, CUstream);
CUresult cuMemcpyDtoH(void *, CUdeviceptr, size_t);
CUresult cuMemcpyHtoD(CUdeviceptr, const void *, size_t);
CUresult cuMemsetD8Async(CUdeviceptr, unsigned char, size_t, CUstream);
CUresult cuPointerGetAttribute(void *, int, CUdeviceptr);
CUresult cuPointerGetAttributes(unsigned, int *, void **, CUdeviceptr);
CUresult cuStreamCreate(CUstream *, unsigned);
CUresult cuStreamDestroy(CUstream);
CUresult cuStreamSynchronize(CUstream);
CUresult cuStreamWaitValue32(CUstream, CUdeviceptr, cuuint32_t, unsigned);
CUresult cuStreamWriteValue32(CUstream, CUdeviceptr, cuuint32_t, unsigned);
CUresult cuStreamBeginCapture(CUstream, int);
CUresult cuStreamEndCapture(CUstream, CUgraph *);
CUresult cuGraphDestroy(CUgraph);
CUresult cuLaunchHostFunc(CUstream, void (*)(void *), void *);
#endif
/* CUpointer_attribute, which small headers lack. */
enum { ATTR_CONTEXT = 1, ATTR_TYPE = 2, ATTR_DEVICE_POINTER = 3, ATTR_BUFFER_ID = 7, ATTR_MANAGED = 8, ATTR_ORDINAL = 9,
       ATTR_START = 11, ATTR_SIZE = 12 };
#define KB ((size_t)1 << 10)
#define MB ((size_t)1 << 20)

/* Whether gpupool is in this process; these programs never link to it. */
static inline int preloaded(void) { return dlsym(RTLD_DEFAULT, "gpupoolVersion") != NULL; }
static inline CUdeviceptr dev(const void *p) { return (CUdeviceptr)(size_t)p; }
#endif
