//! `cuGetProcAddress`: from a name, a version and a default stream to one of the exported functions.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use crate::absent::*;
use crate::call::driver_fns;
use crate::capture::*;
use crate::codes::*;
use crate::config;
use crate::context::*;
use crate::copy::*;
use crate::device::*;
use crate::event::*;
use crate::graph::*;
use crate::host::*;
use crate::ipc::*;
use crate::memory::*;
use crate::pointer::*;
use crate::pools::*;
use crate::quirks;
use crate::stream::*;
use crate::vmm::*;

/// One exported variant of a function.
struct Variant {
    name: &'static str,
    /// The exported function.
    symbol: &'static str,
    /// The version of CUDA that brought it.
    since: c_int,
    address: usize,
    /// The same with the calling thread's own stream as the NULL stream.
    per_thread: Option<usize>,
}

impl Variant {
    /// Whether the driver that this one stands for has it.
    fn is_there(&self) -> bool {
        self.since <= config::get().version && !quirks::lacks(self.symbol)
    }
}

const PER_THREAD_DEFAULT_STREAM: u64 = 2;

const FOUND: c_int = 0;
const NOT_THERE: c_int = 1;
const VERSION_TOO_LOW: c_int = 2;

driver_fns! {
    any_time fn cuGetProcAddress(symbol: *const c_char, address: *mut *mut c_void, version: c_int, flags: u64) {
        let (found, status) = look_up(symbol, version, flags)?;
        write(address, found)?;
        if status == NOT_THERE { Err(NOT_FOUND) } else { Ok(()) }
    }

    any_time fn cuGetProcAddress_v2(
        symbol: *const c_char, address: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int,
    ) {
        let (found, why) = look_up(symbol, version, flags)?;
        write_optional(status, why);
        write(address, found)?;
        if why == NOT_THERE { Err(NOT_FOUND) } else { Ok(()) }
    }

    any_time fn cuGetExportTable(table: *mut *const c_void, id: *const Uuid) {
        read(id)?;
        write(table, std::ptr::null())?;
        Err(NOT_FOUND)
    }
}

