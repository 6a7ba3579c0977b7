//! The last error of a thread, and what errors are called.

use std::cell::Cell;
use std::ffi::{CStr, c_char};

thread_local!(static LAST: Cell<u32> = const { Cell::new(0) });

/// Errors become the thread's last error, but for "not ready", which is an answer.
pub fn record(r: Result<(), u32>) -> u32 {
    let code = r.err().unwrap_or(0);
    if code != 0 && code != 600 {
        LAST.set(code);
    }
    code
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetLastError() -> u32 {
    LAST.replace(0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaPeekAtLastError() -> u32 {
    LAST.get()
}

/// Number, name, text. `CUresult` and `cudaError_t` agree in their numbers.
const TEXTS: &[(u32, &CStr, &CStr)] = &[
    (0, c"cudaSuccess", c"no error"),
    (1, c"cudaErrorInvalidValue", c"invalid argument"),
    (2, c"cudaErrorMemoryAllocation", c"out of memory"),
    (3, c"cudaErrorInitializationError", c"initialization error"),
    (4, c"cudaErrorCudartUnloading", c"driver shutting down"),
    (35, c"cudaErrorInsufficientDriver", c"no usable driver"),
    (100, c"cudaErrorNoDevice", c"no device"),
    (101, c"cudaErrorInvalidDevice", c"invalid device ordinal"),
    (201, c"cudaErrorDeviceUninitialized", c"invalid device context"),
    (400, c"cudaErrorInvalidResourceHandle", c"invalid resource handle"),
    (500, c"cudaErrorSymbolNotFound", c"named symbol not found"),
    (600, c"cudaErrorNotReady", c"device not ready"),
    (704, c"cudaErrorPeerAccessAlreadyEnabled", c"peer access is already enabled"),
    (705, c"cudaErrorPeerAccessNotEnabled", c"peer access has not been enabled"),
    (709, c"cudaErrorContextIsDestroyed", c"context is destroyed"),
    (801, c"cudaErrorNotSupported", c"operation not supported"),
    (900, c"cudaErrorStreamCaptureUnsupported", c"operation not permitted while a stream is capturing"),
    (901, c"cudaErrorStreamCaptureInvalidated", c"the capture was invalidated by an earlier error"),
    (906, c"cudaErrorStreamCaptureImplicit", c"operation would make the legacy stream depend on a capturing stream"),
];

fn text(code: u32) -> (&'static CStr, &'static CStr) {
    TEXTS.iter().find(|t| t.0 == code).map_or((c"cudaErrorUnknown", c"unknown error"), |t| (t.1, t.2))
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorName(code: u32) -> *const c_char {
    text(code).0.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaGetErrorString(code: u32) -> *const c_char {
    text(code).1.as_ptr()
}
