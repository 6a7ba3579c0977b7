//! Result codes and C structures of the driver API.

use std::ffi::{c_char, c_int, c_void};

/// A result other than success.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub struct Code(pub u32);

pub type CuResult<T> = Result<T, Code>;
pub type Answer = CuResult<()>;

pub const SUCCESS: u32 = 0;

macro_rules! codes {
    ($($name:ident $code:literal $cuda:literal $text:literal;)*) => {
        $(#[allow(dead_code)] pub const $name: Code = Code($code);)*
        /// The name and the description of a code, both ending in NUL.
        pub fn describe(code: u32) -> Option<(&'static str, &'static str)> {
            match code {
                0 => Some(("CUDA_SUCCESS\0", "no error\0")),
                $($code => Some((concat!("CUDA_ERROR_", $cuda, "\0"), concat!($text, "\0"))),)*
                _ => None,
            }
        }
    };
}

codes! {
    INVALID_VALUE 1 "INVALID_VALUE" "invalid argument";
    OUT_OF_MEMORY 2 "OUT_OF_MEMORY" "out of memory";
    NOT_INITIALIZED 3 "NOT_INITIALIZED" "initialization error";
    DEINITIALIZED 4 "DEINITIALIZED" "driver shutting down";
    NO_DEVICE 100 "NO_DEVICE" "no CUDA-capable device is detected";
    INVALID_DEVICE 101 "INVALID_DEVICE" "invalid device ordinal";
    INVALID_IMAGE 200 "INVALID_IMAGE" "device kernel image is invalid";
    INVALID_CONTEXT 201 "INVALID_CONTEXT" "invalid device context";
    MAP_FAILED 205 "MAP_FAILED" "mapping of buffer object failed";
    UNMAP_FAILED 206 "UNMAP_FAILED" "unmapping of buffer object failed";
    ALREADY_MAPPED 208 "ALREADY_MAPPED" "resource already mapped";
    NOT_MAPPED 211 "NOT_MAPPED" "resource not mapped";
    UNSUPPORTED_LIMIT 215 "UNSUPPORTED_LIMIT" "limit is not supported on this architecture";
    PEER_ACCESS_UNSUPPORTED 217 "PEER_ACCESS_UNSUPPORTED" "peer access is not supported between these two devices";
    SHARED_OBJECT_SYMBOL_NOT_FOUND 302 "SHARED_OBJECT_SYMBOL_NOT_FOUND" "shared object symbol not found";
    OPERATING_SYSTEM 304 "OPERATING_SYSTEM" "OS call failed or operation not supported on this OS";
    INVALID_HANDLE 400 "INVALID_HANDLE" "invalid resource handle";
    ILLEGAL_STATE 401 "ILLEGAL_STATE" "the operation cannot be performed in the present state";
    NOT_FOUND 500 "NOT_FOUND" "named symbol not found";
    NOT_READY 600 "NOT_READY" "device not ready";
    ILLEGAL_ADDRESS 700 "ILLEGAL_ADDRESS" "an illegal memory access was encountered";
    PEER_ACCESS_ALREADY_ENABLED 704 "PEER_ACCESS_ALREADY_ENABLED" "peer access is already enabled";
    PEER_ACCESS_NOT_ENABLED 705 "PEER_ACCESS_NOT_ENABLED" "peer access has not been enabled";
    PRIMARY_CONTEXT_ACTIVE 708 "PRIMARY_CONTEXT_ACTIVE" "cannot set while device is active in this process";
    CONTEXT_IS_DESTROYED 709 "CONTEXT_IS_DESTROYED" "context is destroyed";
    HOST_MEMORY_ALREADY_REGISTERED 712 "HOST_MEMORY_ALREADY_REGISTERED" "part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED 713 "HOST_MEMORY_NOT_REGISTERED" "pointer does not correspond to a registered memory region";
    LAUNCH_FAILED 719 "LAUNCH_FAILED" "unspecified launch failure";
    NOT_PERMITTED 800 "NOT_PERMITTED" "operation not permitted";
    NOT_SUPPORTED 801 "NOT_SUPPORTED" "operation not supported";
    STREAM_CAPTURE_UNSUPPORTED 900 "STREAM_CAPTURE_UNSUPPORTED" "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED 901 "STREAM_CAPTURE_INVALIDATED" "operation failed due to a previous error during capture";
    STREAM_CAPTURE_MERGE 902 "STREAM_CAPTURE_MERGE" "operation would result in a merge of separate capture sequences";
    STREAM_CAPTURE_UNMATCHED 903 "STREAM_CAPTURE_UNMATCHED" "capture was not ended in the same stream as it began";
    STREAM_CAPTURE_UNJOINED 904 "STREAM_CAPTURE_UNJOINED" "capturing stream has unjoined work";
    STREAM_CAPTURE_ISOLATION 905 "STREAM_CAPTURE_ISOLATION" "dependency created on uncaptured work in another stream";
    STREAM_CAPTURE_IMPLICIT 906 "STREAM_CAPTURE_IMPLICIT" "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT 907 "CAPTURED_EVENT" "operation not permitted on an event last recorded in a capturing stream";
    STREAM_CAPTURE_WRONG_THREAD 908 "STREAM_CAPTURE_WRONG_THREAD" "attempt to terminate a thread-local capture sequence from another thread";
    UNKNOWN 999 "UNKNOWN" "unknown error";
}

#[repr(C)]
#[derive(Copy, Clone, Default, Debug, PartialEq, Eq)]
pub struct MemLocation {
    pub kind: c_int,
    pub id: c_int,
}

impl MemLocation {
    pub const DEVICE: c_int = 1;
    pub const HOST: c_int = 2;
    pub const HOST_NUMA: c_int = 3;
    pub const HOST_NUMA_CURRENT: c_int = 4;

    pub fn device(ordinal: i32) -> MemLocation {
        MemLocation { kind: MemLocation::DEVICE, id: ordinal }
    }
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct AllocationProp {
    pub kind: c_int,
    pub handle_types: c_int,
    pub location: MemLocation,
    pub win32: *mut c_void,
    pub compression: u8,
    pub rdma_capable: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct AccessDesc {
    pub location: MemLocation,
    pub flags: c_int,
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct PoolProps {
    pub kind: c_int,
    pub handle_types: c_int,
    pub location: MemLocation,
    pub win32: *mut c_void,
    pub max_size: usize,
    pub usage: u16,
    pub reserved: [u8; 54],
}

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct IpcMemHandle {
    pub reserved: [u8; 64],
}

/// `CUuuid`.
#[repr(C)]
#[derive(Copy, Clone)]
pub struct Uuid {
    pub bytes: [c_char; 16],
}

/// Writes through an out pointer of the caller; NULL is an invalid value.
pub fn write<T>(out: *mut T, value: T) -> Answer {
    if out.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller of the driver vouches for its out pointers, which are not NULL here.
    unsafe { out.write(value) };
    Ok(())
}

/// As `write`, where the API lets the pointer be NULL.
pub fn write_optional<T>(out: *mut T, value: T) {
    if !out.is_null() {
        let _ = write(out, value);
    }
}

/// Reads through an in pointer of the caller; NULL is an invalid value.
pub fn read<T: Copy>(from: *const T) -> CuResult<T> {
    if from.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller of the driver vouches for its in pointers, which are not NULL here.
    Ok(unsafe { from.read() })
}
