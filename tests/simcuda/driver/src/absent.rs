//! Functions that the driver has and this one does not model. They are found and linked as usual; calling one aborts with its
//! name, so that a program never takes silence for success.

/// What is called is gone from the caller's sight at once: say it and stop.
fn abort(name: &str) -> ! {
    eprintln!("simcuda: {name} is called and not modelled");
    std::process::abort()
}

macro_rules! absent {
    ($($name:ident)*) => {
        $(
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> u32 {
                abort(stringify!($name))
            }
        )*
    };
}

absent! {
    // The 32-bit interface of CUDA 3.1: its device pointers cannot hold an address.
    cuMemAlloc cuMemFree cuMemGetInfo cuMemAllocPitch cuMemGetAddressRange cuMemAllocHost cuMemHostGetDevicePointer
    cuDeviceTotalMem cuCtxCreate cuStreamBeginCapture cuStreamBeginCapture_ptsz cuGraphInstantiate
    cuMemcpyHtoD cuMemcpyDtoH cuMemcpyDtoD cuMemcpyHtoDAsync cuMemcpyDtoHAsync cuMemcpyDtoDAsync
    cuMemsetD8 cuMemsetD16 cuMemsetD32

    // Code and its launch.
    cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary cuModuleUnload cuModuleGetFunction
    cuModuleGetGlobal_v2 cuModuleGetLoadingMode cuLibraryLoadData cuLibraryUnload cuLibraryGetKernel cuLibraryGetModule
    cuKernelGetFunction cuFuncGetAttribute cuFuncSetAttribute cuFuncSetCacheConfig cuFuncGetModule
    cuLaunchKernel cuLaunchKernel_ptsz cuLaunchKernelEx cuLaunchKernelEx_ptsz
    cuLaunchCooperativeKernel cuLaunchCooperativeKernel_ptsz
    cuOccupancyMaxActiveBlocksPerMultiprocessor cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
    cuOccupancyMaxPotentialBlockSize

    // Arrays, textures, copies in more dimensions.
    cuArrayCreate_v2 cuArray3DCreate_v2 cuArrayDestroy cuArrayGetDescriptor_v2 cuTexObjectCreate cuTexObjectDestroy
    cuSurfObjectCreate cuSurfObjectDestroy cuMipmappedArrayCreate cuMipmappedArrayDestroy
    cuMemcpy2D_v2 cuMemcpy2D_v2_ptds cuMemcpy2DUnaligned_v2 cuMemcpy2DUnaligned_v2_ptds
    cuMemcpy2DAsync_v2 cuMemcpy2DAsync_v2_ptsz cuMemcpy3D_v2 cuMemcpy3D_v2_ptds cuMemcpy3DAsync_v2 cuMemcpy3DAsync_v2_ptsz
    cuMemcpy3DPeer cuMemcpy3DPeer_ptds cuMemcpy3DPeerAsync cuMemcpy3DPeerAsync_ptsz
    cuMemsetD2D8_v2 cuMemsetD2D8_v2_ptds cuMemsetD2D16_v2 cuMemsetD2D16_v2_ptds cuMemsetD2D32_v2 cuMemsetD2D32_v2_ptds
    cuMemsetD2D8Async cuMemsetD2D8Async_ptsz cuMemsetD2D16Async cuMemsetD2D16Async_ptsz
    cuMemsetD2D32Async cuMemsetD2D32Async_ptsz

    // Graphs that are built by hand.
    cuGraphAddKernelNode_v2 cuGraphAddMemcpyNode cuGraphAddMemsetNode cuGraphAddHostNode cuGraphAddEmptyNode
    cuGraphAddMemAllocNode cuGraphAddMemFreeNode cuGraphExecUpdate_v2 cuGraphInstantiateWithParams

    // The rest.
    cuIpcGetEventHandle cuIpcOpenEventHandle cuMemGetHandleForAddressRange cuMemRangeGetAttribute
    cuMemRangeGetAttributes cuMemPoolExportToShareableHandle cuMemPoolImportFromShareableHandle cuMemPoolExportPointer
    cuMemPoolImportPointer cuMulticastCreate cuMulticastAddDevice cuMulticastBindMem cuMulticastGetGranularity
    cuStreamBatchMemOp cuStreamBatchMemOp_ptsz cuStreamBatchMemOp_v2 cuStreamBatchMemOp_v2_ptsz
    cuGreenCtxCreate cuGreenCtxDestroy cuProfilerStart cuProfilerStop cuImportExternalMemory
}