fn look_up(symbol: *const c_char, version: c_int, flags: u64) -> CuResult<(*mut c_void, c_int)> {
    if symbol.is_null() || flags > PER_THREAD_DEFAULT_STREAM {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller vouches for the C string.
    let name = unsafe { CStr::from_ptr(symbol) }.to_str().map_err(|_| INVALID_VALUE)?;
    let (mut found, mut status) = (0, NOT_THERE);
    // The table is in order of versions: the last that fits is the newest.
    for variant in table().iter().filter(|v| v.name == name && v.is_there()) {
        if variant.since <= version {
            let per_thread = variant.per_thread.filter(|_| flags == PER_THREAD_DEFAULT_STREAM);
            (found, status) = (per_thread.unwrap_or(variant.address), FOUND);
        } else if status == NOT_THERE {
            status = VERSION_TOO_LOW;
        }
    }
    Ok((found as *mut c_void, status))
}

/// Runs when the library is loaded, before anyone can look a symbol up.
#[cfg_attr(test, allow(dead_code))]
extern "C" fn on_load() {
    crate::fault::read_environment();
    crate::engine::read_environment();
    hide_what_is_missing();
}

/// Hides from `dlsym` what a driver of the version that was asked for lacks: its entry in this library's own symbol table
/// loses its address.
fn hide_what_is_missing() {
    let missing = table().iter().filter(|variant| !variant.is_there());
    for address in missing.flat_map(|variant| [Some(variant.address), variant.per_thread]).flatten() {
        hide(address);
    }
}

fn hide(address: usize) {
    unsafe extern "C" {
        fn dladdr1(address: *const c_void, info: *mut libc::Dl_info, extra: *mut *mut c_void, flags: c_int) -> c_int;
    }
    const SYMBOL_ENTRY: c_int = 1;
    const PAGE: usize = 4096;
    // SAFETY: dladdr1 gives the entry of this library's symbol table, which stays mapped; its pages are made writable first,
    // and nobody looks symbols of this library up before its constructors have run.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let mut entry: *mut c_void = std::ptr::null_mut();
        if dladdr1(address as *const c_void, &mut info, &mut entry, SYMBOL_ENTRY) == 0 || entry.is_null() {
            return;
        }
        let entry = entry.cast::<libc::Elf64_Sym>();
        let start = entry as usize & !(PAGE - 1);
        let end = (entry.add(1) as usize).next_multiple_of(PAGE);
        let whole = (start as *mut c_void, end - start);
        if libc::mprotect(whole.0, whole.1, libc::PROT_READ | libc::PROT_WRITE) == 0 {
            (*entry).st_value = 0;
            libc::mprotect(whole.0, whole.1, libc::PROT_READ);
        }
    }
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = on_load;

macro_rules! variants {
    ($($name:ident: $($since:literal $symbol:ident $(| $pt:ident)?),+;)*) => {
        vec![$($(
            Variant {
                name: stringify!($name),
                symbol: stringify!($symbol),
                since: $since,
                address: $symbol as *const () as usize,
                per_thread: variants!(@per_thread $($pt)?),
            },
        )+)*]
    };
    (@per_thread) => { None };
    (@per_thread $pt:ident) => { Some($pt as *const () as usize) };
}

/// Every name that is served: its variants, oldest first, as CUDA's `cudaTypedefs.h` dates them.
#[rustfmt::skip]
fn table() -> &'static [Variant] {
    static TABLE: OnceLock<Vec<Variant>> = OnceLock::new();
    TABLE.get_or_init(|| variants! {
        cuInit: 2000 cuInit;
        cuDriverGetVersion: 2020 cuDriverGetVersion;
        cuGetErrorName: 6000 cuGetErrorName;
        cuGetErrorString: 6000 cuGetErrorString;
        cuGetProcAddress: 11030 cuGetProcAddress, 12000 cuGetProcAddress_v2;
        cuGetExportTable: 3000 cuGetExportTable;

        cuDeviceGet: 2000 cuDeviceGet;
        cuDeviceGetCount: 2000 cuDeviceGetCount;
        cuDeviceGetName: 2000 cuDeviceGetName;
        cuDeviceGetUuid: 9020 cuDeviceGetUuid, 11040 cuDeviceGetUuid_v2;
        cuDeviceTotalMem: 2000 cuDeviceTotalMem, 3020 cuDeviceTotalMem_v2;
        cuDeviceGetAttribute: 2000 cuDeviceGetAttribute;
        cuDeviceComputeCapability: 2000 cuDeviceComputeCapability;
        cuDeviceGetPCIBusId: 4010 cuDeviceGetPCIBusId;
        cuDeviceGetByPCIBusId: 4010 cuDeviceGetByPCIBusId;
        cuDeviceCanAccessPeer: 4000 cuDeviceCanAccessPeer;
        cuDeviceGetP2PAttribute: 8000 cuDeviceGetP2PAttribute;
        cuFlushGPUDirectRDMAWrites: 11030 cuFlushGPUDirectRDMAWrites;

        cuDevicePrimaryCtxRetain: 7000 cuDevicePrimaryCtxRetain;
        cuDevicePrimaryCtxRelease: 7000 cuDevicePrimaryCtxRelease, 11000 cuDevicePrimaryCtxRelease_v2;
        cuDevicePrimaryCtxReset: 7000 cuDevicePrimaryCtxReset, 11000 cuDevicePrimaryCtxReset_v2;
        cuDevicePrimaryCtxSetFlags: 7000 cuDevicePrimaryCtxSetFlags, 11000 cuDevicePrimaryCtxSetFlags_v2;
        cuDevicePrimaryCtxGetState: 7000 cuDevicePrimaryCtxGetState;
        cuCtxCreate: 2000 cuCtxCreate, 3020 cuCtxCreate_v2, 11040 cuCtxCreate_v3, 12050 cuCtxCreate_v4;
        cuCtxDestroy: 2000 cuCtxDestroy, 4000 cuCtxDestroy_v2;
        cuCtxPushCurrent: 2000 cuCtxPushCurrent, 4000 cuCtxPushCurrent_v2;
        cuCtxPopCurrent: 2000 cuCtxPopCurrent, 4000 cuCtxPopCurrent_v2;
        cuCtxSetCurrent: 4000 cuCtxSetCurrent;
        cuCtxGetCurrent: 4000 cuCtxGetCurrent;
        cuCtxGetDevice: 2000 cuCtxGetDevice;
        cuCtxGetId: 12000 cuCtxGetId;
        cuCtxGetFlags: 7000 cuCtxGetFlags;
        cuCtxGetApiVersion: 3020 cuCtxGetApiVersion;
        cuCtxGetStreamPriorityRange: 5050 cuCtxGetStreamPriorityRange;
        cuCtxGetLimit: 3010 cuCtxGetLimit;
        cuCtxSetLimit: 3010 cuCtxSetLimit;
        cuCtxSynchronize: 2000 cuCtxSynchronize, 13000 cuCtxSynchronize_v2;
        cuCtxEnablePeerAccess: 4000 cuCtxEnablePeerAccess;
        cuCtxDisablePeerAccess: 4000 cuCtxDisablePeerAccess;
        cuCtxRecordEvent: 12050 cuCtxRecordEvent;
        cuCtxWaitEvent: 12050 cuCtxWaitEvent;

        cuMemAlloc: 2000 cuMemAlloc, 3020 cuMemAlloc_v2;
        cuMemFree: 2000 cuMemFree, 3020 cuMemFree_v2;
        cuMemGetInfo: 2000 cuMemGetInfo, 3020 cuMemGetInfo_v2;
        cuMemAllocPitch: 2000 cuMemAllocPitch, 3020 cuMemAllocPitch_v2;
        cuMemGetAddressRange: 2000 cuMemGetAddressRange, 3020 cuMemGetAddressRange_v2;
        cuMemAllocManaged: 6000 cuMemAllocManaged;
        cuMemPrefetchAsync:
            8000 cuMemPrefetchAsync | cuMemPrefetchAsync_ptsz, 12020 cuMemPrefetchAsync_v2 | cuMemPrefetchAsync_v2_ptsz;
        cuMemAdvise: 8000 cuMemAdvise, 12020 cuMemAdvise_v2;
        cuMemRangeGetAttribute: 8000 cuMemRangeGetAttribute;
        cuMemRangeGetAttributes: 8000 cuMemRangeGetAttributes;
        cuMemGetHandleForAddressRange: 11070 cuMemGetHandleForAddressRange;

        cuMemAllocHost: 2000 cuMemAllocHost, 3020 cuMemAllocHost_v2;
        cuMemHostAlloc: 2020 cuMemHostAlloc;
        cuMemFreeHost: 2000 cuMemFreeHost;
        cuMemHostGetDevicePointer: 2020 cuMemHostGetDevicePointer, 3020 cuMemHostGetDevicePointer_v2;
        cuMemHostGetFlags: 2030 cuMemHostGetFlags;
        cuMemHostRegister: 4000 cuMemHostRegister, 6050 cuMemHostRegister_v2;
        cuMemHostUnregister: 4000 cuMemHostUnregister;

        cuMemAllocAsync: 11020 cuMemAllocAsync | cuMemAllocAsync_ptsz;
        cuMemAllocFromPoolAsync: 11020 cuMemAllocFromPoolAsync | cuMemAllocFromPoolAsync_ptsz;
        cuMemFreeAsync: 11020 cuMemFreeAsync | cuMemFreeAsync_ptsz;
        cuDeviceGetDefaultMemPool: 11020 cuDeviceGetDefaultMemPool;
        cuDeviceGetMemPool: 11020 cuDeviceGetMemPool;
        cuDeviceSetMemPool: 11020 cuDeviceSetMemPool;
        cuMemPoolCreate: 11020 cuMemPoolCreate;
        cuMemPoolDestroy: 11020 cuMemPoolDestroy;
        cuMemPoolTrimTo: 11020 cuMemPoolTrimTo;
        cuMemPoolSetAttribute: 11020 cuMemPoolSetAttribute;
        cuMemPoolGetAttribute: 11020 cuMemPoolGetAttribute;
        cuMemPoolSetAccess: 11020 cuMemPoolSetAccess;
        cuMemPoolGetAccess: 11020 cuMemPoolGetAccess;
        cuMemPoolExportToShareableHandle: 11020 cuMemPoolExportToShareableHandle;
        cuMemPoolImportFromShareableHandle: 11020 cuMemPoolImportFromShareableHandle;
        cuMemPoolExportPointer: 11020 cuMemPoolExportPointer;
        cuMemPoolImportPointer: 11020 cuMemPoolImportPointer;

        cuMemcpy: 4000 cuMemcpy | cuMemcpy_ptds;
        cuMemcpyAsync: 4000 cuMemcpyAsync | cuMemcpyAsync_ptsz;
        cuMemcpyHtoD: 2000 cuMemcpyHtoD, 3020 cuMemcpyHtoD_v2 | cuMemcpyHtoD_v2_ptds;
        cuMemcpyDtoH: 2000 cuMemcpyDtoH, 3020 cuMemcpyDtoH_v2 | cuMemcpyDtoH_v2_ptds;
        cuMemcpyDtoD: 2000 cuMemcpyDtoD, 3020 cuMemcpyDtoD_v2 | cuMemcpyDtoD_v2_ptds;
        cuMemcpyHtoDAsync: 2000 cuMemcpyHtoDAsync, 3020 cuMemcpyHtoDAsync_v2 | cuMemcpyHtoDAsync_v2_ptsz;
        cuMemcpyDtoHAsync: 2000 cuMemcpyDtoHAsync, 3020 cuMemcpyDtoHAsync_v2 | cuMemcpyDtoHAsync_v2_ptsz;
        cuMemcpyDtoDAsync: 3000 cuMemcpyDtoDAsync, 3020 cuMemcpyDtoDAsync_v2 | cuMemcpyDtoDAsync_v2_ptsz;
        cuMemcpyPeer: 4000 cuMemcpyPeer | cuMemcpyPeer_ptds;
        cuMemcpyPeerAsync: 4000 cuMemcpyPeerAsync | cuMemcpyPeerAsync_ptsz;
        cuMemsetD8: 2000 cuMemsetD8, 3020 cuMemsetD8_v2 | cuMemsetD8_v2_ptds;
        cuMemsetD16: 2000 cuMemsetD16, 3020 cuMemsetD16_v2 | cuMemsetD16_v2_ptds;
        cuMemsetD32: 2000 cuMemsetD32, 3020 cuMemsetD32_v2 | cuMemsetD32_v2_ptds;
        cuMemsetD8Async: 3020 cuMemsetD8Async | cuMemsetD8Async_ptsz;
        cuMemsetD16Async: 3020 cuMemsetD16Async | cuMemsetD16Async_ptsz;
        cuMemsetD32Async: 3020 cuMemsetD32Async | cuMemsetD32Async_ptsz;
        cuMemcpy2D: 3020 cuMemcpy2D_v2 | cuMemcpy2D_v2_ptds;
        cuMemcpy2DUnaligned: 3020 cuMemcpy2DUnaligned_v2 | cuMemcpy2DUnaligned_v2_ptds;
        cuMemcpy2DAsync: 3020 cuMemcpy2DAsync_v2 | cuMemcpy2DAsync_v2_ptsz;
        cuMemcpy3D: 3020 cuMemcpy3D_v2 | cuMemcpy3D_v2_ptds;
        cuMemcpy3DAsync: 3020 cuMemcpy3DAsync_v2 | cuMemcpy3DAsync_v2_ptsz;
        cuMemcpy3DPeer: 4000 cuMemcpy3DPeer | cuMemcpy3DPeer_ptds;
        cuMemcpy3DPeerAsync: 4000 cuMemcpy3DPeerAsync | cuMemcpy3DPeerAsync_ptsz;
        cuMemsetD2D8: 3020 cuMemsetD2D8_v2 | cuMemsetD2D8_v2_ptds;
        cuMemsetD2D16: 3020 cuMemsetD2D16_v2 | cuMemsetD2D16_v2_ptds;
        cuMemsetD2D32: 3020 cuMemsetD2D32_v2 | cuMemsetD2D32_v2_ptds;
        cuMemsetD2D8Async: 3020 cuMemsetD2D8Async | cuMemsetD2D8Async_ptsz;
        cuMemsetD2D16Async: 3020 cuMemsetD2D16Async | cuMemsetD2D16Async_ptsz;
        cuMemsetD2D32Async: 3020 cuMemsetD2D32Async | cuMemsetD2D32Async_ptsz;

        cuPointerGetAttribute: 4000 cuPointerGetAttribute;
        cuPointerGetAttributes: 7000 cuPointerGetAttributes;
        cuPointerSetAttribute: 6000 cuPointerSetAttribute;

        cuMemAddressReserve: 10020 cuMemAddressReserve;
        cuMemAddressFree: 10020 cuMemAddressFree;
        cuMemCreate: 10020 cuMemCreate;
        cuMemRelease: 10020 cuMemRelease;
        cuMemMap: 10020 cuMemMap;
        cuMemUnmap: 10020 cuMemUnmap;
        cuMemSetAccess: 10020 cuMemSetAccess;
        cuMemGetAccess: 10020 cuMemGetAccess;
        cuMemGetAllocationGranularity: 10020 cuMemGetAllocationGranularity;
        cuMemGetAllocationPropertiesFromHandle: 10020 cuMemGetAllocationPropertiesFromHandle;
        cuMemExportToShareableHandle: 10020 cuMemExportToShareableHandle;
        cuMemImportFromShareableHandle: 10020 cuMemImportFromShareableHandle;
        cuMemRetainAllocationHandle: 11000 cuMemRetainAllocationHandle;
        cuMulticastCreate: 12010 cuMulticastCreate;
        cuMulticastAddDevice: 12010 cuMulticastAddDevice;
        cuMulticastBindMem: 12010 cuMulticastBindMem;
        cuMulticastGetGranularity: 12010 cuMulticastGetGranularity;

        cuStreamCreate: 2000 cuStreamCreate;
        cuStreamCreateWithPriority: 5050 cuStreamCreateWithPriority;
        cuStreamDestroy: 2000 cuStreamDestroy, 4000 cuStreamDestroy_v2;
        cuStreamSynchronize: 2000 cuStreamSynchronize | cuStreamSynchronize_ptsz;
        cuStreamQuery: 2000 cuStreamQuery | cuStreamQuery_ptsz;
        cuStreamWaitEvent: 3020 cuStreamWaitEvent | cuStreamWaitEvent_ptsz;
        cuStreamGetFlags: 5050 cuStreamGetFlags | cuStreamGetFlags_ptsz;
        cuStreamGetPriority: 5050 cuStreamGetPriority | cuStreamGetPriority_ptsz;
        cuStreamGetId: 12000 cuStreamGetId | cuStreamGetId_ptsz;
        cuStreamGetCtx: 9020 cuStreamGetCtx | cuStreamGetCtx_ptsz, 12050 cuStreamGetCtx_v2 | cuStreamGetCtx_v2_ptsz;
        cuStreamGetDevice: 12080 cuStreamGetDevice | cuStreamGetDevice_ptsz;
        cuStreamAttachMemAsync: 6000 cuStreamAttachMemAsync | cuStreamAttachMemAsync_ptsz;
        cuStreamAddCallback: 5000 cuStreamAddCallback | cuStreamAddCallback_ptsz;
        cuLaunchHostFunc: 10000 cuLaunchHostFunc | cuLaunchHostFunc_ptsz;
        cuStreamWaitValue32:
            8000 cuStreamWaitValue32 | cuStreamWaitValue32_ptsz, 11070 cuStreamWaitValue32_v2 | cuStreamWaitValue32_v2_ptsz;
        cuStreamWaitValue64:
            9000 cuStreamWaitValue64 | cuStreamWaitValue64_ptsz, 11070 cuStreamWaitValue64_v2 | cuStreamWaitValue64_v2_ptsz;
        cuStreamWriteValue32:
            8000 cuStreamWriteValue32 | cuStreamWriteValue32_ptsz, 11070 cuStreamWriteValue32_v2 | cuStreamWriteValue32_v2_ptsz;
        cuStreamWriteValue64:
            9000 cuStreamWriteValue64 | cuStreamWriteValue64_ptsz, 11070 cuStreamWriteValue64_v2 | cuStreamWriteValue64_v2_ptsz;
        cuStreamBatchMemOp:
            8000 cuStreamBatchMemOp | cuStreamBatchMemOp_ptsz, 11070 cuStreamBatchMemOp_v2 | cuStreamBatchMemOp_v2_ptsz;

        cuStreamBeginCapture:
            10000 cuStreamBeginCapture | cuStreamBeginCapture_ptsz, 10010 cuStreamBeginCapture_v2 | cuStreamBeginCapture_v2_ptsz;
        cuStreamEndCapture: 10000 cuStreamEndCapture | cuStreamEndCapture_ptsz;
        cuStreamIsCapturing: 10000 cuStreamIsCapturing | cuStreamIsCapturing_ptsz;
        cuStreamGetCaptureInfo:
            10010 cuStreamGetCaptureInfo | cuStreamGetCaptureInfo_ptsz,
            11030 cuStreamGetCaptureInfo_v2 | cuStreamGetCaptureInfo_v2_ptsz,
            12030 cuStreamGetCaptureInfo_v3 | cuStreamGetCaptureInfo_v3_ptsz;
        cuThreadExchangeStreamCaptureMode: 10010 cuThreadExchangeStreamCaptureMode;
        cuGraphCreate: 10000 cuGraphCreate;
        cuGraphDestroy: 10000 cuGraphDestroy;
        cuGraphInstantiate: 10000 cuGraphInstantiate, 11000 cuGraphInstantiate_v2, 12000 cuGraphInstantiateWithFlags;
        cuGraphInstantiateWithFlags: 11040 cuGraphInstantiateWithFlags;
        cuGraphInstantiateWithParams: 12000 cuGraphInstantiateWithParams;
        cuGraphExecDestroy: 10000 cuGraphExecDestroy;
        cuGraphExecUpdate: 12000 cuGraphExecUpdate_v2;
        cuGraphLaunch: 10000 cuGraphLaunch | cuGraphLaunch_ptsz;
        cuGraphGetNodes: 10000 cuGraphGetNodes;
        cuGraphAddKernelNode: 12000 cuGraphAddKernelNode_v2;
        cuGraphAddMemcpyNode: 10000 cuGraphAddMemcpyNode;
        cuGraphAddMemsetNode: 10000 cuGraphAddMemsetNode;
        cuGraphAddHostNode: 10000 cuGraphAddHostNode;
        cuGraphAddEmptyNode: 10000 cuGraphAddEmptyNode;
        cuGraphAddMemAllocNode: 11040 cuGraphAddMemAllocNode;
        cuGraphAddMemFreeNode: 11040 cuGraphAddMemFreeNode;

        cuEventCreate: 2000 cuEventCreate;
        cuEventDestroy: 2000 cuEventDestroy, 4000 cuEventDestroy_v2;
        cuEventRecord: 2000 cuEventRecord | cuEventRecord_ptsz;
        cuEventRecordWithFlags: 11010 cuEventRecordWithFlags | cuEventRecordWithFlags_ptsz;
        cuEventQuery: 2000 cuEventQuery;
        cuEventSynchronize: 2000 cuEventSynchronize;
        cuEventElapsedTime: 2000 cuEventElapsedTime, 12080 cuEventElapsedTime_v2;

        cuIpcGetMemHandle: 4010 cuIpcGetMemHandle;
        cuIpcOpenMemHandle: 4010 cuIpcOpenMemHandle, 11000 cuIpcOpenMemHandle_v2;
        cuIpcCloseMemHandle: 4010 cuIpcCloseMemHandle;
        cuIpcGetEventHandle: 4010 cuIpcGetEventHandle;
        cuIpcOpenEventHandle: 4010 cuIpcOpenEventHandle;

        cuModuleLoad: 2000 cuModuleLoad;
        cuModuleLoadData: 2000 cuModuleLoadData;
        cuModuleLoadDataEx: 2010 cuModuleLoadDataEx;
        cuModuleLoadFatBinary: 2000 cuModuleLoadFatBinary;
        cuModuleUnload: 2000 cuModuleUnload;
        cuModuleGetFunction: 2000 cuModuleGetFunction;
        cuModuleGetGlobal: 3020 cuModuleGetGlobal_v2;
        cuModuleGetLoadingMode: 11070 cuModuleGetLoadingMode;
        cuLibraryLoadData: 12000 cuLibraryLoadData;
        cuLibraryUnload: 12000 cuLibraryUnload;
        cuLibraryGetKernel: 12000 cuLibraryGetKernel;
        cuLibraryGetModule: 12000 cuLibraryGetModule;
        cuKernelGetFunction: 12000 cuKernelGetFunction;
        cuFuncGetAttribute: 2020 cuFuncGetAttribute;
        cuFuncSetAttribute: 9000 cuFuncSetAttribute;
        cuFuncSetCacheConfig: 3000 cuFuncSetCacheConfig;
        cuFuncGetModule: 11000 cuFuncGetModule;
        cuLaunchKernel: 4000 cuLaunchKernel | cuLaunchKernel_ptsz;
        cuLaunchKernelEx: 11060 cuLaunchKernelEx | cuLaunchKernelEx_ptsz;
        cuLaunchCooperativeKernel: 9000 cuLaunchCooperativeKernel | cuLaunchCooperativeKernel_ptsz;
        cuOccupancyMaxActiveBlocksPerMultiprocessor: 6050 cuOccupancyMaxActiveBlocksPerMultiprocessor;
        cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags: 7000 cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags;
        cuOccupancyMaxPotentialBlockSize: 6050 cuOccupancyMaxPotentialBlockSize;
        cuArrayCreate: 3020 cuArrayCreate_v2;
        cuArray3DCreate: 3020 cuArray3DCreate_v2;
        cuArrayGetDescriptor: 3020 cuArrayGetDescriptor_v2;
        cuArrayDestroy: 2000 cuArrayDestroy;
        cuMipmappedArrayCreate: 5000 cuMipmappedArrayCreate;
        cuMipmappedArrayDestroy: 5000 cuMipmappedArrayDestroy;
        cuTexObjectCreate: 5000 cuTexObjectCreate;
        cuTexObjectDestroy: 5000 cuTexObjectDestroy;
        cuSurfObjectCreate: 5000 cuSurfObjectCreate;
        cuSurfObjectDestroy: 5000 cuSurfObjectDestroy;
        cuGreenCtxCreate: 12040 cuGreenCtxCreate;
        cuGreenCtxDestroy: 12040 cuGreenCtxDestroy;
        cuProfilerStart: 4000 cuProfilerStart;
        cuProfilerStop: 4000 cuProfilerStop;
        cuImportExternalMemory: 10000 cuImportExternalMemory;
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(name: &CStr, version: c_int, flags: u64) -> (usize, c_int) {
        let (found, status) = look_up(name.as_ptr(), version, flags).unwrap();
        (found as usize, status)
    }

    #[test]
    fn the_version_chooses_the_variant() {
        let address = |f: *const ()| f as usize;
        assert_eq!(ask(c"cuMemAlloc", 3010, 0), (address(cuMemAlloc as *const ()), FOUND));
        assert_eq!(ask(c"cuMemAlloc", 3020, 0), (address(cuMemAlloc_v2 as *const ()), FOUND));
        assert_eq!(ask(c"cuMemAllocAsync", 11010, 0), (0, VERSION_TOO_LOW));
        assert_eq!(ask(c"cuMemAllocAsync", 11020, 0), (address(cuMemAllocAsync as *const ()), FOUND));
        assert_eq!(ask(c"cuMemAllocAsync", 11020, 2), (address(cuMemAllocAsync_ptsz as *const ()), FOUND));
        assert_eq!(ask(c"cuGetProcAddress", 11030, 0), (address(cuGetProcAddress as *const ()), FOUND));
        assert_eq!(ask(c"cuGetProcAddress", 12000, 0), (address(cuGetProcAddress_v2 as *const ()), FOUND));
        assert_eq!(ask(c"cuNoSuchThing", 13000, 0), (0, NOT_THERE));
        assert_eq!(ask(c"cuMemAlloc_v2", 13000, 0), (0, NOT_THERE));
    }

    #[test]
    fn variants_are_in_order_of_versions() {
        for pair in table().windows(2) {
            assert!(pair[0].name != pair[1].name || pair[0].since < pair[1].since, "{}", pair[1].name);
        }
    }
}
